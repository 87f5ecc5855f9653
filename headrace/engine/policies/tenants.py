"""What policies between tenants have in common."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.core.sequence import Sequence
from headrace.engine.ledger import GENERATED_WORK, PROMPT_WORK
from headrace.engine.policies import Around, Policy


class BetweenTenants(Around):
    """Around a policy for the requests of one tenant."""

    def __init__(self, inner: Policy, weights: Mapping[str, float] | None = None) -> None:
        """`weights`: of tenants; 1 where none is given."""
        super().__init__(inner)
        self._weights = dict(weights or {})

    def displaces(self, sequence: Sequence, victim: Sequence, now: float) -> bool:
        """Only its own tenant's: what a tenant gives up is not another's to take."""
        same = sequence.request.tenant == victim.request.tenant
        return same and self.inner.displaces(sequence, victim, now)

    def _service(self, tenant: str, num_prompt: int, num_generated: int) -> float:
        """Service units per weight."""
        return (PROMPT_WORK * num_prompt + GENERATED_WORK * num_generated) / self._weights.get(tenant, 1.0)
