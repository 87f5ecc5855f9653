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
    FULL = "full"
    """There is no place for it: nobody more in this step, unless somebody who runs makes place."""
    STOP = "stop"
    """Nobody more in this step."""


class Gate(Protocol):
    def ask(self, sequence: Sequence, state: EngineState, now: float) -> Verdict: ...


class EntryGate(Protocol):
    """Whether a request may wait at all."""

    def check(self, sequence: Sequence, state: EngineState, now: float) -> None:
        """Asked at submit, of a sequence that is in no queue yet. Raises `Overloaded`."""
        ...


class Turns(Protocol):
    """Which of the running sequences get tokens in a step; all of them where there are no turns."""

    def turn(self, running: list[Sequence], state: EngineState) -> list[Sequence]:
        """Asked once per step; keeps the order."""
        ...


class Timer(Protocol):
    wake_s: float | None
    """When a gate that is closed now will open by itself; None: not by itself, or not closed."""


class Gates:
    """All must admit; the first other verdict counts."""

    def __init__(
        self,
        gates: Iterable[Gate],
        entry: Iterable[EntryGate] = (),
        turns: Turns | None = None,
        timer: Timer | None = None,
    ) -> None:
        self._gates = tuple(gates)
        self._entry = tuple(entry)
        self._turns = turns
        self._timer = timer

    @property
    def wake_s(self) -> float | None:
        """Where nothing can be launched: when that may change though nothing else happens."""
        return None if self._timer is None else self._timer.wake_s

    @property
    def is_steady(self) -> bool:
        """As long as nobody comes or leaves, what they say stays as it is, however long the others run."""
        return self._turns is None and self._timer is None

    def running(self, state: EngineState) -> list[Sequence]:
        """Those whose turn it is, in order."""
        running = state.running.snapshot()
        return running if self._turns is None else self._turns.turn(running, state)

    def check(self, sequence: Sequence, state: EngineState, now: float) -> None:
        """Raises `Overloaded` where an entry gate refuses."""
        for gate in self._entry:
            gate.check(sequence, state, now)

    def ask(self, sequence: Sequence, state: EngineState, now: float) -> Verdict:
        for gate in self._gates:
            verdict = gate.ask(sequence, state, now)
            if verdict is not Verdict.ADMIT:
                return verdict
        return Verdict.ADMIT
