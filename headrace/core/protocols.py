"""What the engine asks of the parts that do things."""

from __future__ import annotations

from typing import Protocol

from headrace.core.plan import StepPlan
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
        """Start a step. The plan and the block tables it names are read before this returns."""
        ...


class Drafter(Protocol):
    """Guesses how sequences go on. A wrong guess costs time and never changes a token."""

    def propose(self, sequence: Sequence, max_tokens: int) -> tuple[int, ...]:
        """The next tokens, at most `max_tokens` of them; empty where there is no guess."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended. Unknown ones are ignored."""
        ...
