"""In which order sequences get tokens: a policy is a key, recomputed on events only.

Running sequences are extended in the order of their keys, and the victim of a preemption is the running sequence with
the largest key. Waiting ones are considered in the order of `candidates`: that of their keys, unless the policy keeps
accounts of its own. Sequences of batch class come behind all others, whatever their keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from headrace.core.sequence import Sequence
from headrace.engine.queue import SequenceQueue, WaitingQueue

MAX_SKIPS = 8
"""Candidates of one tenant that were not admitted, after which a policy that knows tenants looks at the others: who has
used up its quota holds up nobody else."""


class Policy(Protocol):
    is_steady: bool
    """As long as nobody comes or leaves, the order of the running sequences stays as it is, however long they run."""

    @property
    def counts_tokens(self) -> bool:
        """In this step `served` has to be told of generated tokens: for each of them, so not for nothing."""
        ...

    def key(self, sequence: Sequence, now: float) -> tuple:
        """Smaller goes first. Asked when a sequence enters a queue, and when `rekeyed` names it; numbers, the last of
        which is the sequence's id (a total order)."""
        ...

    def arrived(self, sequence: Sequence, waiting: WaitingQueue) -> None:
        """A request's first sequence is about to wait, behind those in `waiting`."""
        ...

    def queued(self, sequence: Sequence, now: float) -> None:
        """A sequence begins to wait: on arrival, or as it was preempted."""
        ...

    def candidates(self, waiting: SequenceQueue, limit: int) -> Iterable[Sequence]:
        """Whom to admit next, in order, at most `limit`. What is admitted leaves `waiting` while this is walked."""
        ...

    def served(self, sequence: Sequence, num_prompt: int, num_generated: int) -> None:
        """So many prompt tokens are going to be computed for a sequence, or so many tokens were generated."""
        ...

    def rekeyed(self, now: float) -> Iterable[Sequence]:
        """Sequences whose keys have changed since the last call, by service or by the time. A few per step: no policy
        goes through a queue for this."""
        ...

    def displaces(self, sequence: Sequence, victim: Sequence, now: float) -> bool:
        """Whether a waiting sequence without room is worth the restoring of a running one that gives way to it.
        False for whoever stands behind the victim. The scheduler asks from the last running one on, and sees to it that
        nobody is displaced again before it has advanced by what its restoring cost."""
        ...

    def ended(self, sequence: Sequence) -> None:
        """It gets no more tokens, and is not served any more: forget it."""
        ...


class Ordered:
    """A policy that is its key and nothing else."""

    is_steady = False
    counts_tokens = False

    def arrived(self, sequence: Sequence, waiting: WaitingQueue) -> None:
        pass

    def queued(self, sequence: Sequence, now: float) -> None:
        pass

    def candidates(self, waiting: SequenceQueue, limit: int) -> Iterable[Sequence]:
        return waiting.head(limit)

    def served(self, sequence: Sequence, num_prompt: int, num_generated: int) -> None:
        pass

    def rekeyed(self, now: float) -> Iterable[Sequence]:
        return ()

    def displaces(self, sequence: Sequence, victim: Sequence, now: float) -> bool:
        return False

    def ended(self, sequence: Sequence) -> None:
        pass


class Around:
    """A policy that asks another one, except for what it decides itself."""

    is_steady = False

    def __init__(self, inner: Policy) -> None:
        self.inner = inner

    @property
    def counts_tokens(self) -> bool:
        return self.inner.counts_tokens

    def key(self, sequence: Sequence, now: float) -> tuple:
        return self.inner.key(sequence, now)

    def arrived(self, sequence: Sequence, waiting: WaitingQueue) -> None:
        self.inner.arrived(sequence, waiting)

    def queued(self, sequence: Sequence, now: float) -> None:
        self.inner.queued(sequence, now)

    def candidates(self, waiting: SequenceQueue, limit: int) -> Iterable[Sequence]:
        return self.inner.candidates(waiting, limit)

    def served(self, sequence: Sequence, num_prompt: int, num_generated: int) -> None:
        self.inner.served(sequence, num_prompt, num_generated)

    def rekeyed(self, now: float) -> Iterable[Sequence]:
        return self.inner.rekeyed(now)

    def displaces(self, sequence: Sequence, victim: Sequence, now: float) -> bool:
        return self.inner.displaces(sequence, victim, now)

    def ended(self, sequence: Sequence) -> None:
        self.inner.ended(sequence)
