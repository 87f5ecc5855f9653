"""Waiting spells that last too long."""

from __future__ import annotations

from collections import deque

from headrace.core.sequence import Sequence, Status


class WaitingSpells:
    """Tells of each sequence that has waited `max_s` without a break, once per spell. A spell enters a deque and leaves
    it once: O(1) each, and no queue is gone through."""

    def __init__(self, max_s: float) -> None:
        self.max_s = max_s
        self._due: deque[tuple[float, int]] = deque()
        """(when the spell will have lasted too long, id), in order."""
        self._latest: dict[int, tuple[float, Sequence]] = {}
        """Id -> its latest spell, as long as that is neither told nor forgotten."""

    def begin(self, sequence: Sequence, now: float) -> None:
        due_s = now + self.max_s
        self._due.append((due_s, sequence.id))
        self._latest[sequence.id] = (due_s, sequence)

    def due(self, now: float) -> list[Sequence]:
        found = []
        while self._due and self._due[0][0] <= now:
            due_s, id = self._due.popleft()
            latest = self._latest.get(id)
            if latest is not None and latest[0] == due_s:  # else that spell is over, and there was another
                del self._latest[id]
                if latest[1].status is Status.WAITING:
                    found.append(latest[1])
        return found

    def forget(self, sequence: Sequence) -> None:
        self._latest.pop(sequence.id, None)
