"""By the time that is left until `Request.deadline_s`. Requests without one come last, in order of arrival.

Earliest deadline first meets all deadlines of one machine that can be met (Liu and Layland 1973), and so does least
slack first (Mok 1983), which weighs how much is left to do; in overload both spend themselves on what is late
already, which is what `drop_late` is for. Each displaces a running sequence only where both will be in time: the
victim after its restoring, by the cost model of steps.
"""

from __future__ import annotations

import math

from headrace.core.sequence import Sequence
from headrace.core.work import StepWork
from headrace.engine.policies import Ordered
from headrace.engine.state import EngineState


class EarliestDeadline(Ordered):
    """key = deadline."""

    def __init__(self, state: EngineState) -> None:
        self._state = state

    def key(self, sequence: Sequence, now: float) -> tuple:
        return (_deadline_s(sequence), sequence.arrival_s, sequence.id)

    def displaces(self, sequence: Sequence, victim: Sequence, now: float) -> bool:
        wanted_s, waits_s = _deadline_s(sequence), self._remaining_s(sequence)
        if not now + waits_s <= wanted_s < _deadline_s(victim):
            return False
        restoring_s = self._state.ledger.costs.seconds(StepWork.of_prompt(victim.num_computed))
        return now + waits_s + restoring_s + self._remaining_s(victim) <= _deadline_s(victim)

    def _remaining_s(self, sequence: Sequence) -> float:
        return self._state.ledger.remaining_s(sequence, len(self._state.running))


class LeastSlack(EarliestDeadline):
    """key = deadline - predicted seconds to the end. Slack is that less the time, which is the same for all who wait:
    so the order holds while nobody is served, and keys need not change."""

    def key(self, sequence: Sequence, now: float) -> tuple:
        return (_deadline_s(sequence) - self._remaining_s(sequence), sequence.arrival_s, sequence.id)


def _deadline_s(sequence: Sequence) -> float:
    return math.inf if sequence.request.deadline_s is None else sequence.request.deadline_s
