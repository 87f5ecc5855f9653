"""Waiting requests that will be late whatever is done now."""

from __future__ import annotations

from heapq import heappop, heappush

from headrace.core.sequence import Sequence
from headrace.engine.state import EngineState


class Lateness:
    """A heap by the last moment at which each could start alone and be in time, by predicted length and the cost model
    of steps as of its arrival. An entry enters and leaves once."""

    def __init__(self) -> None:
        self._latest: list[tuple[float, int]] = []
        """(latest start, id)."""
        self._live: dict[int, Sequence] = {}

    def arrived(self, sequence: Sequence, state: EngineState) -> None:
        """A request, which is in the ledger."""
        if sequence.request.deadline_s is not None:
            latest_s = sequence.request.deadline_s - state.ledger.remaining_s(sequence, 1)
            heappush(self._latest, (latest_s, sequence.id))
            self._live[sequence.id] = sequence

    def ended(self, sequence: Sequence) -> None:
        self._live.pop(sequence.id, None)

    def found(self, now: float) -> list[Sequence]:
        """Those that have not ended and whose moment has passed, started or not; each once."""
        passed = []
        while self._latest and self._latest[0][0] < now:
            sequence = self._live.pop(heappop(self._latest)[1], None)
            if sequence is not None:
                passed.append(sequence)
        return passed
