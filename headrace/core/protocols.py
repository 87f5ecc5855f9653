"""What the engine asks of the parts that do things."""

from __future__ import annotations

from typing import Protocol

from headrace.core.plan import StepPlan
from headrace.core.result import StepResult


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
