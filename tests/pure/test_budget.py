"""A step that reads prompts beside streams takes about 2.5 times a step without, whatever the machine."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from headrace.core.plan import StepPlan
from headrace.engine.budget import PacedBudget, TokenBudget
from headrace.engine.engine import Engine

from .build import request, small_engine

FIXED_S, ROW_S, PAIR_S = 0.004, 0.0006, 5e-7


class Machine:
    """Takes its time for each row, and tells the budget so."""

    def __init__(self, budget: TokenBudget, noise: Callable[[], float] = lambda: 1.0, pair_s: float = 0.0) -> None:
        self.budget = budget
        self.noise = noise
        self.pair_s = pair_s
        self.steps: list[tuple[int, int, float]] = []
        """(streams, prompt tokens, seconds)."""

    def observe(self, plan: StepPlan, compute_s: float) -> None:
        streams = sum(span.count == 1 for span in plan.spans)
        pairs = sum(span.count * (span.start + span.count / 2) for span in plan.spans if span.count > 1)
        took_s = (FIXED_S + ROW_S * plan.num_tokens + self.pair_s * pairs) * self.noise()
        self.steps.append((streams, plan.num_tokens - streams, took_s))
        self.budget.observe(plan, took_s)

    def __getattr__(self, name: str):
        return getattr(self.budget, name)


def paced(target_s: float | None = None, noise: Callable[[], float] = lambda: 1.0) -> tuple[Engine, Machine]:
    engine = small_engine(num_blocks=(2000,), budget=160, max_running=32, context_length=5000)
    engine.scheduler.budget = machine = Machine(PacedBudget(160, target_s), noise)
    return engine, machine


def stream_beside_prompts(engine: Engine, num_streams: int) -> None:
    for i in range(num_streams):
        engine.submit(request(f"s{i}", range(40), max_tokens=400, seed=i))
    for _ in range(60):
        engine.step()
    for i in range(2):
        engine.submit(request(f"long{i}", [n * (7 + i) % 1000 for n in range(2000)], max_tokens=1))
    while engine.has_work:
        engine.step()
        engine.scheduler.check()


@pytest.mark.parametrize("num_streams", [1, 4, 16])
def test_streams_keep_their_pace(num_streams: int) -> None:
    engine, machine = paced()
    stream_beside_prompts(engine, num_streams)
    mixed = [took for streams, prompt, took in machine.steps if streams >= num_streams and prompt > 1][2:]
    alone_s = FIXED_S + ROW_S * num_streams
    assert len(mixed) > 10
    assert max(mixed) <= 3.3 * alone_s
    assert sum(mixed) / len(mixed) >= 1.5 * alone_s, "prompts could be read faster"


def test_a_target_is_met() -> None:
    engine, machine = paced(target_s=0.04)
    stream_beside_prompts(engine, 4)
    mixed = [took for streams, prompt, took in machine.steps if streams >= 4 and prompt > 1][2:]
    assert 0.03 <= max(mixed) <= 0.044


def test_a_target_is_met_at_every_context() -> None:
    """At 4,000 tokens of context a prompt token takes four times as long as at none, and chunks shrink with it."""
    rng = random.Random(2)
    engine = small_engine(num_blocks=(4000,), budget=160, max_running=8, context_length=9000)
    machine = Machine(PacedBudget(160, 0.04), lambda: rng.uniform(0.95, 1.05), PAIR_S)
    engine.scheduler.budget = machine
    engine.submit(request("stream", range(40), max_tokens=2000, seed=0))
    for _ in range(60):
        engine.step()
    for i in range(4):
        engine.submit(request(f"long{i}", [n * (7 + i) % 997 for n in range(4000)], max_tokens=1))
    while engine.has_work:
        engine.step()
    mixed = [took for streams, prompt, took in machine.steps if streams == 1 and prompt > 1][20:]
    took = sorted(mixed)
    assert len(took) > 200
    assert took[int(0.99 * len(took))] <= 1.25 * 0.04
    assert took[-1] <= 2 * 0.04
    assert sum(took) / len(took) >= 0.8 * 0.04, "prompts could be read faster"


def test_prompts_alone_take_whole_steps() -> None:
    engine, machine = paced()
    stream_beside_prompts(engine, 1)  # learnt
    engine.submit(request("more", [n * 11 % 997 for n in range(1000)], max_tokens=1))
    before = len(machine.steps)
    while engine.has_work:
        engine.step()
    assert machine.steps[before][1] == 160


def test_a_noisy_machine_is_not_believed_at_once() -> None:
    rng = random.Random(1)
    engine, machine = paced(noise=lambda: 8.0 if rng.random() < 0.05 else 1.0)
    stream_beside_prompts(engine, 4)
    alone_s = FIXED_S + ROW_S * 4
    planned = [
        FIXED_S + ROW_S * (streams + prompt) for streams, prompt, _ in machine.steps if streams >= 4 and prompt > 1
    ]
    assert max(planned[2:]) <= 5 * alone_s
    assert all(prompt >= 8 for streams, prompt, _ in machine.steps[70:90] if prompt > 1)
