"""Who has most of its prompt in the cache goes first: SGLang's cache-aware order (Zheng et al. 2024), for hit rate."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.core.sequence import Sequence
from headrace.engine.policies import Around, Policy
from headrace.engine.queue import SequenceQueue
from headrace.memory.manager import MemoryManager

WINDOW = 32
"""Candidates compared in one step: each costs a search in the prefix tree (some microseconds)."""


class LongestPrefixFirst(Around):
    """Of the inner policy's first `WINDOW` candidates, longest cached prefix first; equal ones in the inner order. The
    cache changes with every step, so this is no key: running sequences keep the inner order.

    Who has nothing cached may wait as long as others have: `Ageing` bounds that.
    """

    def __init__(self, inner: Policy, memory: MemoryManager) -> None:
        super().__init__(inner)
        self._memory = memory

    def candidates(self, waiting: SequenceQueue, limit: int) -> Iterable[Sequence]:
        first = list(self.inner.candidates(waiting, min(limit, WINDOW)))
        return sorted(first, key=self._memory.match, reverse=True)  # stable
