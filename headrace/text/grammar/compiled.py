"""Grammars and matchers over llguidance."""

from __future__ import annotations

from collections.abc import Sequence

import llguidance

from headrace.core.grammar import Matcher
from headrace.text.grammar.vocabulary import Bytes, one_of

LIMITS = llguidance.LLParserLimits(
    step_lexer_fuel=28_000,  # about 2 ms a mask, as is the next one
    step_max_items=40_000,
    verbose_errors=False,  # errors go to clients and logs: they must not show what others asked for
)


def wrap(vocabulary: Bytes) -> llguidance.LLTokenizer:
    """Takes some 0.2 s for 50,000 tokens."""
    return llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(vocabulary), n_vocab=len(vocabulary.tokens), eos_token=vocabulary.eos_token_ids
    )


class CompiledGrammar:
    """A `Grammar`. Its matchers are copies of one, which has been compiled and shares its lexer's states with them."""

    def __init__(self, first: llguidance.LLMatcher, max_tokens: int | None) -> None:
        self._first = first
        self.max_tokens = max_tokens

    def start(self) -> Matcher:
        return LLMatcher(self._first.deep_copy())


class LLMatcher:
    """A `Matcher`."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher
        self.num_read = 0
        self.error: str | None = None

    def read(self, tokens: Sequence[int]) -> None:
        self.num_read += len(tokens)
        self._matcher.consume_tokens(list(tokens))
        self._note_error()

    def allowed(self) -> bytes:
        """Where bytes are forced, only the token that the tokenizer begins them with: the model reads text tokenized as
        it was trained, and the token needs no sampling."""
        forced = self._matcher.compute_ff_tokens()
        mask = self._matcher.compute_bitmask()
        self._note_error()
        if not forced or self.error:
            return mask
        return one_of(forced[:1], len(mask))

    def forced(self) -> tuple[int, ...]:
        return tuple(self._matcher.compute_ff_tokens())

    def _note_error(self) -> None:
        if self._matcher.is_error():
            self.error = self._matcher.get_error().splitlines()[0]
