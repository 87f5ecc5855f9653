"""Tokens that interrupt a repeat: those whose text has one of some strings in it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from headrace.text.tokenizer import Tokenizer

DEFAULT_BREAKERS = ("\n", ":", '"', "*")
"""Line ends and the marks of speakers, quotes and emphasis: a text may come back to them as often as it likes."""


@lru_cache(maxsize=8)  # a vocabulary takes some 20 ms, and clients send the same few strings
def tokens_containing(tokenizer: Tokenizer, strings: Sequence[str]) -> frozenset[int]:
    """The ids of tokens whose bytes contain those of any of `strings` (a tuple: it is hashed)."""
    wanted = [string.encode() for string in strings]
    return frozenset(token for token, piece in enumerate(tokenizer.pieces) if any(string in piece for string in wanted))
