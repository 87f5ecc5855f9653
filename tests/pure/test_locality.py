"""Longest prefix first, and fairness that keeps it."""

from __future__ import annotations

import random

from headrace.engine.ledger import GENERATED_WORK, PROMPT_WORK
from headrace.engine.policies.deficit import DeficitFair
from headrace.engine.policies.fcfs import FirstComeFirstServed
from headrace.engine.policies.longest_prefix import LongestPrefixFirst

from .build import drain, ends, request, small_engine
from .test_fair import LONGEST, MOST, run


def test_the_longest_cached_prefix_goes_first() -> None:
    engine = small_engine(max_running=1, num_blocks=(200,), budget=64, policy="lpf")
    text = list(range(60))
    engine.submit(request("cached", text, max_tokens=1))
    drain(engine)
    shares = {f"r{i}": shared for i, shared in enumerate((0, 12, 40, 4, 40, 24))}
    for number, (id, shared) in enumerate(shares.items(), start=1):
        own = [1000 * number + i for i in range(60 - shared)]
        engine.submit(request(id, [*text[:shared], *own], max_tokens=2))
    ended = [event.request_id for event in drain(engine) if event.finish_reason]
    assert ended == ["r2", "r4", "r5", "r1", "r3", "r0"]


def conversations(num: int) -> list:
    """Two texts, in turn, with a cache that holds one and a half."""
    texts = [[1000 * t + i for i in range(80)] for t in range(4)]
    return [(0, request(f"r{i}", [*texts[i % 4], 9000 + i], max_tokens=2, tenant=str(i % 2))) for i in range(num)]


def test_locality_saves_prompts_and_survives_fairness() -> None:
    hits = {}
    for policy in ("fcfs", "lpf", "dlpm"):
        engine = small_engine(num_blocks=(45,), context_length=170, max_running=1, budget=32, policy=policy)
        ended = ends(engine, conversations(40))
        assert len(ended) == 40
        stats = engine.stats()
        hits[policy] = stats.cached_tokens / stats.prompt_tokens
    assert hits["lpf"] > hits["fcfs"] + 0.3
    assert hits["dlpm"] > hits["fcfs"] + 0.2


def test_deficits_bound_the_gap_between_tenants() -> None:
    quantum = 500.0
    history, _engine = run(DeficitFair(FirstComeFirstServed(), quantum=quantum), {"a": 20, "b": 2}, 3000)
    bound = 2 * (quantum + 6 * (PROMPT_WORK * LONGEST + GENERATED_WORK * MOST))
    assert sum(history[-1].values()) > 20 * bound
    assert max(abs(now["a"] - now["b"]) for now in history) <= bound
    first_come, _ = run(FirstComeFirstServed(), {"a": 20, "b": 2}, 3000)
    assert max(abs(now["a"] - now["b"]) for now in first_come) > 5 * bound
    assert sum(history[-1].values()) >= 0.97 * sum(first_come[-1].values())


def test_weights_count() -> None:
    weights = {"a": 1.0, "b": 3.0}
    history, _ = run(DeficitFair(FirstComeFirstServed(), weights, quantum=200.0), dict.fromkeys(weights, 10), 4000)
    assert 2.8 <= history[-1]["b"] / history[-1]["a"] <= 3.2


def test_the_window_is_the_inner_policys() -> None:
    """A request without a hit is not overtaken by one that is not among the inner policy's first."""
    engine = small_engine(max_running=1, num_blocks=(300,), max_queue=1000, budget=32)
    policy = engine.scheduler.policy = LongestPrefixFirst(FirstComeFirstServed(), engine.scheduler.state.memory)
    rng, text = random.Random(2), list(range(30))
    engine.submit(request("cached", text, max_tokens=1))
    drain(engine)
    for i in range(100):
        prompt = [*text, 500 + i] if i >= 50 else [1000 + 40 * i + rng.randrange(40) for _ in range(8)]
        engine.submit(request(f"r{i}", prompt, max_tokens=1))
    first = [sequence.request.id for sequence in policy.candidates(engine.scheduler.state.waiting, 64)]
    assert first == [f"r{i}" for i in range(32)]
