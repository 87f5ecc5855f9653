"""Readers of checkpoint files."""
