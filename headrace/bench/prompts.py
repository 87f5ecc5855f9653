"""Prompts of an exact number of tokens.

They are made of tokens that are one whole word each (" river"): the text of any row of them encodes to the same row
again, so that a prompt has the same length whether a target is sent its ids or its text.
"""

from __future__ import annotations

import random
import re

from headrace.core.errors import ConfigurationError
from headrace.text.tokenizer import Tokenizer

MAX_WORDS = 4096
MIN_WORDS = 16
_WORD = re.compile(rb" [a-z]{3,10}")
_LETTER = re.compile(rb"[a-z]")


class PromptMaker:
    """Makes token rows out of a tokenizer's whole words. Raises `ConfigurationError` for a vocabulary without any."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.words = _words(tokenizer, _WORD)
        if len(self.words) < MIN_WORDS:  # a vocabulary of bytes or characters
            self.words = _words(tokenizer, _LETTER)
        if len(self.words) < MIN_WORDS:
            raise ConfigurationError(
                f"this tokenizer has {len(self.words)} tokens that are one lower-case word and stay one beside others; "
                f"{MIN_WORDS} are needed to make prompts of exact lengths. Pass --tokenizer of another model."
            )

    def make(self, seed: int, kind: str, number: int, count: int) -> tuple[int, ...]:
        """`count` tokens, a pure function of the arguments. Rows of one kind that differ in `number` differ from the
        first token on (as long as there are words), so that what is not meant to be shared is not."""
        if count <= 0:
            return ()
        # Strings seed by SHA-512: the same on every machine and in every process.
        first = self.words[(random.Random(f"{seed} {kind}").randrange(len(self.words)) + number) % len(self.words)]
        return (first, *random.Random(f"{seed} {kind} {number}").choices(self.words, k=count - 1))

    def text(self, ids: tuple[int, ...]) -> str:
        """The text of a row. Raises `ConfigurationError` if it does not encode to the row."""
        text = self._tokenizer.decode(ids)
        found = self._tokenizer.encode(text)
        if tuple(found) != ids:
            raise ConfigurationError(
                f"a prompt of {len(ids)} tokens encodes to {len(found)} when sent as text; send token ids "
                "(--prompt-as tokens) or report the tokenizer as a bug."
            )
        return text


def _words(tokenizer: Tokenizer, pattern: re.Pattern[bytes]) -> list[int]:
    found = [
        token
        for token, piece in enumerate(tokenizer.pieces)
        if pattern.fullmatch(piece) and token not in tokenizer.special_ids
    ]
    # Spread over the vocabulary: low ids are the most frequent words, and a model's experts and caches may care.
    step = max(1, len(found) // MAX_WORDS)
    found = found[::step][:MAX_WORDS]
    # What changes in company is left out: a pair with itself and with its neighbour shows every merge there could be
    # across a word's edge, for no merge reaches over a space in the middle of a word's text.
    together = [token for token in found for _ in range(2)]
    if tokenizer.encode(tokenizer.decode(together)) == together:
        return found
    return [token for token in found if tokenizer.encode(tokenizer.decode([token] * 3)) == [token] * 3]
