"""In which order sequences get tokens: a policy is a key, recomputed on events only.

Running sequences are extended in the order of their keys, and the victim of a preemption is the running sequence with
the largest key. Waiting ones are considered in the order of `candidates`: that of their keys, unless the policy keeps
accounts of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from headrace.core.sequence import Sequence
from headrace.engine.queue import SequenceQueue


class Policy(Protocol):
    is_steady: bool
    """As long as nobody comes or leaves, the order of the running sequences stays as it is, however long they run."""

    def key(self, sequence: Sequence, now: float) -> tuple:
        """Smaller goes first. Asked when a sequence enters a queue; ends in the sequence's id (a total order)."""
        ...

    def arrived(self, sequence: Sequence, waiting: SequenceQueue) -> None:
        """A request's first sequence is about to wait, behind those in `waiting`."""
        ...

    def candidates(self, waiting: SequenceQueue, limit: int) -> Iterable[Sequence]:
        """Whom to admit next, in order. What is admitted leaves `waiting` while this is walked."""
        ...

    def served(self, sequence: Sequence, num_prompt: int, num_generated: int) -> None:
        """So many prompt tokens are going to be computed for a sequence, or so many tokens were generated."""
        ...


class Ordered:
    """A policy that is its key and nothing else."""

    is_steady = False

    def arrived(self, sequence: Sequence, waiting: SequenceQueue) -> None:
        pass

    def candidates(self, waiting: SequenceQueue, limit: int) -> Iterable[Sequence]:
        return waiting.head(limit)

    def served(self, sequence: Sequence, num_prompt: int, num_generated: int) -> None:
        pass
