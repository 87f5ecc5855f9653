"""A configuration is parsed once, and says what is wrong with it."""

from __future__ import annotations

from itertools import permutations

import pytest

from headrace.core.errors import ConfigurationError
from headrace.engine.composition import (
    BATCHING,
    DEFAULT_POLICY,
    ORDERS,
    PREDICTORS,
    WRAPPERS,
    SchedulingConfig,
    make_policy,
    parse_policy,
)
from headrace.engine.policies.fair import Fair
from headrace.engine.policies.priority import ByPriority
from headrace.engine.policies.shortest import ShortestRemainingFirst

from .build import drain, request, small_engine


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("fcfs", ("fcfs",)),
        (DEFAULT_POLICY, ("fair", "priority", "fcfs")),
        (" fair( priority(srpt) ) ", ("fair", "priority", "srpt")),
        ("fair", ("fair", "fcfs")),
        ("ageing(lpf)", ("ageing", "lpf", "fcfs")),
        ("dlpm", ("dlpm", "lpf", "fcfs")),
        ("dlpm(sjf)", ("dlpm", "sjf")),
    ],
)
def test_a_policy_is_wrappers_around_an_order(text: str, names: tuple[str, ...]) -> None:
    assert parse_policy(text) == names


COMPOSITIONS = [
    f"{'('.join([*wrappers, order])}{')' * len(wrappers)}"
    for number in range(4)
    for wrappers in permutations(WRAPPERS, number)
    if not {"fair", "dlpm"} <= set(wrappers)
    for order in ORDERS
]


@pytest.mark.parametrize("policy", COMPOSITIONS)
def test_everybody_who_waits_is_a_candidate(policy: str) -> None:
    """Whatever is around whatever, some urgent and young, some patient and aged: none may admit only a part."""
    engine = small_engine(max_running=1, policy=policy, max_wait_s=2.0)
    engine.submit(request("runs", [0], max_tokens=50))
    engine.step()
    for number in range(12):
        prompt = range(number % 3, 6 + number)
        engine.submit(request(f"{number}", prompt, tenant=f"{number % 2}", priority=-(number % 3)))
        engine.step()
        engine.clock.advance(0.4)
    waiting = engine.scheduler.state.waiting
    found = [sequence.id for sequence in engine.scheduler.policy.candidates(waiting, 64)]
    assert len(waiting) >= 10
    assert sorted(found) == sorted(sequence.id for sequence in waiting)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("fastest", "policy has 'fastest'; it must be one of fcfs, sjf, srpt"),
        ("fair(fastest)", "policy has 'fastest'"),
        ("srpt(fair)", "policy has 'srpt' around another; it must be one of ageing"),
        ("fair(dlpm)", "of 'fair' and 'dlpm' one"),
        ("fair(fair(fcfs))", "goes around once"),
        ("fair(fcfs", "must look like"),
        ("fair fcfs", "must look like"),
        ("", "must look like"),
        ("fair(fcfs)(srpt)", "must look like"),
    ],
)
def test_a_wrong_policy_is_named(text: str, complaint: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        SchedulingConfig(policy=text)
    assert complaint in str(error.value)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("batching", "rapid", "'continuous', 'static'"),
        ("predictor", "guess", "'bound', 'history', 'oracle'"),
        ("budget", "endless", "'paced', 'fixed'"),
        ("max_wait_s", -1.0, "0 or more"),
        ("predictor_sigma", float("nan"), "0 or more"),
        ("batch_size", 0, "more than 0"),
        ("ttft_ms", -5.0, "more than 0"),
        ("tenant_running_tokens", 0, "more than 0"),
        ("weights", {"a": 0.0}, "more than 0"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(field: str, value, allowed: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        SchedulingConfig(**{field: value})
    assert allowed in str(error.value)
    assert (repr(value) if isinstance(value, str) else str(value if field != "weights" else 0.0)) in str(error.value)


def test_wrappers_go_around_in_the_order_they_are_written() -> None:
    engine = small_engine()
    policy = make_policy(SchedulingConfig(policy="fair(priority(srpt))"), engine.scheduler.state)
    assert isinstance(policy, Fair)
    assert isinstance(policy.inner, ByPriority)
    assert isinstance(policy.inner.inner, ShortestRemainingFirst)


@pytest.mark.parametrize("policy", [*ORDERS, *WRAPPERS])
@pytest.mark.parametrize("batching", BATCHING)
def test_everything_goes_with_everything(policy: str, batching: str) -> None:
    for predictor in PREDICTORS:
        engine = small_engine(policy=policy, batching=batching, predictor=predictor, batch_window_ms=0)
        for i in range(4):
            engine.submit(request(f"r{i}", [i] * (3 + i), tenant=str(i % 2), is_batch=i == 3))
        assert {event.request_id for event in drain(engine)} == {"r0", "r1", "r2", "r3"}
