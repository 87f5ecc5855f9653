"""Nobody starves: the bound on waiting holds on random schedules, around any policy."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.sequence import Sequence, Status
from headrace.engine.engine import Engine

from .build import STEP_S, ends, request, small_engine


def stream_of_shorts(num: int) -> list:
    return [(2 * i, request(f"short{i}", [i + 2], max_tokens=4)) for i in range(num)]


@pytest.mark.parametrize("policy", ["sjf", "srpt"])
def test_a_long_request_starves_without_ageing_and_not_with_it(policy: str) -> None:
    """Twice as many short ones come as two places can serve."""
    arrivals = [(0, request("first", [0], max_tokens=4)), *stream_of_shorts(100)]
    arrivals.append((1, request("long", [1], max_tokens=60)))
    plain = ends(small_engine(max_running=1, policy=policy), arrivals)
    assert plain["long"] == max(plain.values())
    aged = ends(small_engine(max_running=1, policy=f"ageing({policy})", max_wait_s=30 * STEP_S), arrivals)
    # It waits 30 steps, for the rest of one short one, and then runs 60 steps without giving way.
    assert aged["long"] <= 1 + 30 + 4 + 60 + 2


class Watch:
    """Records when each sequence began to wait, and asserts at each start whom it may overtake."""

    def __init__(self, engine: Engine, max_wait_s: float) -> None:
        self.engine, self.max_wait_s = engine, max_wait_s
        self.since: dict[int, float] = {}
        self.num_aged_starts = 0
        scheduler = engine.scheduler
        self._enqueue, scheduler._enqueue = scheduler._enqueue, self.enqueue
        self._admit, scheduler._admit = scheduler._admit, self.admit

    def enqueue(self, sequence: Sequence, now: float) -> None:
        self.since[sequence.id] = now
        self._enqueue(sequence, now)

    def admit(self, plan, sequence: Sequence, now: float) -> bool:
        waiting = list(self.engine.scheduler.state.waiting)
        admitted = self._admit(plan, sequence, now)
        if admitted:
            aged = [other for other in waiting if now - self.since[other.id] >= self.max_wait_s]
            assert not aged or sequence.arrival_s == min(other.arrival_s for other in aged), "an aged one was overtaken"
            self.num_aged_starts += bool(aged)
        return admitted


num_aged_starts = 0


def test_whoever_has_aged_is_overtaken_by_nobody() -> None:
    check_ageing()
    assert num_aged_starts > 200


@given(
    st.sampled_from(["sjf", "srpt", "mlfq", "edf", "slack", "lpf", "fair(srpt)", "dlpm(sjf)", "priority(fcfs)"]),
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(1, 9), st.integers(1, 25), st.integers(0, 2)), min_size=3, max_size=20
    ),
    st.integers(1, 3),
    st.sampled_from([0, 5, 20]),
)
@settings(max_examples=200, deadline=None)
def check_ageing(policy: str, arrivals: list, max_running: int, max_wait: int) -> None:
    global num_aged_starts  # noqa: PLW0603
    engine = small_engine(
        max_running=max_running, num_blocks=(200,), policy=f"ageing({policy})", max_wait_s=max_wait * STEP_S
    )
    watch = Watch(engine, max_wait * STEP_S)
    ended = ends(
        engine,
        [
            (
                at,
                request(
                    f"r{i}",
                    range(100 * i, 100 * i + p),
                    max_tokens=n,
                    tenant=str(kind),
                    priority=kind,
                    deadline_s=(at + 30) * STEP_S if kind else None,
                ),
            )
            for i, (at, p, n, kind) in enumerate(arrivals)
        ],
    )
    assert len(ended) == len(arrivals)
    num_aged_starts += watch.num_aged_starts


def test_the_aged_run_on() -> None:
    """A shorter one does not displace it, as it would one of its age."""
    engine = small_engine(max_running=1, policy="ageing(srpt)", max_wait_s=5 * STEP_S)
    arrivals = [
        (0, request("first", [0], max_tokens=10)),
        (0, request("long", [1], max_tokens=50)),
        (20, request("short", [2], max_tokens=2)),
    ]
    ended = ends(engine, arrivals)
    assert sorted(ended, key=lambda id: ended[id]) == ["first", "long", "short"]
    assert engine.stats().displacements == 0
    assert engine.scheduler.policy._aged == set(), "who has ended is forgotten"
    assert all(s.status is not Status.FINISHED for _, s in engine.scheduler.policy._spells._latest.values())


def test_aged_ones_that_may_not_start_hide_nobody() -> None:
    engine = small_engine(max_running=1, policy="ageing(fcfs)", max_wait_s=2.0)
    for number in range(61):
        if number == 46:  # the rest will not have aged
            engine.clock.advance(3.0)
        engine.submit(request(str(number), [number], max_tokens=50))
        if number == 0:
            engine.step()
    engine.step()
    waiting = engine.scheduler.state.waiting
    found = [sequence.request_id for sequence in engine.scheduler.policy.candidates(waiting, 60)]
    assert found == [str(number) for number in range(1, 61)]
    assert len(list(engine.scheduler.policy.candidates(waiting, 50))) == 50
