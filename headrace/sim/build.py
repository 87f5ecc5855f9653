"""An engine with a virtual clock, put together from the parts of a real one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.core.cache import CacheGroup
from headrace.core.clock import ManualClock
from headrace.core.work import StepTimes
from headrace.engine.composition import SchedulingConfig, make_scheduler
from headrace.engine.costs import GivenCosts
from headrace.engine.engine import Engine
from headrace.engine.limits import Limits
from headrace.memory.manager import MemoryManager
from headrace.sim.executor import SimExecutor

MAX_HORIZON = 1 << 20


@dataclass(frozen=True, slots=True)
class SimConfig:
    """What is simulated. The defaults are those of a server."""

    groups: tuple[CacheGroup, ...]
    num_blocks: tuple[int, ...]
    """Per cache group."""
    context_length: int
    vocab_size: int
    max_running: int = 64
    max_step_tokens: int = 160
    max_queue: int = 256
    depth: int = 1
    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)
    jumps: bool = True
    """Take steps that are alike at once: the same schedule, sooner."""


def build_sim(
    config: SimConfig, times: StepTimes, lengths: Mapping[str, int] | None = None
) -> tuple[Engine, SimExecutor]:
    """An idle engine at time 0. `lengths`: see `SimExecutor`; the oracle among the predictors knows them too."""
    memory = MemoryManager(config.groups, config.num_blocks)
    limits = Limits(
        config.context_length,
        memory.capacity_tokens(config.max_step_tokens, config.depth),
        config.max_queue,
        config.max_running,
        config.vocab_size,
    )
    scheduler = make_scheduler(
        config.scheduling, memory, limits, config.max_step_tokens, costs=GivenCosts(times), lengths=lengths
    )
    clock = ManualClock()
    executor = SimExecutor(clock, times, config.vocab_size, lengths)
    horizon = MAX_HORIZON if config.jumps and config.depth == 1 else 1
    return Engine(scheduler, executor, clock, config.depth, horizon), executor
