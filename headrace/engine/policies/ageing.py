"""Nobody waits for ever: a bound on starvation, around any policy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from headrace.core.sequence import Sequence
from headrace.engine.policies import Around, Policy
from headrace.engine.policies.spells import WaitingSpells
from headrace.engine.queue import SequenceQueue


class Ageing(Around):
    """Who has waited `max_wait_s` without a break goes before everybody, in order of arrival, and stays there: it runs
    on, and is not displaced. Until it starts it waits `max_wait_s` and for those who aged before it, not for anybody
    who comes later."""

    def __init__(self, inner: Policy, max_wait_s: float) -> None:
        super().__init__(inner)
        self._spells = WaitingSpells(max_wait_s)
        self._aged: set[int] = set()

    def key(self, sequence: Sequence, now: float) -> tuple:
        if sequence.id in self._aged:
            return (0, sequence.arrival_s, sequence.id)
        return (1, *self.inner.key(sequence, now))

    def queued(self, sequence: Sequence, now: float) -> None:
        self.inner.queued(sequence, now)
        if sequence.id not in self._aged:
            self._spells.begin(sequence, now)

    def candidates(self, waiting: SequenceQueue, limit: int) -> Iterator[Sequence]:
        """The aged ones at the head of the queue, whatever the inner policy makes of the rest. (All of them, unless a
        policy around this one has put somebody else before them.)"""
        ahead = set()
        for sequence in waiting.head(limit):
            if sequence.id not in self._aged:
                break
            ahead.add(sequence.id)
            yield sequence
        others = (sequence for sequence in self.inner.candidates(waiting, limit) if sequence.id not in ahead)
        yield from islice(others, limit - len(ahead))

    def rekeyed(self, now: float) -> Iterable[Sequence]:
        changed = [sequence for sequence in self.inner.rekeyed(now) if sequence.id not in self._aged]
        due = self._spells.due(now)
        self._aged.update([sequence.id for sequence in due])
        return changed + due

    def displaces(self, sequence: Sequence, victim: Sequence, now: float) -> bool:
        if victim.id in self._aged or sequence.id in self._aged:
            return False
        return self.inner.displaces(sequence, victim, now)

    def ended(self, sequence: Sequence) -> None:
        self.inner.ended(sequence)
        self._spells.forget(sequence)
        self._aged.discard(sequence.id)
