"""Batching modes to compare continuous batching with: gates, and who has a turn in a step.

Continuous (Yu et al., Orca, OSDI 2022) is the absence of all of these: whoever fits joins the next step.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.core.sequence import Sequence, Status
from headrace.engine.gates import Verdict
from headrace.engine.gates.memory import peak_blocks
from headrace.engine.state import EngineState

WINDOW = 64
"""Waiting sequences that a batch is chosen from."""


class Batches:
    """A batch is formed and runs until all of it has ended; then the next. A gate.

    Formed at once (static), or when the first has waited `window_s` or `size` are there (dynamic). It is packed
    greedily into memory by predicted lengths: the first in order, then the others by decreasing need, each if it
    still fits.
    """

    def __init__(self, max_running: int, window_s: float = 0.0, size: int = 1) -> None:
        self._max_running = max_running
        self._window_s = window_s
        self._size = size
        self._members: set[int] = set()
        self.wake_s: float | None = None
        """While it waits for more: when it will do with what it has."""

    def ask(self, sequence: Sequence, state: EngineState, now: float) -> Verdict:
        if not len(state.running):
            self.wake_s = self._due_s(state, now)
            if self.wake_s is not None:
                return Verdict.STOP
            # Also where members wait, preempted: whoever runs is whom the others wait for.
            self._members = {member.id for member in self._packed(sequence, state)}
        return Verdict.ADMIT if sequence.id in self._members else Verdict.SKIP

    def _due_s(self, state: EngineState, now: float) -> float | None:
        """None: now."""
        first = [*state.waiting.head(WINDOW), *state.batch.head(WINDOW)]
        if len(state.waiting) + len(state.batch) >= self._size:
            return None
        due_s = min(sequence.arrival_s for sequence in first) + self._window_s
        return due_s if due_s > now else None

    def _packed(self, first: Sequence, state: EngineState) -> list[Sequence]:
        capacity, ledger = state.memory.capacity_blocks, state.ledger
        others = [other for other in (*state.waiting.head(WINDOW), *state.batch.head(WINDOW)) if other is not first]
        others.sort(key=lambda other: other.num_tokens + ledger.remaining_high(other), reverse=True)
        batch, num_places = [first], first.num_places
        for other in others:
            if num_places + other.num_places <= self._max_running and (
                capacity is None or peak_blocks([*batch, other], state) <= capacity
            ):
                batch.append(other)
                num_places += other.num_places
        return batch


class Alike:
    """Only sequences of one kind run together; another kind's turn comes when nobody runs, and is not put off for
    longer than `patience_s`. A gate."""

    def __init__(self, kind: Callable[[Sequence, EngineState], int], patience_s: float = 1.0) -> None:
        self._kind = kind
        self._patience_s = patience_s
        self._running_kind = 0

    def ask(self, sequence: Sequence, state: EngineState, now: float) -> Verdict:
        kind = self._kind(sequence, state)
        if not len(state.running):
            self._running_kind = kind
        if kind == self._running_kind:
            return Verdict.ADMIT
        return Verdict.STOP if now - sequence.arrival_s > self._patience_s else Verdict.SKIP


def length_kind(sequence: Sequence, state: EngineState) -> int:
    """Of like length, prompt and predicted reply together: within a power of two."""
    return state.ledger.num_tokens_of(sequence.request).bit_length()


def cache_kind(sequence: Sequence, state: EngineState) -> int:
    """With a prefix hit, or without."""
    return state.memory.match(sequence) > 0


class TwoQueues:
    """Prompts are read in steps of their own, and streams go on in theirs. A gate, and turns.

    A step is one of streams where they fill `FULL_SHARE` of the places or no prompt is to be read; else of prompts,
    at most `MOST_PROMPT_STEPS` in a row, so that prompts fill what is idle and streams do not stand still.
    """

    FULL_SHARE = 0.85
    MOST_PROMPT_STEPS = 4

    def __init__(self, max_running: int) -> None:
        self._full = self.FULL_SHARE * max_running
        self._is_prompt_step = False
        self._num_prompt_steps = 0
        self._num_read = 0

    def turn(self, running: list[Sequence], state: EngineState) -> list[Sequence]:
        """Who of `running` gets tokens in this step."""
        reading = [other for other in running if is_reading(other)]
        streams = [other for other in running if not is_reading(other)]
        if not any(other.num_remaining > 0 for other in streams):
            is_prompt_step = True
        elif len(streams) >= self._full or self._num_prompt_steps >= self.MOST_PROMPT_STEPS:
            is_prompt_step = False
        else:
            # A second one in a row only where the first got somewhere, and left something to read.
            can_start = not self._is_prompt_step and (len(state.waiting) or len(state.batch))
            has_moved = not self._is_prompt_step or sum(other.num_scheduled for other in reading) != self._num_read
            is_prompt_step = bool(can_start or (reading and has_moved))
        self._is_prompt_step = is_prompt_step
        self._num_read = sum(other.num_scheduled for other in reading)
        self._num_prompt_steps = self._num_prompt_steps + 1 if is_prompt_step else 0
        return reading if is_prompt_step else streams

    def ask(self, sequence: Sequence, state: EngineState, now: float) -> Verdict:
        return Verdict.ADMIT if self._is_prompt_step else Verdict.STOP


def is_reading(sequence: Sequence) -> bool:
    """It has more to compute than its next token."""
    return sequence.status is Status.RUNNING and sequence.num_scheduled < sequence.num_tokens - 1
