"""A budget for reasoning, and what has to come after it."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.core.grammar import Grammar, Matcher
from headrace.text.grammar.vocabulary import Bytes, one_of


class ReasonedGrammar:
    """Reasoning, then a reply that follows `then` (or is free); the reasoning is ended after `budget` tokens."""

    def __init__(
        self,
        then: Grammar | None,
        *,
        close: Sequence[int],
        vocabulary: Bytes,
        open: int | None = None,
        budget: int | None = None,
    ) -> None:
        """`close`: the tokens of the mark that ends the reasoning. `open`: the token that begins it, which the reply
        may or may not start with; None: the prompt has begun it."""
        self.max_tokens = (
            None
            if budget is None or then is None or then.max_tokens is None
            else (budget + len(close) + 1 + then.max_tokens)
        )
        self._then = then
        self._close = tuple(close)
        self._close_bytes = b"".join(vocabulary.tokens[token] for token in close)
        self._open = open
        self._budget = budget
        self._vocabulary = vocabulary
        everything = bytearray(b"\xff" * vocabulary.mask_bytes)
        self._everything = bytes(everything)
        for token in vocabulary.eos_token_ids:
            everything[token // 8] &= ~(1 << token % 8)
        self._endless = bytes(everything)

    def start(self) -> Matcher:
        return _Reasoned(self, None if self._then is None else self._then.start())


class _Reasoned:
    def __init__(self, grammar: ReasonedGrammar, then: Matcher | None) -> None:
        self._grammar = grammar
        self._then = then
        self.num_read = 0
        self._state = "reasoning" if grammar._open is None else "start"
        self._num_reasoned = 0
        self._tail = b""
        self._closing: tuple[int, ...] = ()
        self._error: str | None = None

    @property
    def error(self) -> str | None:
        return self._error or (self._then.error if self._then else None)

    def read(self, tokens: Sequence[int]) -> None:
        for i, token in enumerate(tokens):
            if self._state == "answer":
                if self._then is not None:
                    self._then.read(tokens[i:])
                self.num_read += len(tokens) - i
                return
            self.num_read += 1
            if self._state == "start":
                self._state = "reasoning" if token == self._grammar._open else "answer"
                if self._state == "answer" and self._then is not None:
                    self._then.read((token,))
            else:
                self._reason(token)

    def _reason(self, token: int) -> None:
        grammar = self._grammar
        self._num_reasoned += 1
        if self._closing:
            self._closing = self._closing[1:]
        self._tail += grammar._vocabulary.tokens[token]
        at = self._tail.find(grammar._close_bytes)
        if at < 0:
            self._tail = self._tail[-len(grammar._close_bytes) :]
            if grammar._budget is not None and self._num_reasoned >= grammar._budget and not self._closing:
                self._closing = grammar._close
            return
        self._state = "answer"
        rest = self._tail[at + len(grammar._close_bytes) :]
        if self._then is not None and rest.strip():
            self._error = "the reasoning and the answer share a token"

    def allowed(self) -> bytes:
        grammar = self._grammar
        if self._state == "reasoning":
            return one_of(self._closing[:1], len(grammar._endless)) if self._closing else grammar._endless
        mask = grammar._everything if self._then is None else self._then.allowed()
        if self._state == "start":
            assert grammar._open is not None
            opening = one_of((grammar._open,), len(mask))
            return bytes(a | b for a, b in zip(mask, opening, strict=True))
        return mask

    def forced(self) -> tuple[int, ...]:
        if self._state == "reasoning":
            return self._closing
        return self._then.forced() if self._then is not None and self._state == "answer" else ()
