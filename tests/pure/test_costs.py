"""Step costs learnt on the way: right in shape after few steps, and as slow as the machine is of late."""

from __future__ import annotations

import random

import pytest

from headrace.core.cost_model import CostModel
from headrace.core.plan import Span, StepPlan
from headrace.core.work import StepWork
from headrace.engine.costs import LearntCosts

from .test_speculation import sequence_of


def plan_of(*spans: tuple[int, int, int]) -> StepPlan:
    """Of spans (start, tokens, drafts among them)."""
    plan = StepPlan(0, 0)
    for start, count, num_drafts in spans:
        span = Span(sequence_of([]), start, count, plan.num_tokens, ())
        span.num_drafts = num_drafts
        plan.spans.append(span)
        plan.token_ids.extend([0] * count)
    return plan


def true_s(work: StepWork) -> float:
    return 0.004 + 0.0005 * (work.num_streams + work.num_prompt) + 4e-7 * work.num_pairs + 2e-6 * work.num_keys


def teach(costs: LearntCosts, plans, rng: random.Random, slow: float = 1.0, num_steps: int = 200) -> None:
    for _ in range(num_steps):
        plan = rng.choice(plans)
        costs.observe(plan, slow * true_s(StepWork.of(plan)) * rng.uniform(0.95, 1.05))


STREAMS = [plan_of(*((start, 1, 0),) * count) for count in (1, 2, 3, 6, 9) for start in (20, 400)]
CHUNKS = [plan_of((100, 1, 0), (start, size, 0)) for size in (16, 60, 150) for start in (0, 300, 2000)]


def test_drafts_are_streams_that_read_the_same_keys():
    work = StepWork.of(plan_of((9, 4, 3), (5, 1, 0), (2, 3, 0)))
    assert work == StepWork(5, 3, 1, 0, 10 + 6, 3 * 10 + 2 * 3 + 6)


@pytest.mark.parametrize("share", [0.02, 0.5])
def test_what_a_row_more_costs_is_learnt(share):
    costs, rng = LearntCosts(CostModel()), random.Random(2)
    for _ in range(300):
        rows = rng.randint(1, 12)
        costs.observe(plan_of((50, rows, rows - 1)), 0.007 * (1 + share * rows) * rng.uniform(0.95, 1.05))

    def seconds(rows: int) -> float:
        return costs.seconds(StepWork.of(plan_of((50, rows, rows - 1))))

    assert seconds(9) / seconds(1) == pytest.approx((1 + 9 * share) / (1 + share), rel=0.1)


def test_a_machine_that_gets_slower_is_noticed_within_some_steps():
    costs, rng = LearntCosts(CostModel()), random.Random(1)
    teach(costs, STREAMS + CHUNKS, rng)
    plan = CHUNKS[4]
    work = StepWork.of(plan)
    assert costs.seconds(work) == pytest.approx(true_s(work), rel=0.05)
    assert costs.errors[1] < 0.06
    teach(costs, CHUNKS, rng, slow=2.0, num_steps=30)
    assert costs.seconds(work) == pytest.approx(2 * true_s(work), rel=0.1)
    teach(costs, CHUNKS, rng, slow=1.0, num_steps=40)
    assert costs.seconds(work) == pytest.approx(true_s(work), rel=0.1)


def test_a_wrong_start_is_left_behind():
    """Seeds three times too fast: ten steps of streams teach what streams take; ten chunks teach the rest."""
    seeds = [(StepWork.of(plan), true_s(StepWork.of(plan)) / 3) for plan in STREAMS + CHUNKS]
    costs, rng = LearntCosts(CostModel(seeds)), random.Random(4)
    alone, chunk = StepWork.of(STREAMS[0]), StepWork.of(CHUNKS[4])
    teach(costs, STREAMS[:1], rng, num_steps=10)
    assert costs.seconds(alone) == pytest.approx(true_s(alone), rel=0.1)
    teach(costs, CHUNKS, rng, num_steps=10)
    assert costs.seconds(chunk) == pytest.approx(true_s(chunk), rel=0.15)


def test_one_step_beside_other_work_counts_only_so_much():
    costs, rng = LearntCosts(CostModel()), random.Random(3)
    teach(costs, STREAMS, rng)
    work = StepWork.of(STREAMS[0])
    before_s = costs.seconds(work)
    costs.observe(STREAMS[0], 1e4)
    assert costs.seconds(work) <= 1.2 * before_s


def test_a_refit_moves_no_prediction_of_late():
    """What the model learns the pace gives back."""
    costs, rng = LearntCosts(CostModel()), random.Random(5)
    teach(costs, STREAMS, rng, num_steps=500)
    for _ in range(200):
        plan = rng.choice(STREAMS)
        work = StepWork.of(plan)
        before_s = costs.seconds(work)
        costs.observe(plan, 1.5 * true_s(work))
        assert costs.seconds(work) <= 1.1 * before_s
