"""A step that reads prompts beside streams takes about 2.5 times a step without, whatever the machine."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from headrace.core.cost_model import CostModel
from headrace.core.plan import StepPlan
from headrace.core.work import StepWork
from headrace.engine.budget import PacedBudget, largest
from headrace.engine.costs import LearntCosts
from headrace.engine.engine import Engine

from .build import request, small_engine

FIXED_S, ROW_S, PAIR_S = 0.004, 0.0006, 5e-7


class Machine(LearntCosts):
    """Takes its time for each row and pair, and that is what the engine learns from; it is taken to be twice as fast
    at first."""

    def __init__(self, noise: Callable[[], float] = lambda: 1.0, pair_s: float = 0.0) -> None:
        works = [StepWork.of_streams(1, 0), StepWork.of_streams(16, 0), StepWork.of_prompt(16), StepWork.of_prompt(160)]
        super().__init__(CostModel([(work, self.seconds_of(work, 0.0) / 2) for work in works]))
        self.noise = noise
        self.pair_s = pair_s
        self.steps: list[tuple[int, int, float]] = []
        """(streams, prompt tokens, seconds)."""

    @staticmethod
    def seconds_of(work: StepWork, pair_s: float) -> float:
        return FIXED_S + ROW_S * (work.num_streams + work.num_prompt) + pair_s * work.num_pairs

    def observe(self, plan: StepPlan, compute_s: float) -> None:
        work = StepWork.of(plan)
        took_s = self.seconds_of(work, self.pair_s) * self.noise()
        self.steps.append((work.num_streams, work.num_prompt, took_s))
        super().observe(plan, took_s)


def paced(target_s: float | None = None, **machine) -> tuple[Engine, Machine]:
    costs = Machine(**machine)
    engine = small_engine(num_blocks=(4000,), budget=160, max_running=32, context_length=9000, costs=costs)
    engine.scheduler.budget = PacedBudget(160, costs, target_s)
    return engine, costs


def stream_beside_prompts(
    engine: Engine, num_streams: int, *, num_streamed: int = 400, num_prompts: int = 2, num_tokens: int = 2000
) -> None:
    for i in range(num_streams):
        engine.submit(request(f"s{i}", range(40), max_tokens=num_streamed, seed=i))
    for _ in range(60):
        engine.step()
    for i in range(num_prompts):
        engine.submit(request(f"long{i}", [n * (7 + i) % 1000 for n in range(num_tokens)], max_tokens=1))
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
    target_s = max(2.5 * alone_s, 0.02)
    assert max(mixed) <= 1.3 * target_s
    assert sum(mixed) / len(mixed) >= 0.6 * target_s, "prompts could be read faster"


def test_a_target_is_met() -> None:
    engine, machine = paced(target_s=0.04)
    stream_beside_prompts(engine, 4)
    mixed = [took for streams, prompt, took in machine.steps if streams >= 4 and prompt > 1][2:]
    assert 0.03 <= max(mixed) <= 0.044


def test_a_target_is_met_at_every_context() -> None:
    """At 4,000 tokens of context a prompt token takes four times as long as at none, and chunks shrink with it."""
    rng = random.Random(2)
    engine, machine = paced(0.04, noise=lambda: rng.uniform(0.95, 1.05), pair_s=PAIR_S)
    stream_beside_prompts(engine, 1, num_streamed=2000, num_prompts=4, num_tokens=4000)
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


def test_the_largest_that_fits_is_found_from_any_guess() -> None:
    draw = random.Random(0)
    for _ in range(2000):
        low = draw.randint(0, 10)
        high, bound = low + draw.randint(0, 40), draw.randint(low - 3, low + 43)
        asked = []

        def fits(number: int, bound: int = bound, asked: list[int] = asked) -> bool:
            asked.append(number)
            return number <= bound

        found = max(low, min(bound, high))
        assert largest(fits, low, high, draw.randint(low - 5, high + 5)) == found
        assert all(low <= number <= high for number in asked)
        asked.clear()
        assert largest(fits, low, high, found) == found
        assert len(asked) <= 2
