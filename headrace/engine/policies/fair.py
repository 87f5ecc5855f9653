"""Fairness between tenants: Virtual Token Counters (Sheng et al., "Fairness in Serving Large Language Models", 2024).

Each tenant has a counter of the service it got: `INPUT_WEIGHT` per prompt token computed for it, at admission, and
`OUTPUT_WEIGHT` per generated token, divided by the tenant's weight. The tenant with the smallest counter is next; its
requests come in the order of the inner policy. A tenant that begins to wait after a pause starts no lower than those
who wait, so that nobody saves up. While two tenants have requests waiting, the service they got differs by at most
2 max(INPUT_WEIGHT x longest prompt, OUTPUT_WEIGHT x tokens of all places) over their weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

from headrace.core.sequence import Sequence
from headrace.engine.policies import Policy
from headrace.engine.queue import SequenceQueue

INPUT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0


class Fair:
    """Around any policy. As long as there is one tenant, it is that policy and counts nothing."""

    def __init__(self, inner: Policy, weights: Mapping[str, float] | None = None) -> None:
        """`weights`: of tenants; 1 where none is given."""
        self._inner = inner
        self.is_steady = inner.is_steady
        self._weights = dict(weights or {})
        self.counters: dict[str, float] = {}
        """Tenant -> weighted service so far."""

    def key(self, sequence: Sequence, now: float) -> tuple:
        return self._inner.key(sequence, now)

    def arrived(self, sequence: Sequence, waiting: SequenceQueue) -> None:
        tenant = sequence.request.tenant
        if len(self.counters) == (tenant in self.counters):  # nobody else
            self.counters.setdefault(tenant, 0.0)
            return
        others = {other.request.tenant for other in waiting}
        if tenant in others:
            return
        floor = min((self.counters[other] for other in others), default=None)
        if floor is None:  # nobody waits: no lower than whoever was served last
            floor = self._last_served
        self.counters[tenant] = max(self.counters.get(tenant, 0.0), floor)

    def candidates(self, waiting: SequenceQueue, limit: int) -> Iterator[Sequence]:
        if len(self.counters) <= 1:
            yield from waiting.head(limit)
            return
        queues: dict[str, deque[Sequence]] = {}
        for sequence in waiting:
            queue = queues.setdefault(sequence.request.tenant, deque())
            if len(queue) < limit:
                queue.append(sequence)
        for _ in range(limit):
            if not queues:
                return
            tenant = min(queues, key=lambda name: (self.counters[name], queues[name][0].sort_key))
            queue = queues[tenant]
            sequence = queue.popleft()
            if not queue:
                del queues[tenant]
            yield sequence  # whose admission moves the counter

    def served(self, sequence: Sequence, num_prompt: int, num_generated: int) -> None:
        if len(self.counters) == 1:  # nobody to compare with, and whoever comes next starts no lower
            return
        tenant = sequence.request.tenant
        service = INPUT_WEIGHT * num_prompt + OUTPUT_WEIGHT * num_generated
        self.counters[tenant] = self._last_served = self.counters.get(tenant, 0.0) + service / self._weights.get(
            tenant, 1.0
        )

    _last_served = 0.0
    """The counter that moved last."""
