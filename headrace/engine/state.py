"""What policies, gates and budgets may look at."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.engine.queue import SequenceQueue
from headrace.memory.manager import GroupStats, MemoryManager


@dataclass(slots=True)
class EngineState:
    """The scheduler's queues and memory. Others read it; only the scheduler changes it."""

    memory: MemoryManager
    waiting: SequenceQueue = field(default_factory=SequenceQueue)
    running: SequenceQueue = field(default_factory=SequenceQueue)
    """Running and preempting sequences, and finished ones that are still in flight."""

    @property
    def num_taken(self) -> int:
        """Places taken: the running sequences, and the choices that will fork off them."""
        return len(self.running) + sum([len(sequence.unborn) for sequence in self.running if sequence.unborn])


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    steps: int = 0
    prompt_tokens: int = 0
    """Of admitted requests, once each."""
    cached_tokens: int = 0
    """Of these, found in the prefix tree."""
    computed_tokens: int = 0
    """Computed by steps, recomputation after preemption and wrong drafts included."""
    generated_tokens: int = 0
    preemptions: int = 0
    requests: int = 0
    verifications: int = 0
    """Sequences that had drafts in a step, each counted once a step."""
    proposed_drafts: int = 0
    accepted_drafts: int = 0
    """Of the proposed ones, those that became tokens of a reply."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot for metrics."""

    num_running: int
    num_waiting: int
    steps: int
    requests: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    generated_tokens: int
    preemptions: int
    evictions: int
    groups: tuple[GroupStats, ...]
    num_places: int
    """Requests of one choice that would not be refused for a full queue now."""
    verifications: int = 0
    proposed_drafts: int = 0
    accepted_drafts: int = 0
