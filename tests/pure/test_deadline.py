"""Deadlines: what can be met is met, and arrival's order is not enough for that."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .build import STEP_S, ends, request, small_engine


def wants(id: int, num_tokens: int, deadline: float | None, at: int = 0):
    """Served alone it takes a step per token."""
    due_s = None if deadline is None else deadline * STEP_S
    return at, request(f"r{id}", [id], max_tokens=num_tokens, deadline_s=due_s)


def num_late(ended: dict[str, int], arrivals: list) -> int:
    return sum(r.deadline_s is not None and ended[r.id] * STEP_S > r.deadline_s for _, r in arrivals)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 30)), min_size=1, max_size=5))
@settings(max_examples=80, deadline=None)
def test_what_some_order_meets_is_met(jobs: list[tuple[int, int]]) -> None:
    can_be_met = any(
        all(sum(n for n, _ in order[: i + 1]) <= due for i, (_, due) in enumerate(order))
        for order in permutations(jobs)
    )
    arrivals = [wants(i, n, due) for i, (n, due) in enumerate(jobs)]
    late = num_late(ends(small_engine(max_running=1, policy="edf"), arrivals), arrivals)
    assert not (can_be_met and late)


def test_deadlines_that_arrival_misses() -> None:
    arrivals = [wants(0, 40, None), wants(1, 10, 30, at=1), wants(2, 5, 12, at=2), wants(3, 20, 200, at=3)]
    missed = {policy: num_late(ends(small_engine(max_running=1, policy=policy), arrivals), arrivals)
              for policy in ("fcfs", "edf", "slack")}  # fmt: skip
    assert missed == {"fcfs": 2, "edf": 0, "slack": 0}


def test_without_a_deadline_by_arrival() -> None:
    arrivals = [wants(i, 9 - i, None, at=i) for i in range(5)]
    for policy in ("edf", "slack"):
        ended = ends(small_engine(max_running=1, policy=policy), arrivals)
        assert sorted(ended, key=lambda id: ended[id]) == [f"r{i}" for i in range(5)]


def test_slack_weighs_what_is_left_to_do() -> None:
    """Due at 50 with 45 to do comes before due at 20 with 2 to do."""
    arrivals = [wants(0, 2, 20), wants(1, 17, 20)]
    ended = ends(small_engine(max_running=1, policy="slack"), arrivals)
    assert ended["r1"] < ended["r0"] == 19
    ended = ends(small_engine(max_running=1, policy="edf"), arrivals)
    assert ended["r0"] < ended["r1"]


@pytest.mark.parametrize("policy", ["edf", "slack"])
def test_nobody_is_made_late_for_another(policy: str) -> None:
    """The later deadline gives way only while it can still be met afterwards."""
    for due, displaced in ((60, True), (24, False)):
        arrivals = [wants(0, 20, due), wants(1, 8, 14, at=4)]
        engine = small_engine(max_running=1, policy=policy)
        ended = ends(engine, arrivals)
        assert bool(engine.stats().displacements) == displaced
        assert ended["r0"] <= due
