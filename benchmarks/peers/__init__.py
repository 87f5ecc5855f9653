"""Headrace beside its peers, on the same files and threads: `make bench-peers`."""
