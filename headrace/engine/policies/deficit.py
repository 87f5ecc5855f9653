"""Fairness between tenants that leaves room for locality: deficits around any policy. Around the longest prefix first
it is Deficit Longest Prefix Match (Cao et al., "Locality-aware Fair Scheduling in LLM Serving", 2025).

Each tenant has an account of service units per weight. What is computed and generated for it is taken off (what a
prefix hit saves is not, so that sharing pays); as long as the account is above zero its requests come in the inner
policy's order among everybody's. When no waiting tenant's is, every account that is not gets a quantum. Work is
conserved: who has used up its account comes behind the others, the least overdrawn first. Nobody saves up more than a
quantum. So tenants who keep requests waiting differ by at most 2 (quantum + work of what runs at once for one of
them) over their weights: a larger quantum buys longer runs of one tenant's prefix with a larger gap.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from headrace.core.sequence import Sequence, Status
from headrace.engine.policies import MAX_SKIPS, Policy
from headrace.engine.policies.tenants import BetweenTenants
from headrace.engine.queue import SequenceQueue, WaitingQueue

QUANTUM = 2048.0


class DeficitFair(BetweenTenants):
    """With one tenant waiting it is the inner policy."""

    counts_tokens = True

    def __init__(self, inner: Policy, weights: Mapping[str, float] | None = None, quantum: float = QUANTUM) -> None:
        super().__init__(inner, weights)
        self._quantum = quantum
        self.accounts: dict[str, float] = {}
        """Tenant -> service units per weight that it may still have."""

    def candidates(self, waiting: SequenceQueue, limit: int) -> Iterator[Sequence]:
        if not isinstance(waiting, WaitingQueue) or len(waiting.of_tenant) <= 1:
            yield from self.inner.candidates(waiting, limit)
            return
        accounts = self.accounts
        self._refill(waiting)
        num_left = limit
        turn = [name for name in waiting.of_tenant if accounts[name] > 0]
        others = sorted((name for name in waiting.of_tenant if accounts[name] <= 0), key=lambda name: -accounts[name])
        skips: dict[str, int] = {}
        for sequence in self._of(turn, waiting, limit):
            tenant = sequence.request.tenant
            if num_left > 0 and accounts[tenant] > 0 and skips.get(tenant, 0) < MAX_SKIPS:
                num_left -= 1
                yield sequence  # whose admission moves the account
                if sequence.status is Status.WAITING:
                    skips[tenant] = skips.get(tenant, 0) + 1
        for name in others:
            for sequence in list(self.inner.candidates(waiting.of_tenant[name], min(num_left, MAX_SKIPS))):
                num_left -= 1
                yield sequence

    def served(self, sequence: Sequence, num_prompt: int, num_generated: int) -> None:
        self.inner.served(sequence, num_prompt, num_generated)
        if not sequence.request.is_batch:  # which gets what others left: it takes nothing from anybody
            tenant = sequence.request.tenant
            service = self._service(tenant, num_prompt, num_generated)
            self.accounts[tenant] = self.accounts.get(tenant, 0.0) - service

    def _of(self, turn: list[str], waiting: WaitingQueue, limit: int) -> Iterator[Sequence]:
        """The tenants' first sequences in the inner order, and those of tenants too far behind to be among them."""
        met = set()
        for sequence in list(self.inner.candidates(waiting, limit)):
            if sequence.request.tenant in turn:
                met.add(sequence.request.tenant)
                yield sequence
        for name in turn:
            if name not in met and name in waiting.of_tenant:
                yield from list(self.inner.candidates(waiting.of_tenant[name], limit))

    def _refill(self, waiting: WaitingQueue) -> None:
        """So many quanta for every account at or below zero that one who waits is above; nobody gets above a quantum by
        that."""
        best = max(self.accounts.setdefault(name, 0.0) for name in waiting.of_tenant)
        if best <= 0:
            quanta = (math.floor(-best / self._quantum) + 1) * self._quantum
            for name, account in self.accounts.items():
                if account <= 0:
                    self.accounts[name] = min(account + quanta, self._quantum)
