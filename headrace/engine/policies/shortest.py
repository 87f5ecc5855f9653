"""The shortest first, on predicted lengths: the least mean time to completion there is, where predictions hold.

    work = PROMPT_WORK x prompt tokens to compute + GENERATED_WORK x reply tokens to generate

Shortest remaining processing time is optimal for the mean (Schrage 1968). Predictions err, and so does what is built
on them; two things bound the loss: a reply that outlives its prediction is expected to become twice as long, and
moves back (cf. TRAIL, Shahout et al., ICLR 2025), and a running sequence is displaced only where its restoring costs
less than what is gained.
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.core.sequence import Sequence
from headrace.engine.ledger import GENERATED_WORK, PROMPT_WORK, Ledger
from headrace.engine.policies import Ordered


class ShortestFirst(Ordered):
    """SJF: least predicted work first, that done already included; whoever runs stays."""

    counts_tokens = True

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._holds_to: dict[int, float] = {}
        """Running sequence -> tokens of its reply up to which its prediction holds."""
        self._outlived: list[Sequence] = []

    def key(self, sequence: Sequence, now: float) -> tuple:
        work = PROMPT_WORK * sequence.num_prompt + GENERATED_WORK * self._ledger.expected(sequence)
        return (work, sequence.arrival_s, sequence.id)

    def served(self, sequence: Sequence, num_prompt: int, num_generated: int) -> None:
        if sequence.num_generated >= self._holds_to.get(sequence.id, 0.0):
            self._holds_to[sequence.id] = self._ledger.expected(sequence)
            if num_generated:
                self._outlived.append(sequence)

    def rekeyed(self, now: float) -> Iterable[Sequence]:
        outlived, self._outlived = self._outlived, []
        return outlived

    def ended(self, sequence: Sequence) -> None:
        self._holds_to.pop(sequence.id, None)


class ShortestRemainingFirst(ShortestFirst):
    """SRPT: least predicted work to the end first; and a waiting sequence displaces a running one that has more left
    than the waiting one's whole work and the running one's restoring together."""

    def key(self, sequence: Sequence, now: float) -> tuple:
        return (self._ledger.remaining_work(sequence), sequence.arrival_s, sequence.id)

    def displaces(self, sequence: Sequence, victim: Sequence, now: float) -> bool:
        ledger, restoring = self._ledger, PROMPT_WORK * victim.num_computed
        return ledger.remaining_work(sequence) + restoring < ledger.remaining_work(victim)
