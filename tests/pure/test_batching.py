"""Batching modes: who runs together."""

from __future__ import annotations

import pytest

from headrace.core.plan import StepPlan
from headrace.engine.batching import Alike, cache_kind, length_kind
from headrace.engine.engine import Engine
from headrace.engine.gates import Gates
from headrace.engine.gates.prefix import PrefixGate
from headrace.engine.gates.running import RunningGate

from .build import STEP_S, ends, mean, request, small_engine


def arrivals(num: int = 24, gap: int = 3) -> list:
    return [
        (gap * i, request(f"r{i}", range(100 * i, 100 * i + 4 + 5 * (i % 4)), max_tokens=3 + 7 * (i % 5)))
        for i in range(num)
    ]


class Plans:
    """Keeps what was launched."""

    def __init__(self, engine: Engine) -> None:
        self.executor, engine.executor = engine.executor, self
        self.kinds: list[set[str]] = []
        self.running: list[set[str]] = []

    def launch(self, plan: StepPlan):
        kinds = {"prompt" if s.start + s.count < s.sequence.num_tokens or s.count > 1 or s.start == 0 else "stream"
                 for s in plan.spans}  # fmt: skip
        self.kinds.append(kinds)
        self.running.append({span.sequence.request.id for span in plan.spans})
        return self.executor.launch(plan)


def test_a_static_batch_runs_to_its_end() -> None:
    engine = small_engine(num_blocks=(100,), max_running=4, batching="static")
    plans = Plans(engine)
    ended = ends(engine, arrivals())
    assert len(ended) == 24
    batch: set[str] = set()
    num_batches = 0
    for step, running in enumerate(plans.running, start=1):
        if not batch:
            num_batches += 1
            batch = set(running)
            size_known_at = step
        if step <= size_known_at + 4:  # prompts of a batch may take some steps to be begun
            batch |= running
        assert running <= batch, "somebody joined a batch under way"
        if all(ended[id] <= step for id in batch):
            batch = set()
    assert num_batches >= 6


def test_a_batch_is_packed_into_memory() -> None:
    """The first in order, then the largest that fit; what does not fit waits for the next batch."""
    engine = small_engine(num_blocks=(20,), context_length=80, budget=64, max_running=8, batching="static")
    sizes = {"first": 10, "small": 6, "large": 40, "medium": 30, "tiny": 4}
    for i, (id, size) in enumerate(sizes.items()):
        engine.submit(request(id, range(100 * i, 100 * i + size), max_tokens=2))
    engine.step()
    assert {s.request.id for s in engine.scheduler.state.running} == {"first", "large", "small", "tiny"} or {
        s.request.id for s in engine.scheduler.state.running
    } == {"first", "large", "small"}
    assert engine.stats().preemptions == 0


def test_a_window_gathers_or_ends() -> None:
    engine = small_engine(num_blocks=(100,), batching="window", batch_window_ms=1e3 * 10 * STEP_S, batch_size=3)
    engine.submit(request("a", [1], max_tokens=2))
    assert engine.step() == []
    assert engine.wake_s == pytest.approx(10 * STEP_S)
    for _ in range(9):
        engine.clock.advance(STEP_S)
        assert engine.step() == []
    engine.clock.advance(STEP_S)
    assert engine.wake_s is None
    assert [event.request_id for event in engine.step()] == ["a"]
    engine.submit(request("b", [2], max_tokens=2))
    assert [event.request_id for event in engine.step()] == ["a"], "b waits for a's batch"
    for id in ("c", "d"):
        assert engine.step() == []
        engine.submit(request(id, [3], max_tokens=2))
    assert {event.request_id for event in engine.step()} == {"b", "c", "d"}, "three are enough"


@pytest.mark.parametrize("batching", ["alike-length", "alike-cache"])
def test_only_their_like_run_together(batching: str) -> None:
    engine = small_engine(num_blocks=(300,), max_running=6)
    kind = length_kind if batching == "alike-length" else cache_kind
    engine.scheduler.gates = Gates([Alike(kind, patience_s=20 * STEP_S), RunningGate(6), PrefixGate()])
    state = engine.scheduler.state
    text = list(range(5000, 5040))
    requests = [
        (i, request(f"r{i}", [*text[: 40 * (i % 2)], *range(100 * i, 100 * i + 8)], max_tokens=10)) for i in range(30)
    ]
    most = 0
    left = list(requests)
    ended = set()
    kinds = {r.id: (len(r.prompt) + 10).bit_length() for _, r in requests}
    while left or engine.has_work:
        if left:
            engine.submit(left.pop(0)[1])
        ended |= {event.request_id for event in engine.step() if event.finish_reason}
        engine.scheduler.check()
        engine.clock.advance(STEP_S)
        together = [s.request.id for s in state.running]
        most = max(most, len(together))
        if batching == "alike-length":
            assert len({kinds[id] for id in together}) <= 1
        else:
            assert len({s.num_cached > 0 for s in state.running}) <= 1
    assert most >= 3
    assert len(ended) == 30


def test_another_kind_is_not_put_off_for_ever() -> None:
    """Short ones come faster than they end; the long one starts a second after it came, when those have ended."""
    engine = small_engine(num_blocks=(300,), max_running=6, batching="alike-length")
    shorts = [(2 * i, request(f"r{i}", [i], max_tokens=10)) for i in range(60)]
    ended = ends(engine, [*shorts, (5, request("long", [999], max_tokens=60))])
    assert ended["long"] <= 5 + 1 + 10 + 60


def test_prompts_and_streams_have_steps_of_their_own() -> None:
    engine = small_engine(num_blocks=(200,), max_running=6, batching="two-queues", budget=16)
    plans = Plans(engine)
    ended = ends(engine, arrivals())
    assert len(ended) == 24
    assert all(len(kinds) == 1 for kinds in plans.kinds)
    kinds = [next(iter(kinds)) for kinds in plans.kinds]
    assert kinds.count("prompt") >= 24
    runs = "".join(kind[0] for kind in kinds).split("s")
    assert max(map(len, runs)) <= 4 + 1, "streams do not stand still"


def test_continuous_batching_is_the_fastest() -> None:
    found = {}
    for batching in ("continuous", "static", "window", "alike-length", "two-queues"):
        engine = small_engine(
            num_blocks=(200,), max_running=6, batching=batching, batch_window_ms=1e4 * STEP_S, batch_size=6
        )
        requests = arrivals(40, gap=2)
        ended = ends(engine, requests)
        found[batching] = mean(ended[r.id] - at for at, r in requests)
    assert min(found, key=lambda name: found[name]) == "continuous"
    assert found["static"] > 1.5 * found["continuous"]
