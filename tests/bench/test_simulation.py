"""`headrace simulate` and `headrace calibrate`: the commands, on a small model."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from headrace.bench import calibration
from headrace.cli import app
from headrace.core.cost_model import CostModel, save_cost_model
from headrace.server.build import ServeConfig, build

ABOUT = {
    "model": "small",
    "processor": "none",
    "threads": 1,
    "isa": "scalar",
    "kv_format": "f16",
    "context_length": 2048,
    "vocab_size": 1000,
    "cache_groups": [
        {
            "name": "full",
            "kind": "full",
            "block_size": 16,
            "bytes_per_block": 1024,
            "window": 0,
            "checkpoint_interval": 0,
        }
    ],
    "num_blocks": [400],
}
LOAD = ["--workload", "chat", "--rate", "2", "--length-scale", "0.1", "--requests", "40", "--json", "-"]


@pytest.fixture
def cost_file(tmp_path):
    model = CostModel()
    model.coefficients = [0.01, 0.001, 0.001, 0.001, 0.0, 0.0, 0.0, 0.0]
    path = tmp_path / "cost.json"
    save_cost_model(path, model, ABOUT)
    return path


def simulate(*arguments: str):
    return CliRunner().invoke(app, ["simulate", *arguments])


def document(*arguments: str) -> dict:
    done = simulate(*arguments)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_the_report_is_that_of_bench_and_the_same_each_time(cost_file):
    first, again = (document("--cost-model", str(cost_file), *LOAD) for _ in range(2))
    (point,) = first["points"]
    figures = point["targets"]["simulated"]["rounds"][0]
    assert figures["num_requests"] == 40 and figures["num_errors"] == 0
    assert figures["tpot_ms"]["p50"] >= 11.0, "a step of one row"
    assert figures["cached_tokens"] > 0, "later turns"
    assert first["points"] == again["points"]
    assert document("--cost-model", str(cost_file), *LOAD, "--seed", "1")["points"] != first["points"]


def test_a_smaller_pool_and_fewer_places_make_requests_wait(cost_file):
    wide = document("--cost-model", str(cost_file), *LOAD, "--rate", "20")
    narrow = document("--cost-model", str(cost_file), *LOAD, "--rate", "20", "--max-running", "2")
    ttft = [d["points"][0]["targets"]["simulated"]["median"]["ttft_ms.p95"] for d in (wide, narrow)]
    assert ttft[1] > 2 * ttft[0]


def test_errors_that_can_be_acted_on(cost_file, tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    done = simulate(*LOAD)
    assert done.exit_code == 1 and "headrace calibrate" in done.stderr
    done = simulate("--cost-model", str(cost_file), *LOAD, "--policy", "lottery")
    assert done.exit_code == 1 and "fcfs" in done.stderr
    done = simulate("--cost-model", str(cost_file), "--workload", "chat")
    assert done.exit_code == 1 and "--rate" in done.stderr


def test_calibration_measures_what_it_designed(smollm2_path, monkeypatch):
    small = {"STREAMS": (1, 3), "CONTEXTS": (16,), "PROMPTS": (4, 16), "LONG_PROMPT": 60, "NUM_DECODED": 3}
    for name, value in (small | {"MIXED_STREAMS": (2,), "MIXED_PROMPT": 40, "MIXED_CHUNKS": (16,)}).items():
        monkeypatch.setattr(calibration, name, value)
    config = ServeConfig(
        model=str(smollm2_path),
        threads=1,
        kv_memory_bytes=64 << 20,
        max_running=4,
        max_step_tokens=48,
        context_length=512,
    )
    deployment = build(config)
    engine = deployment.engine
    budget = engine.scheduler.budget
    measured = calibration.measure(engine, deployment.vocab_size, rounds=1, seed=0)
    assert engine.scheduler.budget is budget and not engine.has_work
    limits = engine.scheduler.limits
    designed = calibration.loads(limits.max_running, budget.max_tokens, limits.context_length)
    assert {step.load for step in measured} == set(designed)
    for step in measured:
        assert step.seconds > 0
        assert step.work.num_streams == step.load.num_streams
        assert step.work.num_prompt <= (step.load.chunk or 0)
        assert bool(step.work.num_prompt) == bool(step.load.prompt)
    fitted = calibration.fit(measured)
    assert min(fitted.coefficients) >= 0 and max(fitted.coefficients) > 0
    about = json.loads(json.dumps(calibration.about(config, deployment)))
    assert calibration.cache_groups_of(about) == tuple(m.group for m in engine.scheduler.state.memory.groups)
