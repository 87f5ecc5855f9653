"""The client's word on urgency, ahead of any other order."""

from __future__ import annotations

from headrace.core.sequence import Sequence
from headrace.engine.policies import Around, Policy


class ByPriority(Around):
    """Smaller `Request.priority` first; among equals the inner policy. The least urgent is the victim."""

    def __init__(self, inner: Policy) -> None:
        super().__init__(inner)
        self.is_steady = inner.is_steady

    def key(self, sequence: Sequence, now: float) -> tuple:
        return (sequence.request.priority, *self.inner.key(sequence, now))

    def displaces(self, sequence: Sequence, victim: Sequence, now: float) -> bool:
        """Only among equals: a more urgent one waits for a place."""
        same = sequence.request.priority == victim.request.priority
        return same and self.inner.displaces(sequence, victim, now)
