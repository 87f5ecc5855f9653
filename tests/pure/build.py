"""Small engines for the pure tests."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.core.cache import CacheGroup, CacheKind
from headrace.core.clock import ManualClock
from headrace.core.events import TokenEvent
from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.core.work import StepWork
from headrace.engine.composition import SchedulingConfig, make_scheduler
from headrace.engine.costs import GivenCosts, StepCosts
from headrace.engine.engine import Engine
from headrace.engine.limits import Limits
from headrace.memory.manager import MemoryManager

from .checking_executor import CheckingExecutor

VOCAB_SIZE = 100_000
STEP_S = 1.0
FULL = CacheGroup("full", CacheKind.FULL, block_size=4, bytes_per_block=1)


class StepsOnly:
    """Every step takes as long; sixteen prompt tokens take one of their own."""

    def seconds(self, work: StepWork) -> float:
        return STEP_S * ((work.num_streams > 0) + work.num_prompt / 16)


STEPS_ONLY = GivenCosts(StepsOnly())


class RowsOnly:
    """A row costs so much of a step without rows."""

    def __init__(self, share: float) -> None:
        self._share = share

    def seconds(self, work: StepWork) -> float:
        return 1.0 + self._share * (work.num_streams + work.num_prompt)


def small_engine(
    groups: tuple[CacheGroup, ...] = (FULL,),
    num_blocks: tuple[int, ...] = (64,),
    *,
    budget: int = 16,
    max_running: int = 8,
    max_queue: int = 100,
    context_length: int = 1000,
    depth: int = 1,
    lengths: Mapping[str, int] | None = None,
    costs: StepCosts | None = STEPS_ONLY,
    **scheduling,
) -> Engine:
    """First come, first served and a fixed budget, unless `scheduling` says otherwise. `lengths`: the oracle's."""
    memory = MemoryManager(groups, num_blocks)
    capacity = memory.capacity_tokens(budget, depth)
    limits = Limits(context_length, capacity, max_queue, max_running, VOCAB_SIZE)
    config = SchedulingConfig(**{"policy": "fcfs", "budget": "fixed", **scheduling})
    scheduler = make_scheduler(config, memory, limits, budget, costs=costs, lengths=lengths)
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


def ends(engine: Engine, arrivals: list[tuple[int, Request]]) -> dict[str, int]:
    """Request id -> the step it ended with, counted from 1, where (n, request) arrives after n steps."""
    left, ended, step = sorted(arrivals, key=lambda arrival: arrival[0]), {}, 0
    while left or engine.has_work:
        while left and left[0][0] <= step:
            engine.submit(left.pop(0)[1])
        events = engine.step()
        engine.scheduler.check()
        engine.clock.advance(STEP_S)
        step += 1
        ended |= {event.request_id: step for event in events if event.finish_reason}
        assert step < 20_000, "no progress"
    return ended


def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values)
