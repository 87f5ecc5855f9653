"""Small engines for the pure tests."""

from __future__ import annotations

from headrace.core.cache import CacheGroup, CacheKind
from headrace.core.clock import ManualClock
from headrace.core.events import TokenEvent
from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.engine.budget import FixedBudget
from headrace.engine.engine import Engine
from headrace.engine.gates import Gates
from headrace.engine.gates.prefix import PrefixGate
from headrace.engine.gates.running import RunningGate
from headrace.engine.limits import Limits
from headrace.engine.policies.fcfs import FirstComeFirstServed
from headrace.engine.scheduler import Scheduler
from headrace.engine.speculative.step_cost import StepCost
from headrace.engine.state import EngineState
from headrace.memory.manager import MemoryManager

from .checking_executor import CheckingExecutor

VOCAB_SIZE = 100_000
FULL = CacheGroup("full", CacheKind.FULL, block_size=4, bytes_per_block=1)


class KnownCost(StepCost):
    """A row costs so much of a step without rows."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self._share = share

    def observe(self, rows: int, seconds: float) -> None:
        pass


def small_engine(
    groups: tuple[CacheGroup, ...] = (FULL,),
    num_blocks: tuple[int, ...] = (64,),
    *,
    budget: int = 16,
    max_running: int = 8,
    max_queue: int = 100,
    context_length: int = 1000,
    depth: int = 1,
) -> Engine:
    memory = MemoryManager(groups, num_blocks)
    capacity = memory.capacity_tokens(budget, depth)
    limits = Limits(context_length, capacity, max_queue, max_running, VOCAB_SIZE)
    gates = Gates([RunningGate(max_running), PrefixGate()])
    scheduler = Scheduler(EngineState(memory), FirstComeFirstServed(), gates, FixedBudget(budget), limits)
    return Engine(scheduler, CheckingExecutor(groups), ManualClock(), depth)


def request(id: str, prompt, max_tokens: int = 4, **fields) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, seed=fields.pop("seed", 0))
    return Request(id, tuple(prompt), sampling, **fields)


def drain(engine: Engine) -> list[TokenEvent]:
    events = []
    while engine.has_work:
        events += engine.step()
        engine.scheduler.check()
    return events
