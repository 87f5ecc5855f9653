"""The engine in this process, with a fake engine behind it."""

from __future__ import annotations

import pytest

from headrace.bench.in_process import InProcessTarget
from headrace.bench.machine import inspect_machine
from headrace.bench.presets import Point
from headrace.bench.session import BenchOptions, run_bench
from headrace.core.errors import ConfigurationError
from headrace.sim.workload import WorkloadSpec
from tests.server.fakes import FakeEngine, make_deployment


def measure(engine: FakeEngine, maker, *points: Point, rounds: int = 1):
    target = InProcessTarget("here", lambda: make_deployment(engine))
    return run_bench([target], maker, BenchOptions(points, rounds), inspect_machine(measure=False))


def test_every_token_has_the_engines_time(letters):
    """Steps of 5 ms, four replies of ten tokens at once."""
    engine = FakeEngine(step_s=0.005)
    spec = WorkloadSpec(num_requests=4, num_prompt=30, num_prefix=10, num_output=10, concurrency=4, num_tenants=2)
    summary = measure(engine, letters, Point("x", spec)).points[0].summaries["here"][0]
    assert summary.output_tokens == 40 and summary.prompt_tokens == 120
    assert not summary.notes and not summary.errors
    assert summary.inter_token_ms.count == 36
    assert 5 <= summary.inter_token_ms.p50 < 20
    assert summary.decode_tokens_per_s == pytest.approx(4e3 / summary.inter_token_ms.mean, rel=0.15)
    assert summary.client_cpu_share is None
    measured = engine.requests[2:]  # behind the warm-up
    assert {request.tenant for request in measured} == {request.cache_salt for request in measured} != {""}
    assert all(not request.sampling.stop_token_ids for request in engine.requests), "no reply ends early"


def test_refusals_are_errors_of_their_kind(letters):
    engine = FakeEngine(step_s=0.005, max_running=1, max_queue=2)
    spec = WorkloadSpec(num_requests=6, num_prompt=10, num_output=3, concurrency=6, num_warmup=0)
    summary = measure(engine, letters, Point("x", spec)).points[0].summaries["here"][0]
    assert set(summary.errors) == {"queue_full"}
    assert summary.num_errors + summary.requests_per_s * summary.duration_s == pytest.approx(6)


def test_a_dying_engine_is_an_error_and_not_a_hang(letters):
    spec = WorkloadSpec(num_requests=3, num_prompt=10, num_output=5, concurrency=2, num_warmup=0)
    summary = measure(FakeEngine(fail_at_step=3), letters, Point("x", spec)).points[0].summaries["here"][0]
    assert summary.num_errors == 3
    assert set(summary.errors) == {"EngineFailure"}


def test_each_round_and_load_has_prompts_of_its_own(letters):
    engine = FakeEngine()
    spec = WorkloadSpec(num_requests=3, num_prompt=60, num_output=1, num_warmup=0)
    document = measure(engine, letters, Point("x", spec), Point("y", spec), rounds=2).document()
    assert len({request.prompt for request in engine.requests}) == 12
    assert [len(point["targets"]["here"]["rounds"]) for point in document["points"]] == [2, 2]
    assert document["points"][0]["targets"]["here"]["ratio"]["output_tokens"] == 1


def test_what_does_not_fit_is_refused_before_anything_runs(letters):
    engine = FakeEngine()
    with pytest.raises(ConfigurationError, match="at most 256"):
        measure(engine, letters, Point("x", WorkloadSpec(num_prompt=250, num_output=10)))
    assert not engine.requests
