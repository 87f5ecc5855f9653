"""Structured output: what a reply may be, compiled into masks over the vocabulary by llguidance."""
