"""Whether a waiting sequence may start now.

Gates are asked in order before memory is touched; memory itself is no gate but the admission's transaction.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Protocol

from headrace.core.sequence import Sequence
from headrace.engine.state import EngineState


class Verdict(Enum):
    ADMIT = "admit"
    SKIP = "skip"
    """Not this one, not in this step; look at those behind it."""
    STOP = "stop"
    """Nobody more in this step."""


class Gate(Protocol):
    def ask(self, sequence: Sequence, state: EngineState, now: float) -> Verdict: ...


class Gates:
    """All must admit; the first other verdict counts."""

    def __init__(self, gates: Iterable[Gate]) -> None:
        self._gates = tuple(gates)

    def ask(self, sequence: Sequence, state: EngineState, now: float) -> Verdict:
        for gate in self._gates:
            verdict = gate.ask(sequence, state, now)
            if verdict is not Verdict.ADMIT:
                return verdict
        return Verdict.ADMIT
