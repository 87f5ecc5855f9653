"""A prefix being computed is shared too."""

from __future__ import annotations

from headrace.core.sequence import Sequence
from headrace.engine.gates import Verdict
from headrace.engine.state import EngineState


class PrefixGate:
    """Skips a sequence that will have a longer hit when a running sequence has computed a few steps more.

    No deadlock: the announcing sequence runs, and whatever ends its run (preemption, abort) takes it back.
    """

    def ask(self, sequence: Sequence, state: EngineState, now: float) -> Verdict:
        return Verdict.SKIP if state.memory.is_being_computed(sequence) else Verdict.ADMIT
