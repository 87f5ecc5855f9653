"""A grammar without a vocabulary: what it allows is drawn from the tokens so far, and some tokens are forced."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.core.randomness import mix


class PatternGrammar:
    def __init__(self, seed: int, vocab_size: int) -> None:
        self.seed = seed
        self.vocab_size = vocab_size
        self.max_tokens = None

    def start(self) -> PatternMatcher:
        return PatternMatcher(self)


class PatternMatcher:
    error = None

    def __init__(self, grammar: PatternGrammar) -> None:
        self._grammar = grammar
        self._history = grammar.seed
        self.num_read = 0

    def read(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._history = mix(self._history * 31 + token + 1 & (1 << 64) - 1)
            self.num_read += 1

    def allowed(self) -> bytes:
        size = self._grammar.vocab_size
        allowed = np.random.default_rng(self._history).random(size) < 0.2
        allowed[self._history % size] = True
        if forced := self.forced():
            allowed[:] = False
            allowed[forced[0]] = True
        packed = np.packbits(allowed, bitorder="little").tobytes()
        return packed + bytes(-len(packed) % 4)

    def forced(self) -> tuple[int, ...]:
        """Runs of up to four, from the second token of each seven on."""
        at = self.num_read % 7
        return tuple((self._grammar.seed + n) % self._grammar.vocab_size for n in range(at, 6)) if 2 <= at < 6 else ()
