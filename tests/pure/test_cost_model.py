"""The cost model finds coefficients that made the times, keeps them from going below zero, and forgets."""

from __future__ import annotations

import json
import random

import pytest

from headrace.core.cost_model import FEATURES, KNOTS, CostModel, features, load_cost_model, region, save_cost_model
from headrace.core.errors import ConfigurationError
from headrace.core.work import StepWork

TRUE = (0.004, 0.0002, 0.0006, 0.0005, 0.00005, 0.0004, 0.003, 0.0006)


def a_step(draw: random.Random) -> StepWork:
    streams = draw.choice([0, 1, 2, 3, 5, 8, 16, 33, 64])
    prompt = draw.choice([0, 0, 0, 4, 16, 40, 96]) if streams else draw.choice([2, 8, 16, 100, 160])
    prompts = 0 if not prompt else draw.randint(1, 2)
    return StepWork(streams, prompt, prompts, streams, streams * draw.randrange(2000), prompt * draw.randrange(2000))


def true_seconds(work: StepWork, coefficients=TRUE) -> float:
    return sum(c * x for c, x in zip(coefficients, features(work), strict=True))


def test_it_finds_what_made_the_times():
    draw, model = random.Random(1), CostModel()
    for _ in range(2000):
        work = a_step(draw)
        model.observe(work, true_seconds(work) * draw.lognormvariate(0, 0.05))
    model.fit()
    for _ in range(200):
        work = a_step(draw)
        assert model.seconds(work) == pytest.approx(true_seconds(work), rel=0.04)
    for kind, (error, count) in model.errors().items():
        assert count > 50, kind
        assert 0.02 < error < 0.08, f"{kind}: noise of 5 % has a mean absolute error of 4 %"


def test_the_short_way_of_predicting_is_the_features_times_the_coefficients():
    draw, model = random.Random(2), CostModel()
    model.coefficients = list(TRUE)
    for _ in range(500):
        work = a_step(draw)
        assert model.seconds(work) == pytest.approx(true_seconds(work), rel=1e-12)


def test_no_coefficient_is_below_zero():
    """Steps that get shorter with their context (noise) are no reason to predict that time goes back."""
    draw, model = random.Random(3), CostModel()
    odd = (0.004, 0.0002, -0.0001, 0.0005, 0.0, 0.0, -0.0005, 0.0)
    for _ in range(1000):
        work = a_step(draw)
        model.observe(work, max(0.001, true_seconds(work, odd)))
    model.fit()
    assert min(model.coefficients) == 0.0
    assert len(model.coefficients) == len(FEATURES)


def test_it_follows_a_machine_that_has_become_slower():
    draw, model = random.Random(4), CostModel()
    for factor in (1.0, 2.0):
        for _ in range(12_000):
            work = a_step(draw)
            model.observe(work, factor * true_seconds(work))
    work = StepWork(8, 0, 0, 8, 1000, 0)
    assert model.seconds(work) == pytest.approx(2 * true_seconds(work), rel=0.02)


def test_a_seed_gives_way_to_what_is_seen():
    draw = random.Random(5)
    steps = [a_step(draw) for _ in range(300)]
    model = CostModel([(work, 3 * true_seconds(work)) for work in steps])
    assert model.seconds(steps[0]) == pytest.approx(3 * true_seconds(steps[0]), rel=0.02)
    for work in steps:
        model.observe(work, true_seconds(work))
    model.fit()
    assert model.seconds(steps[0]) == pytest.approx(true_seconds(steps[0]), rel=0.05)


def test_it_is_saved_and_goes_on_learning(tmp_path):
    draw, model = random.Random(6), CostModel()
    for _ in range(500):
        work = a_step(draw)
        model.observe(work, true_seconds(work))
    path = tmp_path / "cost" / "model.json"
    save_cost_model(path, model, {"model": "m"})
    loaded, about = load_cost_model(path)
    assert about == {"model": "m"}
    assert loaded.coefficients == model.coefficients and loaded.errors() == model.errors()
    for _ in range(500):
        work = a_step(draw)
        for each in (model, loaded):
            each.observe(work, 1.5 * true_seconds(work))
    model.fit()
    loaded.fit()
    for _ in range(50):
        work = a_step(draw)
        assert loaded.seconds(work) == pytest.approx(model.seconds(work), rel=1e-3)


@pytest.mark.parametrize(
    "damage", [{"format": 9}, {"features": ["a"]}, {"coefficients": [1.0]}, {"targets": "x"}, {"products": None}]
)
def test_a_damaged_file_is_refused(tmp_path, damage):
    path = tmp_path / "model.json"
    path.write_text(json.dumps(CostModel().document({}) | damage))
    with pytest.raises(ConfigurationError):
        load_cost_model(path)


def test_regions():
    low, high = KNOTS
    works = [StepWork(n, p, 0, 0, 0, 0) for n, p in ((low, 0), (low + 1, 0), (high + 1, 0), (1, 9), (0, 9))]
    assert len({region(work) for work in works}) == 5
