"""In which order sequences get tokens: a policy is a key, recomputed on events only.

Running sequences are extended in the order of their keys, waiting ones are considered in it, and the victim of a
preemption is the running sequence with the largest key.
"""

from __future__ import annotations

from typing import Protocol

from headrace.core.sequence import Sequence


class Policy(Protocol):
    def key(self, sequence: Sequence, now: float) -> tuple:
        """Smaller goes first. Asked when a sequence enters a queue; ends in the sequence's id (a total order)."""
        ...
