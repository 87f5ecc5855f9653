"""The client's word on urgency, ahead of any other order."""

from __future__ import annotations

from headrace.core.sequence import Sequence
from headrace.engine.policies import Ordered, Policy


class ByPriority(Ordered):
    """Smaller `Request.priority` first; among equals the inner policy. The least urgent is the victim."""

    def __init__(self, inner: Policy) -> None:
        self._inner = inner
        self.is_steady = inner.is_steady

    def key(self, sequence: Sequence, now: float) -> tuple:
        return (sequence.request.priority, *self._inner.key(sequence, now))
