"""What the engine asks of the parts that do things, and of those that know things."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from headrace.core.plan import StepPlan
from headrace.core.request import Request
from headrace.core.result import StepResult
from headrace.core.sequence import Sequence


class Pending(Protocol):
    """A launched step."""

    def result(self) -> StepResult:
        """Wait for the step to end; plans end in the order of their launch."""
        ...


class Executor(Protocol):
    """Runs plans in the order of their launch."""

    def launch(self, plan: StepPlan) -> Pending:
        """Start a step. The plan and the block tables it names are read before this returns.

        An executor that can jump may take up to `plan.horizon` steps at once (see `StepResult.earlier`).
        """
        ...


class LengthPrediction(NamedTuple):
    """Tokens of a reply, as expected before it is generated."""

    expected: float
    """As likely too many as too few (the median)."""
    high: float
    """What nine in ten replies do not exceed: for reserving memory."""


class LengthPredictor(Protocol):
    """Knows something of how long replies will be. Pure: what it says follows from what it has observed."""

    def predict(self, request: Request, bound: int) -> LengthPrediction:
        """`bound`: tokens that no reply to this request exceeds; it is at least 1."""
        ...

    def observe(self, request: Request, num_generated: int) -> None:
        """A reply has ended by itself, by a stop token or its limit."""
        ...


class Drafter(Protocol):
    """Guesses how sequences go on. A wrong guess costs time and never changes a token."""

    def propose(self, sequence: Sequence, max_tokens: int) -> tuple[int, ...]:
        """The next tokens, at most `max_tokens` of them; empty where there is no guess."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended. Unknown ones are ignored."""
        ...
