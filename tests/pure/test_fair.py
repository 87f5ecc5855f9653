"""Virtual token counters: tenants who keep requests waiting get the same service, within the bound of the paper."""

from __future__ import annotations

import pytest

from benchmarks.policies.backlogged import gaps, serve_backlogged
from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.engine.engine import Engine
from headrace.engine.ledger import GENERATED_WORK, PROMPT_WORK
from headrace.engine.policies import Policy
from headrace.engine.policies.fair import Fair
from headrace.engine.policies.fcfs import FirstComeFirstServed

from .build import small_engine

LONGEST, MOST = 40, 30


def run(policy: Policy, tenants: dict[str, int], num_steps: int) -> tuple[list[dict[str, float]], Engine]:
    """Each tenant keeps so many requests waiting. Returns the service each got until each step."""
    engine = small_engine(num_blocks=(120,), budget=32, max_running=6, max_queue=1000)
    engine.scheduler.policy = policy
    history = serve_backlogged(
        engine,
        tenants,
        num_steps,
        longest_prompt=LONGEST,
        longest_reply=MOST,
        each_step=lambda _: engine.scheduler.check(),
    )
    return history, engine


BOUND = 2 * max(PROMPT_WORK * LONGEST, GENERATED_WORK * 6 * MOST)


def test_backlogged_tenants_get_the_same_service() -> None:
    history, _ = run(Fair(FirstComeFirstServed()), {"a": 20, "b": 2}, 3000)
    total = sum(history[-1].values())
    assert total > 50 * BOUND
    assert max(gaps(history, {"a": 1.0, "b": 1.0})) <= BOUND + 32 * GENERATED_WORK
    first_come, _ = run(FirstComeFirstServed(), {"a": 20, "b": 2}, 3000)
    assert max(gaps(first_come, {"a": 1.0, "b": 1.0})) > 10 * BOUND
    assert total >= 0.97 * sum(first_come[-1].values())


def test_weights_are_served_as_such() -> None:
    weights = {"a": 1.0, "b": 2.0, "c": 4.0}
    history, _ = run(Fair(FirstComeFirstServed(), weights), dict.fromkeys(weights, 10), 4000)
    shares = [history[-1][name] / weight for name, weight in weights.items()]
    assert max(shares) == pytest.approx(min(shares), rel=0.05)


def test_nobody_saves_up_while_away() -> None:
    policy = Fair(FirstComeFirstServed())
    engine = small_engine(budget=32, max_running=6)
    engine.scheduler.policy = policy
    engine.submit(Request("early", (1, 2, 3), SamplingParams(max_tokens=2), tenant="b"))
    for i in range(40):
        engine.submit(Request(f"a{i}", (i, 2, 3), SamplingParams(max_tokens=20), tenant="a"))
    for _ in range(30):
        engine.step()
    ahead = policy.counters["a"]
    assert ahead > 100
    assert policy.counters["b"] < 20
    engine.submit(Request("late", (1, 2, 3), SamplingParams(max_tokens=2), tenant="b"))
    assert policy.counters["b"] == ahead


def test_one_tenant_is_served_as_by_the_inner_policy() -> None:
    fair, _ = run(Fair(FirstComeFirstServed()), {"a": 10}, 300)
    plain, _ = run(FirstComeFirstServed(), {"a": 10}, 300)
    assert fair == plain
