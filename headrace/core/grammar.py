"""What a reply may be: grammars, as the scheduler and the executors see them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Matcher(Protocol):
    """How far one reply has come in its grammar. A pure function of the tokens it has read."""

    num_read: int

    @property
    def error(self) -> str | None:
        """Why it cannot go on (a step became too expensive, a token does not fit); for good."""
        ...

    def read(self, tokens: Sequence[int]) -> None:
        """The next tokens of the reply."""
        ...

    def allowed(self) -> bytes:
        """A bit per token id, the lowest of each byte first: whether the token may come next. Never all zeros."""
        ...

    def forced(self) -> tuple[int, ...]:
        """The tokens that have to come next whatever is sampled: `allowed` has these only, one after the other."""
        ...


class Grammar(Protocol):
    """Compiled, shared by all replies that have to follow it. Where a reply is complete it allows the model's ends."""

    max_tokens: int | None
    """No reply is longer, its end token included; None: not known. What the scheduler may plan with."""

    def start(self) -> Matcher: ...
