"""An engine with a virtual clock, put together from the parts of a real one."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.cache import CacheGroup
from headrace.core.clock import ManualClock
from headrace.core.work import StepTimes
from headrace.engine.budget import PacedBudget, TokenBudget
from headrace.engine.engine import Engine
from headrace.engine.gates import Gates
from headrace.engine.gates.prefix import PrefixGate
from headrace.engine.gates.running import RunningGate
from headrace.engine.limits import Limits
from headrace.engine.policies import Policy
from headrace.engine.policies.fair import Fair
from headrace.engine.policies.fcfs import FirstComeFirstServed
from headrace.engine.policies.priority import ByPriority
from headrace.engine.scheduler import Scheduler
from headrace.engine.state import EngineState
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
    inter_token_s: float | None = None
    max_queue: int = 256
    depth: int = 1
    jumps: bool = True
    """Take identical steps at once: the same schedule, sooner."""


def build_sim(
    config: SimConfig, times: StepTimes, policy: Policy | None = None, budget: TokenBudget | None = None
) -> tuple[Engine, SimExecutor]:
    """An idle engine at time 0. `policy` and `budget`: the server's, unless others are given."""
    memory = MemoryManager(config.groups, config.num_blocks)
    limits = Limits(
        config.context_length,
        memory.capacity_tokens(config.max_step_tokens, config.depth),
        config.max_queue,
        config.max_running,
        config.vocab_size,
    )
    scheduler = Scheduler(
        EngineState(memory),
        policy or Fair(ByPriority(FirstComeFirstServed())),
        Gates([RunningGate(config.max_running), PrefixGate()]),
        budget or PacedBudget(config.max_step_tokens, config.inter_token_s),
        limits,
    )
    clock = ManualClock()
    executor = SimExecutor(clock, times, config.vocab_size)
    horizon = MAX_HORIZON if config.jumps and config.depth == 1 else 1
    return Engine(scheduler, executor, clock, config.depth, horizon), executor
