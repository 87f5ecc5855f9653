"""Who would be late is told at once, while it can still go elsewhere: early rejection (Mooncake, Qin et al. 2024)."""

from __future__ import annotations

from headrace.core.errors import Overloaded
from headrace.core.sequence import Sequence
from headrace.core.work import StepWork
from headrace.engine.backlog import seconds_to_start
from headrace.engine.state import EngineState


class DeadlineGate:
    """An entry gate: refuses a request that is predicted to miss its own deadline, or the objective for first tokens.

    By the backlog (`headrace.engine.backlog`) and the cost model of steps; as long as that knows nothing, nobody is
    refused. Those of batch class have no objective but their own deadline.
    """

    def __init__(self, max_running: int, ttft_s: float | None = None, *, deadlines: bool = True) -> None:
        """`ttft_s`: the objective, if there is one. `deadlines`: whether requests' own count."""
        self._max_running = max_running
        self._ttft_s = ttft_s
        self._deadlines = deadlines

    def check(self, sequence: Sequence, state: EngineState, now: float) -> None:
        request, ledger = sequence.request, state.ledger
        deadline_s = request.deadline_s if self._deadlines else None
        ttft_s = None if request.is_batch else self._ttft_s
        if deadline_s is None and ttft_s is None:
            return
        wait_s = seconds_to_start(state, self._max_running)
        first_s = wait_s + ledger.costs.seconds(StepWork.of_prompt(sequence.num_prompt))
        if ttft_s is not None and first_s > ttft_s:
            raise Overloaded(
                "overloaded",
                f"The first token would come in about {first_s:.1f} s; this server promises {ttft_s:.1f} s. "
                "Try again later.",
                retry_after_s=first_s - ttft_s,
            )
        if deadline_s is None:
            return
        num_streams = min(self._max_running, len(state.running) + 1)
        step_s = ledger.costs.seconds(StepWork.of_streams(num_streams, num_streams * sequence.num_prompt))
        late_s = now + first_s + ledger.predict(sequence).expected * step_s - deadline_s
        if late_s > 0:
            raise Overloaded(
                "deadline",
                f"The reply would be complete about {late_s:.1f} s after its deadline. Try again later, ask for "
                "less, or allow more time.",
                param="deadline_ms",
                retry_after_s=late_s,
            )
