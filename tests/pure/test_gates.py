"""Gates: memory by what will be freed, quotas, deadlines that will be missed."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.cache import CacheGroup, CacheKind
from headrace.core.errors import Overloaded
from headrace.core.sequence import FinishReason
from headrace.engine.backlog import seconds_to_start
from headrace.engine.gates.memory import peak_blocks

from .build import STEP_S, drain, ends, request, small_engine

TOKENS = CacheGroup("tokens", CacheKind.FULL, block_size=1, bytes_per_block=1)


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=8))
@settings(max_examples=100, deadline=None)
def test_the_peak_is_what_running_them_takes(sizes: list[tuple[int, int]]) -> None:
    """Against a sum for each step to come; half a block, here of one token, is added for each."""
    engine = small_engine((TOKENS,), (600,), budget=300, max_running=8)
    for i, (p, n) in enumerate(sizes):
        engine.submit(request(f"r{i}", range(100 * i, 100 * i + p), max_tokens=n))
    state = engine.scheduler.state
    peak = max(sum(p + step for p, n in sizes if n >= step) for step in range(1, 31))
    assert peak <= peak_blocks(list(state.waiting), state) <= peak + len(sizes) / 2


def test_reserving_replies_avoids_preemption() -> None:
    rng = random.Random(4)
    arrivals = [
        (3 * i, request(f"r{i}", range(100 * i, 100 * i + rng.randint(4, 20)), max_tokens=rng.randint(10, 60)))
        for i in range(60)
    ]
    found = {}
    for reserve in (False, True):
        engine = small_engine(num_blocks=(50,), context_length=100, max_running=16, reserve_replies=reserve)
        ended = ends(engine, arrivals)
        found[reserve] = (engine.stats().preemptions, max(ended.values()))
    assert found[False][0] > 20
    assert found[True][0] == 0
    assert found[True][1] <= 1.1 * found[False][1], "and it waits for no more than that"


def test_reserving_lets_in_who_fits_when_others_have_ended() -> None:
    """40 + 40 tokens do not fit 60, but the first will have ended when the second is as long."""
    engine = small_engine((TOKENS,), (60,), budget=64, context_length=60, reserve_replies=True)
    engine.submit(request("a", range(35), max_tokens=5))
    engine.step()
    engine.submit(request("b", range(100, 104), max_tokens=36))
    engine.step()
    assert engine.stats().num_running == 2
    drain(engine)
    assert engine.stats().preemptions == 0


def test_a_tenant_has_its_quota_and_no_more() -> None:
    engine = small_engine(num_blocks=(200,), max_running=8, tenant_running_tokens=50)
    for i in range(12):
        engine.submit(request(f"a{i}", [10 * i] * 10, max_tokens=10, tenant="a"))  # 20 tokens each
    engine.submit(request("b", [7] * 80, max_tokens=10, tenant="b"))  # larger than the quota, and alone
    seen = set()
    while engine.has_work:
        engine.step()
        engine.scheduler.check()
        tenants = [s.request.tenant for s in engine.scheduler.state.running]
        assert tenants.count("a") <= 2
        seen.add((tenants.count("a"), tenants.count("b")))
    assert (2, 1) in seen
    stats = {tenant.name: tenant for tenant in engine.stats().tenants}
    assert (stats["a"].generated_tokens, stats["b"].generated_tokens) == (120, 10)
    assert (stats["a"].num_running, stats["a"].num_queued) == (0, 0)


@pytest.mark.parametrize("policy", ["fair", "dlpm", "fair(ageing(srpt))"])
def test_who_has_used_up_its_quota_holds_up_nobody_else(policy: str) -> None:
    """A hundred requests wait for their tenant's quota, more than a step looks at; others' start at once."""
    engine = small_engine(
        num_blocks=(400,), max_running=8, max_queue=1000, budget=64, tenant_running_tokens=50, policy=policy
    )
    for i in range(100):
        engine.submit(request(f"a{i}", [10 * i] * 10, max_tokens=10, tenant="a"))
    engine.step()
    for tenant in ("b", "c"):
        engine.submit(request(tenant, [7], max_tokens=10, tenant=tenant))
    engine.step()
    assert {s.request.tenant for s in engine.scheduler.state.running} == {"a", "b", "c"}
    assert len({event.request_id for event in drain(engine)}) == 102


def test_what_a_tenant_may_keep_waiting_is_bounded() -> None:
    engine = small_engine(max_running=1, tenant_queued_tokens=30)
    engine.submit(request("a0", [0] * 10, max_tokens=10, tenant="a"))
    engine.step()
    engine.submit(request("a1", [1] * 10, max_tokens=10, tenant="a"))
    with pytest.raises(Overloaded, match=r"20 tokens of yours .* 20 more; the quota is 30") as refused:
        engine.submit(request("a2", [2] * 10, max_tokens=10, tenant="a"))
    assert refused.value.code == "tenant_quota"
    assert refused.value.retry_after_s >= 1
    engine.submit(request("b", [3] * 60, max_tokens=10, tenant="b"))
    assert len({event.request_id for event in drain(engine)}) == 3
    engine.submit(request("a2", [2] * 10, max_tokens=10, tenant="a"))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 4), st.integers(0, 10))
@settings(max_examples=100, deadline=None)
def test_the_backlog_is_predicted_to_the_step(lengths: list[int], max_running: int, after: int) -> None:
    """First come, first served, with known lengths: when the newcomer starts; and a sixteenth for each prompt's
    token."""
    engine = small_engine(num_blocks=(400,), max_running=max_running, budget=300, predictor="oracle")
    for i, length in enumerate(lengths):
        engine.submit(request(f"r{i}", [i], max_tokens=length))
    for _ in range(after):
        engine.step()
    predicted = seconds_to_start(engine.scheduler.state, max_running)
    num_prompts = len(engine.scheduler.state.waiting)
    engine.submit(request("new", [999], max_tokens=1))
    step = 0
    while not any(event.request_id == "new" for event in engine.step()):
        step += 1
    assert predicted == pytest.approx(step * STEP_S + num_prompts / 16 * STEP_S)


def test_who_will_be_late_is_refused_with_the_time_to_come_back() -> None:
    engine = small_engine(max_running=1, num_blocks=(200,), refuse_late=True)
    engine.submit(request("long", [1], max_tokens=50))
    engine.submit(request("in time", [2], max_tokens=10, deadline_s=61 * STEP_S))
    late = request("late", [3], max_tokens=10, deadline_s=40 * STEP_S)
    with pytest.raises(Overloaded, match="after its deadline") as refused:
        engine.submit(late)
    assert refused.value.code == "deadline"
    assert refused.value.retry_after_s == pytest.approx(30, abs=1)
    while engine.has_work:
        engine.step()
    engine.clock.advance(STEP_S)
    engine.submit(late)
    drain(engine)


def test_a_promise_of_first_tokens_is_kept() -> None:
    engine = small_engine(max_running=1, num_blocks=(400,), max_queue=1000, ttft_ms=1e3 * 40 * STEP_S)
    accepted, num_refused, first = {}, 0, {}
    for step in range(400):
        if step % 4 == 0:
            try:
                engine.submit(request(f"r{step}", [step], max_tokens=8))
                accepted[f"r{step}"] = step
            except Overloaded as error:
                assert error.retry_after_s > 0
                num_refused += 1
        for event in engine.step():
            first.setdefault(event.request_id, step + 1)
        engine.clock.advance(STEP_S)
    assert num_refused > 30
    assert max(first[id] - accepted[id] for id in first) <= 41
    # And no more are refused than have to be: the queue is kept as long as the promise allows.
    assert max(first[id] - accepted[id] for id in first) >= 30


def test_who_is_late_anyway_is_dropped() -> None:
    """All but those that could be in time would only have made the others late."""
    engine = small_engine(max_running=1, num_blocks=(200,), drop_late=True, policy="edf")
    for i in range(10):
        engine.submit(request(f"r{i}", [i], max_tokens=10, deadline_s=35 * STEP_S, num_choices=1))
    reasons, step = {}, 0
    while engine.has_work:
        for event in engine.step():
            if event.finish_reason:
                reasons[event.request_id] = (event.finish_reason, step)
        engine.scheduler.check()
        engine.clock.advance(STEP_S)
        step += 1
    in_time = [id for id, (reason, at) in reasons.items() if reason is FinishReason.LENGTH and at <= 35]
    assert len(in_time) == 3
    assert sum(reason is FinishReason.LATE for reason, _ in reasons.values()) == 7
    assert all(at <= 27 for reason, at in reasons.values() if reason is FinishReason.LATE)
