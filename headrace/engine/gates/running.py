"""A bound on the sequences that run at once."""

from __future__ import annotations

from headrace.core.sequence import Sequence
from headrace.engine.gates import Verdict
from headrace.engine.state import EngineState


class RunningGate:
    """At most `max_running` sequences, counting the choices a request has yet to fork into."""

    def __init__(self, max_running: int) -> None:
        self.max_running = max_running

    def ask(self, sequence: Sequence, state: EngineState, now: float) -> Verdict:
        num_running = sum(1 + len(running.unborn) for running in state.running)
        fits = num_running + 1 + len(sequence.unborn) <= self.max_running
        return Verdict.ADMIT if fits else Verdict.STOP
