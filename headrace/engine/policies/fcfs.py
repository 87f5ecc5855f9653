"""First come, first served."""

from __future__ import annotations

from headrace.core.sequence import Sequence
from headrace.engine.policies import Ordered


class FirstComeFirstServed(Ordered):
    """By arrival; a preempted sequence returns to its old place. The latest arrival is the victim."""

    is_steady = True

    def key(self, sequence: Sequence, now: float) -> tuple:
        return (sequence.arrival_s, sequence.id)
