"""Fairness between tenants: Virtual Token Counters (Sheng et al., "Fairness in Serving Large Language Models", 2024).

Each tenant has a counter of the service it got: `PROMPT_WORK` per prompt token computed for it, at admission, and
`GENERATED_WORK` per generated token, divided by the tenant's weight. The tenant with the smallest counter is next; its
requests come in the order of the inner policy. A tenant that begins to wait after a pause starts no lower than those
who wait, so that nobody saves up. While two tenants have requests waiting, the service they got differs by at most
2 max(PROMPT_WORK x longest prompt, GENERATED_WORK x tokens of all places) over their weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from headrace.core.sequence import Sequence, Status
from headrace.engine.policies import MAX_SKIPS, Policy
from headrace.engine.policies.tenants import BetweenTenants
from headrace.engine.queue import SequenceQueue, WaitingQueue


class Fair(BetweenTenants):
    """Around any policy. As long as there is one tenant, it is that policy and counts nothing."""

    def __init__(self, inner: Policy, weights: Mapping[str, float] | None = None) -> None:
        super().__init__(inner, weights)
        self.is_steady = inner.is_steady
        self.counters: dict[str, float] = {}
        """Tenant -> weighted service so far."""

    @property
    def counts_tokens(self) -> bool:
        return len(self.counters) > 1 or self.inner.counts_tokens

    def arrived(self, sequence: Sequence, waiting: WaitingQueue) -> None:
        self.inner.arrived(sequence, waiting)
        tenant = sequence.request.tenant
        if len(self.counters) == (tenant in self.counters):  # nobody else
            self.counters.setdefault(tenant, 0.0)
            return
        others = waiting.of_tenant
        if tenant in others:
            return
        floor = min((self.counters.setdefault(other, 0.0) for other in others), default=None)
        if floor is None:  # nobody waits: no lower than whoever was served last
            floor = self._last_served
        self.counters[tenant] = max(self.counters.get(tenant, 0.0), floor)

    def candidates(self, waiting: SequenceQueue, limit: int) -> Iterator[Sequence]:
        if not isinstance(waiting, WaitingQueue) or len(self.counters) <= 1:
            yield from self.inner.candidates(waiting, limit)
            return
        counters = self.counters
        ahead: dict[str, Iterator[Sequence]] = {}
        skips: dict[str, int] = {}
        heads = {tenant: queue.head(1)[0] for tenant, queue in waiting.of_tenant.items()}
        for _ in range(limit):
            if not heads:
                return
            tenant = min(heads, key=lambda name: (counters[name], heads[name].sort_key))
            if tenant not in ahead:  # ordered only once it is its turn
                ahead[tenant] = iter(self.inner.candidates(waiting.of_tenant[tenant], limit))
                heads[tenant] = next(ahead[tenant])
            sequence, following = heads[tenant], next(ahead[tenant], None)
            if following is None:
                del heads[tenant]
            else:
                heads[tenant] = following
            yield sequence  # whose admission moves the counter
            if sequence.status is Status.WAITING:
                skips[tenant] = skips.get(tenant, 0) + 1
                if skips[tenant] >= MAX_SKIPS:
                    heads.pop(tenant, None)

    def served(self, sequence: Sequence, num_prompt: int, num_generated: int) -> None:
        self.inner.served(sequence, num_prompt, num_generated)
        if sequence.request.is_batch:  # of what others left: it takes nothing from anybody
            return
        if len(self.counters) == 1:  # nobody to compare with, and whoever comes next starts no lower
            return
        tenant = sequence.request.tenant
        service = self._service(tenant, num_prompt, num_generated)
        self.counters[tenant] = self._last_served = self.counters.get(tenant, 0.0) + service

    _last_served = 0.0
    """The counter that moved last."""
