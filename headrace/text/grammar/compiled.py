"""Grammars and matchers over llguidance."""

from __future__ import annotations

from collections.abc import Sequence

import llguidance

from headrace.core.grammar import Matcher
from headrace.text.grammar.vocabulary import Bytes, one_of

LIMITS = llguidance.LLParserLimits(
    step_lexer_fuel=28_000,  # about 2 ms a mask, as is the next one
    step_max_items=40_000,
    max_lexer_states=20_000,  # of 1-2 KB each
    verbose_errors=False,  # errors go to clients and logs: they must not show what others asked for
)


_CHAR = r'[^"\\\x00-\x1F\x7F]'
SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{_CHAR}{{1,{n}}}" for n in (2, 4, 6, 8, 10, 13, 16, 20, 30)), f"{_CHAR}+"]
"""Tokens that are known to fit wherever a string of JSON may still be as long. With the library's own (10, 30 and any
length) a mask inside a string of bounded length took five times as long, 0.2 ms for 49,000 tokens."""


def wrap(vocabulary: Bytes) -> llguidance.LLTokenizer:
    """Takes some 0.2 s for 50,000 tokens."""
    return llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(vocabulary),
        n_vocab=len(vocabulary.tokens),
        eos_token=vocabulary.eos_token_ids,
        slices=SLICES,
    )


class CompiledGrammar:
    """A `Grammar`. Its matchers are copies of one, which has been compiled and shares its lexer's states with them."""

    def __init__(self, first: llguidance.LLMatcher, num_bytes: int, max_tokens: int | None) -> None:
        """`num_bytes`: of a mask."""
        self._first = first
        self._num_bytes = num_bytes
        self.max_tokens = max_tokens

    def start(self) -> Matcher:
        return LLMatcher(self._first.deep_copy(), self._num_bytes)


class LLMatcher:
    """A `Matcher`."""

    def __init__(self, matcher: llguidance.LLMatcher, num_bytes: int) -> None:
        self._matcher = matcher
        self._num_bytes = num_bytes
        self.num_read = 0
        self.error: str | None = None

    def read(self, tokens: Sequence[int]) -> None:
        self.num_read += len(tokens)
        self._matcher.consume_tokens(list(tokens))
        self._note_error()

    def allowed(self) -> bytes:
        """Where bytes are forced, only the token that the tokenizer begins them with: the model reads text tokenized as
        it was trained, and the token needs no sampling."""
        if forced := self._matcher.compute_ff_tokens():
            return one_of(forced[:1], self._num_bytes)
        mask = self._matcher.compute_bitmask()
        self._note_error()
        return mask

    def forced(self) -> tuple[int, ...]:
        return tuple(self._matcher.compute_ff_tokens())

    def _note_error(self) -> None:
        if self._matcher.is_error():
            self.error = self._matcher.get_error().splitlines()[0]
