"""How many tokens one step may compute."""

from __future__ import annotations

from typing import Protocol

from headrace.engine.state import EngineState


class TokenBudget(Protocol):
    max_tokens: int
    """No step's budget is larger."""

    def tokens(self, state: EngineState, now: float) -> int: ...


class FixedBudget:
    """The same number each step."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens

    def tokens(self, state: EngineState, now: float) -> int:
        return self.max_tokens
