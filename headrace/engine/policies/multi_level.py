"""A multi-level feedback queue that long prompts join further down: FastServe (Wu et al., "Fast Distributed Inference
Serving for Large Language Models", 2023), which needs no predictions.

Level i has a quantum of FIRST_QUANTUM x 2^i service units (see `headrace.engine.ledger`). A request joins the first
level whose quantum pays for its prompt, since that is known, and cannot be interrupted usefully; when it has used its
quantum it moves one level down, behind those who are there. Who has waited too long returns to the first level.

Restoring bounds both moves: a sequence is displaced only where recomputing it costs less than its level's quantum; and
one that was promoted gets what its tokens cost to compute on top of the first level's quantum.
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.core.sequence import Sequence
from headrace.engine.ledger import GENERATED_WORK, PROMPT_WORK
from headrace.engine.policies import Ordered
from headrace.engine.policies.spells import WaitingSpells

FIRST_QUANTUM = 64.0
NUM_LEVELS = 8
PROMOTED_AFTER_S = 30.0


class _Place:
    __slots__ = ("has_run", "level", "number", "quantum", "used")

    def __init__(self, level: int, number: int, quantum: float) -> None:
        self.level = level
        self.number = number
        """Whoever came to the level earlier has a smaller one."""
        self.quantum = quantum
        self.used = 0.0
        self.has_run = False


class MultiLevel(Ordered):
    """Lower levels go first, and displace higher ones; within a level, first come first served."""

    counts_tokens = True

    def __init__(
        self,
        first_quantum: float = FIRST_QUANTUM,
        num_levels: int = NUM_LEVELS,
        promoted_after_s: float = PROMOTED_AFTER_S,
    ) -> None:
        self._quanta = [first_quantum * 2**level for level in range(num_levels)]
        self._spells = WaitingSpells(promoted_after_s)
        self._places: dict[int, _Place] = {}
        self._moved: list[Sequence] = []
        self._next_number = 0

    def level(self, sequence: Sequence) -> int:
        """0 is served first."""
        return self._place(sequence).level

    def key(self, sequence: Sequence, now: float) -> tuple:
        place = self._place(sequence)
        return (place.level, place.number, sequence.id)

    def queued(self, sequence: Sequence, now: float) -> None:
        self._spells.begin(sequence, now)

    def served(self, sequence: Sequence, num_prompt: int, num_generated: int) -> None:
        place = self._place(sequence)
        if num_prompt and place.has_run:
            return  # restoring is nothing it asked for
        place.has_run = True
        place.used += PROMPT_WORK * num_prompt + GENERATED_WORK * num_generated
        if place.used >= place.quantum and place.level < len(self._quanta) - 1:
            self._move(sequence, place, place.level + 1, extra=0.0)

    def rekeyed(self, now: float) -> Iterable[Sequence]:
        for sequence in self._spells.due(now):
            place = self._place(sequence)
            if place.level:
                self._move(sequence, place, 0, extra=PROMPT_WORK * sequence.num_tokens)
        moved, self._moved = self._moved, []
        return moved

    def displaces(self, sequence: Sequence, victim: Sequence, now: float) -> bool:
        place = self._place(victim)
        return self.level(sequence) < place.level and PROMPT_WORK * victim.num_computed <= self._quanta[place.level]

    def ended(self, sequence: Sequence) -> None:
        self._places.pop(sequence.id, None)
        self._spells.forget(sequence)

    def _place(self, sequence: Sequence) -> _Place:
        place = self._places.get(sequence.id)
        if place is None:
            work, last = PROMPT_WORK * sequence.num_tokens, len(self._quanta) - 1
            level = next((level for level, quantum in enumerate(self._quanta) if quantum >= work), last)
            place = self._places[sequence.id] = _Place(level, self._number(), self._quanta[level])
        return place

    def _move(self, sequence: Sequence, place: _Place, level: int, extra: float) -> None:
        """To the end of a level, for its quantum and so much more."""
        place.level, place.number, place.used = level, self._number(), 0.0
        place.quantum = self._quanta[level] + extra
        self._moved.append(sequence)

    def _number(self) -> int:
        self._next_number += 1
        return self._next_number
