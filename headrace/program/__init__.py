"""A model as data: a flat list of ops over the tokens of a step. Standard library only."""
