"""Batch class: what the others leave, and never at their expense."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.errors import Overloaded
from headrace.core.request import Request
from headrace.engine.engine import Engine

from .build import STEP_S, drain, request, small_engine

# Nothing is shared between prompts: a batch request's prefix in the cache could only make others faster.
jobs = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 30), st.integers(1, 20), st.integers(1, 2)), min_size=1, max_size=10
)
batch_jobs = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 50), st.integers(1, 60), st.integers(1, 2)), min_size=1, max_size=12
)


def requests_of(drawn: list, first: int, **fields) -> list[tuple[int, Request]]:
    return [
        (at, request(f"{first}-{i}", range(first + 100 * i, first + 100 * i + p), n, num_choices=c, **fields))
        for i, (at, p, n, c) in enumerate(drawn)
    ]


def received(engine: Engine, arrivals: list[tuple[int, Request]]) -> list[set]:
    """Per step, what came for whom that is not of batch class; until all have ended."""
    interactive = {r.id for _, r in arrivals if not r.is_batch}
    steps: list[set] = []
    left = sorted(arrivals, key=lambda arrival: arrival[0])
    while left or engine.has_work:
        while left and left[0][0] <= len(steps):
            engine.submit(left.pop(0)[1])
        events = engine.step()
        engine.scheduler.check()
        engine.clock.advance(STEP_S)
        steps.append(
            {(e.request_id, e.choice, e.tokens, e.finish_reason) for e in events if e.request_id in interactive}
        )
        assert len(steps) < 5000, "no progress"
    return steps


num_yields = num_batch_tokens = 0


def test_nobody_waits_for_batch_class() -> None:
    check_batch_class()
    assert num_yields > 100
    assert num_batch_tokens > 5000


@given(
    jobs,
    batch_jobs,
    st.sampled_from(["fcfs", "srpt", "mlfq", "fair(priority(fcfs))", "ageing(sjf)", "dlpm"]),
    st.integers(2, 4),
    st.integers(4, 16),
    st.integers(28, 60),
)
@settings(max_examples=300, deadline=None)
def check_batch_class(
    drawn: list, drawn_batch: list, policy: str, max_running: int, budget: int, num_blocks: int
) -> None:
    """Every token of every other request comes with the same step as if there were no batch requests."""
    global num_yields, num_batch_tokens  # noqa: PLW0603
    interactive = requests_of(drawn, 0)
    batch = requests_of(drawn_batch, 50_000, is_batch=True)
    options = {
        "num_blocks": (num_blocks,),
        "max_running": max_running,
        "budget": budget,
        "policy": policy,
        "max_wait_s": 10 * STEP_S,
    }
    alone = received(small_engine(**options), interactive)
    engine = small_engine(**options)
    beside = received(engine, interactive + batch)
    assert beside[: len(alone)] == alone
    assert not any(beside[len(alone) :])
    stats = engine.stats()
    num_yields += stats.displacements
    num_batch_tokens += sum(n * c for _, _, n, c in drawn_batch)


def test_a_full_queue_of_batch_class_refuses_nobody_else() -> None:
    engine = small_engine(max_queue=2, max_running=1)
    for i in range(3):
        engine.submit(request(f"batch{i}", [i], is_batch=True))
    with pytest.raises(Overloaded):  # a place to run in, and two to wait in
        engine.submit(request("batch", [7], is_batch=True))
    for i in range(3):
        engine.submit(request(f"r{i}", [i + 10]))
    ended = [event.request_id for event in drain(engine) if event.finish_reason]
    assert ended == ["r0", "r1", "r2", "batch0", "batch1", "batch2"]


def test_what_is_left_is_used() -> None:
    """Beside a stream that leaves most of each step, batch work goes on as if alone."""
    engine = small_engine(budget=16, max_running=4, num_blocks=(200,))
    engine.submit(request("stream", [1], max_tokens=100))
    engine.submit(request("batch", range(60), max_tokens=20, is_batch=True))
    first = next(step for step in range(200) for e in engine.step() if e.request_id == "batch" and e.finish_reason)
    assert first <= 4 + 20
