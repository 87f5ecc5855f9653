"""SJF and SRPT: the order of brute force, a better mean than arrival's, and restoring within bounds."""

from __future__ import annotations

import random
from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.ledger import GENERATED_WORK, PROMPT_WORK

from .build import ends, mean, request, small_engine

ORACLE = {"predictor": "oracle"}


def unlike(number: int, length: int) -> list[int]:
    """A prompt that shares nothing with another number's."""
    return [100 * number + i for i in range(length)]


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 20)), min_size=1, max_size=6))
@settings(max_examples=60, deadline=None)
def test_the_shortest_is_served_first(sizes: list[tuple[int, int]]) -> None:
    requests = [request(f"r{i}", unlike(i, prompt), max_tokens=reply) for i, (prompt, reply) in enumerate(sizes)]
    work = {r.id: PROMPT_WORK * len(r.prompt) + GENERATED_WORK * r.sampling.max_tokens for r in requests}
    for policy in ("sjf", "srpt"):
        ended = ends(small_engine(max_running=1, policy=policy, **ORACLE), [(0, r) for r in requests])
        assert sorted(ended, key=lambda id: ended[id]) == sorted(work, key=lambda id: (work[id], int(id[1:])))


@given(st.lists(st.integers(1, 20), min_size=1, max_size=5))
@settings(max_examples=40, deadline=None)
def test_no_order_of_a_burst_has_a_smaller_mean(lengths: list[int]) -> None:
    requests = [request(f"r{i}", unlike(i, 1), max_tokens=length) for i, length in enumerate(lengths)]
    best = min(
        mean(sum(order[: i + 1]) for i in range(len(order))) for order in permutations(lengths)
    )  # a step per token
    ended = ends(small_engine(max_running=1, policy="srpt", **ORACLE), [(0, r) for r in requests])
    assert mean(ended.values()) == best


def burst() -> list[tuple[int, object]]:
    """Long replies first, and then many short ones."""
    rng = random.Random(5)
    longs = [(0, request(f"long{i}", unlike(i, 8), max_tokens=150)) for i in range(4)]
    shorts = [
        (rng.randint(1, 200), request(f"short{i}", unlike(100 + i, 8), max_tokens=rng.randint(2, 30)))
        for i in range(60)
    ]
    return longs + shorts


def test_means_fall_with_what_is_known() -> None:
    found = {}
    for policy in ("fcfs", "sjf", "srpt"):
        engine = small_engine(max_running=4, num_blocks=(400,), policy=policy, **ORACLE)
        arrivals = burst()
        ended = ends(engine, arrivals)
        found[policy] = mean(ended[r.id] - step for step, r in arrivals)
    assert found["srpt"] < 0.6 * found["fcfs"]
    assert found["srpt"] <= found["sjf"] <= found["fcfs"]


def test_errors_of_prediction_cost_little_by_little() -> None:
    found = {}
    for sigma in (0.0, 0.5, 1.0, 2.0):
        engine = small_engine(max_running=4, num_blocks=(400,), policy="srpt", predictor_sigma=sigma, **ORACLE)
        arrivals = burst()
        ended = ends(engine, arrivals)
        found[sigma] = mean(ended[r.id] - step for step, r in arrivals)
    engine = small_engine(max_running=4, num_blocks=(400,))
    arrivals = burst()
    ended = ends(engine, arrivals)
    first_come = mean(ended[r.id] - step for step, r in arrivals)
    assert found[0.0] <= 1.05 * min(found.values())
    assert found[1.0] <= 1.5 * found[0.0]
    assert max(found.values()) <= first_come


def test_who_outlives_its_prediction_moves_back() -> None:
    """Predicted to have 3 tokens, it has had 33: it is expected to have as many more, and gives way."""
    engine = small_engine(max_running=1, policy="srpt", lengths={"liar": 3, "short": 6}, **ORACLE)
    ended = ends(
        engine,
        [(0, request("liar", unlike(0, 2), max_tokens=200)), (33, request("short", unlike(1, 2), max_tokens=6))],
    )
    assert ended["short"] <= 45
    assert engine.stats().displacements == 1


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20), st.integers(1, 60)), min_size=2, max_size=14),
    st.integers(1, 3),
    st.sampled_from([0.0, 1.5]),
)
@settings(max_examples=150, deadline=None)
def test_restoring_costs_no_more_than_generating(arrivals, max_running: int, sigma: float) -> None:
    """And one restoring of each: a sequence is displaced again only when the last one has been paid for."""
    engine = small_engine(
        num_blocks=(400,), max_running=max_running, policy="srpt", predictor_sigma=sigma, costs=None, **ORACLE
    )
    requests = [(at, request(f"r{i}", unlike(i, p), max_tokens=n)) for i, (at, p, n) in enumerate(arrivals)]
    ends(engine, requests)
    stats = engine.stats()
    useful = sum(len(r.prompt) + r.sampling.max_tokens - 1 for _, r in requests)
    restored = PROMPT_WORK * (stats.computed_tokens - useful)
    longest = sum(PROMPT_WORK * (len(r.prompt) + r.sampling.max_tokens) for _, r in requests)
    assert restored <= GENERATED_WORK * stats.generated_tokens + longest
    assert stats.preemptions == stats.displacements <= 40 * len(requests)
