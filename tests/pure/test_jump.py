"""Taking several steps at once changes nothing: same events at the same times, same blocks, same counters."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.core.cache import CacheGroup, CacheKind
from headrace.core.clock import ManualClock
from headrace.core.errors import RequestError
from headrace.core.events import TokenEvent
from headrace.core.plan import StepPlan
from headrace.core.request import Request
from headrace.core.result import StepResult
from headrace.core.sampling import SamplingParams
from headrace.core.work import StepWork
from headrace.engine.budget import FixedBudget, PacedBudget
from headrace.engine.costs import GivenCosts
from headrace.engine.engine import Engine
from headrace.engine.gates import Gates
from headrace.engine.gates.prefix import PrefixGate
from headrace.engine.gates.running import RunningGate
from headrace.engine.ledger import Ledger
from headrace.engine.limits import Limits
from headrace.engine.policies.fair import Fair
from headrace.engine.policies.fcfs import FirstComeFirstServed
from headrace.engine.policies.priority import ByPriority
from headrace.engine.scheduler import Scheduler
from headrace.engine.state import EngineState
from headrace.memory.manager import MemoryManager
from headrace.sim.executor import SimExecutor

FULL, WINDOW, STATE = CacheKind.FULL, CacheKind.WINDOW, CacheKind.STATE
LONGEST = 60


class Times:
    """A step's time depends on everything there is, so that one step more or less shows."""

    def seconds(self, work: StepWork) -> float:
        return (
            0.01
            + 0.003 * work.num_streams
            + 0.002 * work.num_prompt
            + 1e-5 * work.num_keys
            + 1e-6 * work.num_pairs
            + 1e-4 * work.num_readouts
        )


class Watched(SimExecutor):
    """Counts the steps in which a prompt was read, or its reply begun, in jumps; the prompts whose last chunk was among
    them; and the replies."""

    num_chunks = num_read = num_begun = 0

    def run(self, plan: StepPlan, work: StepWork, launched_s: float) -> StepResult:
        num_readouts = len(plan.readout_rows)
        result = super().run(plan, work, launched_s)
        self.num_chunks += len(result.earlier) if plan.chunks is not None else 0
        self.num_read += len(plan.readout_rows) - num_readouts
        if plan.chunks is not None and result.earlier:
            self.num_begun += plan.chunks.path[-2] >= plan.chunks.span.sequence.num_prompt
        return result


@dataclass(frozen=True)
class Setup:
    kinds: tuple[CacheKind, ...]
    block_size: int
    window: int
    spare: int
    budget: int
    is_paced: bool
    max_running: int
    vocab_size: int
    """A sequence says one word all its life: with few of them, two say the same and come to share blocks."""

    def build(self, max_horizon: int) -> tuple[Engine, Watched]:
        size = self.block_size
        groups = tuple(
            CacheGroup(
                kind.value,
                kind,
                size,
                1,
                window=self.window if kind is WINDOW else 0,
                checkpoint_interval=2 * size if kind is STATE else 0,
            )
            for kind in self.kinds
        )
        sizes = {FULL: -(-LONGEST // size), WINDOW: -(-(self.window + self.budget) // size) + 2, STATE: 2}
        memory = MemoryManager(groups, tuple(sizes[kind] + self.spare for kind in self.kinds))
        limits = Limits(LONGEST, memory.capacity_tokens(self.budget, 1), 6, self.max_running, 100)
        costs = GivenCosts(Times())
        scheduler = Scheduler(
            EngineState(memory, Ledger(costs=costs)),
            Fair(ByPriority(FirstComeFirstServed())),
            Gates([RunningGate(self.max_running), PrefixGate()]),
            PacedBudget(self.budget, costs) if self.is_paced else FixedBudget(self.budget),
            limits,
        )
        clock = ManualClock()
        executor = Watched(clock, Times(), self.vocab_size)
        return Engine(scheduler, executor, clock, max_horizon=max_horizon), executor


@dataclass(frozen=True)
class Arrival:
    gap_s: float
    text: int
    num_prompt: int
    num_output: int
    tenant: int
    priority: int
    wish: int
    """0: two choices, 1: a stop token that may come, 2: scores, 3: an abort later, 4: a fork, 5 and 6: batch class."""


setups = st.builds(
    Setup,
    kinds=st.sampled_from([(FULL,), (FULL,), (FULL,), (WINDOW,), (FULL, WINDOW), (FULL, STATE)]),
    block_size=st.sampled_from([1, 2, 4, 8]),
    window=st.integers(2, 9),
    spare=st.integers(0, 12),
    budget=st.integers(8, 24),
    is_paced=st.booleans(),
    max_running=st.integers(1, 6),
    vocab_size=st.sampled_from([1, 2, 100]),
)
arrivals = st.lists(
    st.builds(
        Arrival,
        gap_s=st.sampled_from([0.0, 0.005, 0.03, 0.1, 0.4, 1.0]),
        text=st.integers(0, 2),
        num_prompt=st.integers(1, 40),
        num_output=st.integers(1, 36),
        tenant=st.integers(0, 1),
        priority=st.integers(0, 1),
        wish=st.integers(0, 12),
    ),
    min_size=1,
    max_size=12,
)


@dataclass
class Outcome:
    events: list[TokenEvent]
    refused: list[int]
    end_s: float
    stats: object
    memory: list
    longest_jump: int
    executor: Watched


def run(setup: Setup, arrivals: list[Arrival], max_horizon: int) -> Outcome:
    """Requests enter, and leave, between steps, at the first end of a step after their time."""
    engine, executor = setup.build(max_horizon)
    clock, scheduler = engine.clock, engine.scheduler
    due: list[tuple[float, int, str]] = []
    time_s = 0.0
    for index, arrival in enumerate(arrivals):
        time_s += arrival.gap_s
        due.append((time_s, index, "submit"))
        if arrival.wish in (3, 4):
            due.append((time_s + 0.2, index, "abort" if arrival.wish == 3 else "fork"))
    due.sort()
    outcome = Outcome([], [], 0.0, None, [], 0, executor)
    num_steps = 0
    while due or engine.has_work:
        while due and due[0][0] <= clock.now():
            _, index, what = due.pop(0)
            message(engine, arrivals[index], index, what, outcome)
        if not engine.has_work and due:
            clock.advance_to(due[0][0])
            continue
        executor.until_s = due[0][0] if due else float("inf")
        before = scheduler.counters.steps
        outcome.events += engine.step()
        outcome.longest_jump = max(outcome.longest_jump, scheduler.counters.steps - before)
        scheduler.check()
        num_steps += 1
        assert num_steps < 3000, "no progress"
    memory = scheduler.state.memory
    outcome.end_s, outcome.stats = clock.now(), engine.stats()
    # The free blocks in the order in which they will be taken, the idle ones in that of their eviction.
    outcome.memory = [
        (group.pool._free, list(memory.tree._idle[group.index]._blocks), sorted(memory.tree._node_of[group.index]))
        for group in memory.groups
    ]
    return outcome


def message(engine: Engine, arrival: Arrival, index: int, what: str, outcome: Outcome) -> None:
    if what == "abort":
        return engine.abort(f"r{index}")
    try:
        if what == "fork":
            engine.fork(f"r{index}", 0)
            return None
        sampling = SamplingParams(
            max_tokens=arrival.num_output, stop_token_ids=frozenset([1] if arrival.wish == 1 else [])
        )
        prompt = tuple((n * 7 + n * arrival.text) % 50 for n in range(arrival.num_prompt))
        engine.submit(
            Request(
                f"r{index}",
                prompt,
                sampling,
                num_choices=2 if arrival.wish == 0 else 1,
                score_prompt=arrival.wish == 2,
                tenant=f"t{arrival.tenant}",
                priority=arrival.priority,
                is_batch=arrival.wish in (5, 6),
            )
        )
    except RequestError:
        outcome.refused.append(index)


seen: Counter[str] = Counter()


@settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
@given(setup=setups, script=arrivals)
def compare(setup: Setup, script: list[Arrival]) -> None:
    stepwise, jumping = run(setup, script, 1), run(setup, script, 1000)
    assert stepwise.longest_jump <= 1
    longest = jumping.longest_jump
    assert replace(jumping, longest_jump=0, executor=None) == replace(stepwise, longest_jump=0, executor=None)
    stats, executor = jumping.stats, jumping.executor
    seen.update(
        {
            "schedules": 1,
            "jumps": longest > 1,
            "jumps of eight steps": longest >= 8,
            "chunks read in jumps": executor.num_chunks,
            "prompts read to their end in jumps": executor.num_read,
            "replies begun in jumps": executor.num_begun,
            "evictions beside chunks": stats.evictions if executor.num_chunks else 0,
            "preemptions": stats.preemptions,
            "evictions": stats.evictions,
            "evictions beside jumps": stats.evictions if longest > 1 else 0,
            "refused": len(jumping.refused),
            "batch class beside jumps": sum(arrival.wish in (5, 6) for arrival in script) if longest > 1 else 0,
        }
    )


def test_jumping_gives_the_schedule_of_single_steps() -> None:
    seen.clear()
    compare()
    print(dict(seen))
    rare = {name: number for name, number in seen.items() if number < 20}
    assert not rare, f"the schedules hardly ever get there: {rare}"


def test_a_prompt_of_batch_class_does_not_read_on_past_who_waits_for_a_prefix() -> None:
    """Who came with the first one's prompt waits, asked and not admitted, for the block that this one completes; the
    batch one starts meanwhile and takes the rest of the budget. A step later it gives way."""
    setup = Setup((FULL,), 4, 2, spare=40, budget=7, is_paced=False, max_running=4, vocab_size=100)
    script = [
        Arrival(0.0, text=0, num_prompt=8, num_output=30, tenant=0, priority=0, wish=12),
        Arrival(0.001, text=0, num_prompt=16, num_output=4, tenant=0, priority=0, wish=12),
        Arrival(0.0, text=1, num_prompt=40, num_output=4, tenant=0, priority=0, wish=5),
    ]
    stepwise, jumping = run(setup, script, 1), run(setup, script, 1000)
    assert jumping.events == stepwise.events
