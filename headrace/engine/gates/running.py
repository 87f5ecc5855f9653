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
        return Verdict.ADMIT if state.num_taken + sequence.num_places <= self.max_running else Verdict.STOP
