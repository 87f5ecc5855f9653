"""What one tenant may have at once."""

from __future__ import annotations

from headrace.core.errors import Overloaded
from headrace.core.sequence import Sequence
from headrace.engine.backlog import seconds_to_start
from headrace.engine.gates import Verdict
from headrace.engine.state import EngineState


class QuotaGate:
    """Tokens, of prompts and predicted replies, that may run and that may wait for each tenant; None: no bound.

    A gate and an entry gate. A tenant that has nothing running may start whatever it has, and one that has nothing
    waiting may submit it: no request is too large for ever.
    """

    def __init__(self, max_running_tokens: int | None, max_queued_tokens: int | None, max_running: int) -> None:
        """`max_running`: places of the engine."""
        self._max_running_tokens = max_running_tokens
        self._max_queued_tokens = max_queued_tokens
        self._max_running = max_running

    def ask(self, sequence: Sequence, state: EngineState, now: float) -> Verdict:
        ledger, most = state.ledger, self._max_running_tokens
        if most is None or ledger.has_run(sequence.request):  # whoever was preempted has its quota still
            return Verdict.ADMIT
        num_running = ledger.tenants[sequence.request.tenant].num_running
        if num_running and num_running + ledger.num_tokens_of(sequence.request) > most:
            return Verdict.SKIP
        return Verdict.ADMIT

    def check(self, sequence: Sequence, state: EngineState, now: float) -> None:
        most, use = self._max_queued_tokens, state.ledger.tenants.get(sequence.request.tenant)
        if most is None or use is None or not use.num_queued:
            return
        num_more = sequence.num_prompt + round(state.ledger.predict(sequence).expected) * sequence.request.num_choices
        if use.num_queued + num_more > most:
            raise Overloaded(
                "tenant_quota",
                f"{use.num_queued} tokens of yours are waiting and this request would bring {num_more} more; the quota "
                f"is {most}. Wait for some of your requests to start.",
                retry_after_s=max(1.0, seconds_to_start(state, self._max_running)),
            )
