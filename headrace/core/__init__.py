"""The vocabulary every other package speaks: plain data and protocols, standard library only."""
