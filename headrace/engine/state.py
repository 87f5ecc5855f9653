"""What policies, gates and budgets may look at."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.engine.ledger import Ledger
from headrace.engine.predict.calibration import CalibrationReport
from headrace.engine.queue import SequenceQueue, WaitingQueue
from headrace.memory.manager import GroupStats, MemoryManager


@dataclass(slots=True)
class EngineState:
    """The scheduler's queues, memory and books. Others read it; only the scheduler changes it."""

    memory: MemoryManager
    ledger: Ledger = field(default_factory=Ledger)
    waiting: WaitingQueue = field(default_factory=WaitingQueue)
    batch: WaitingQueue = field(default_factory=WaitingQueue)
    """Those of batch class that wait: looked at when all others have got what they can."""
    running: SequenceQueue = field(default_factory=SequenceQueue)
    """Running and preempting sequences, and finished ones that are still in flight; those of batch class last."""

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
    """Sequences that gave their blocks back before their end."""
    displacements: int = 0
    """Of these, chosen since somebody better waited, or an interactive one needed what a batch one held."""
    requests: int = 0
    verifications: int = 0
    """Sequences that had drafts in a step, each counted once a step."""
    proposed_drafts: int = 0
    accepted_drafts: int = 0
    """Of the proposed ones, those that became tokens of a reply."""


class TenantStats(NamedTuple):
    """One tenant, in tokens; see `headrace.engine.ledger.TenantUse`."""

    name: str
    num_queued: int
    num_running: int
    prompt_tokens: int
    generated_tokens: int


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
    displacements: int
    evictions: int
    groups: tuple[GroupStats, ...]
    num_places: int
    """Requests of one choice that would not be refused for a full queue now."""
    step_budget: int
    """Tokens the latest step could have had."""
    calibration: CalibrationReport
    """Of the length predictor."""
    cost_errors: tuple[float, float]
    """Mean absolute relative error of predicted step times of late, without prompts and with."""
    tenants: tuple[TenantStats, ...]
    verifications: int
    proposed_drafts: int
    accepted_drafts: int
