"""Length predictors say what they say they do, and their calibration is what brute force finds."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.protocols import LengthPrediction
from headrace.engine.predict.bound import BoundPredictor
from headrace.engine.predict.calibration import Calibration, kendall_tau
from headrace.engine.predict.history import LEAST, HistoryPredictor
from headrace.engine.predict.noise import NoisyPredictor
from headrace.engine.predict.oracle import OraclePredictor

from .build import drain, request, small_engine


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=2, max_size=30))
def test_kendalls_tau_is_that_of_all_pairs(pairs: list[tuple[int, int]]) -> None:
    def sign(a: float, b: float) -> int:
        return (a > b) - (a < b)

    indices = [(i, j) for i in range(len(pairs)) for j in range(i)]
    first = [sign(pairs[i][0], pairs[j][0]) for i, j in indices]
    second = [sign(pairs[i][1], pairs[j][1]) for i, j in indices]
    norm = math.sqrt(sum(map(abs, first)) * sum(map(abs, second)))
    expected = sum(a * b for a, b in zip(first, second, strict=True)) / norm if norm else 0.0
    assert kendall_tau([(float(a), b) for a, b in pairs]) == pytest.approx(expected)


@given(st.lists(st.integers(1, 500), min_size=LEAST, max_size=60))
def test_history_gives_quantiles_of_the_latest_replies(lengths: list[int]) -> None:
    predictor = HistoryPredictor(num_kept=20)
    asked = request("a", range(10))
    assert predictor.predict(asked, 900) == LengthPrediction(900, 900)
    for length in lengths:
        predictor.observe(asked, length)
    latest = sorted(lengths[-20:])
    expected, high = predictor.predict(asked, 900)
    assert expected == latest[len(latest) // 2]
    assert high == latest[int(0.9 * len(latest))]


def test_history_knows_tenants_and_prompt_lengths_apart() -> None:
    predictor = HistoryPredictor()
    for _ in range(LEAST):
        predictor.observe(request("a", range(10), tenant="a"), 5)
        predictor.observe(request("b", range(10), tenant="b"), 80)
        predictor.observe(request("c", range(100), tenant="b"), 300)
    assert predictor.predict(request("d", range(9), tenant="a"), 999).expected == 5
    assert predictor.predict(request("d", range(9), tenant="b"), 999).expected == 80
    assert predictor.predict(request("d", range(70), tenant="new"), 999).expected == 300
    assert predictor.predict(request("d", range(1), tenant="new"), 999).expected == 80  # the median of all


def test_history_keeps_what_it_saw_last() -> None:
    predictor = HistoryPredictor(max_keys=4)
    for tenant in range(1000):
        predictor.observe(request("a", range(10), tenant=str(tenant)), tenant)
    assert len(predictor._histories) == 4


def test_noise_is_log_normal_and_a_function_of_the_id() -> None:
    noisy = NoisyPredictor(OraclePredictor({}), sigma=0.5)
    logs = [math.log(noisy.predict(request(f"r{i}", [1]), 100).expected / 100) for i in range(4000)]
    assert sum(logs) / len(logs) == pytest.approx(0, abs=0.03)
    assert math.sqrt(sum(log * log for log in logs) / len(logs)) == pytest.approx(0.5, rel=0.05)
    again = NoisyPredictor(OraclePredictor({}), sigma=0.5)
    assert [again.predict(request(f"r{i}", [1]), 100) for i in range(9)] == [
        noisy.predict(request(f"r{i}", [1]), 100) for i in range(9)
    ]


def test_calibration_names_the_error_and_the_order() -> None:
    calibration, rng = Calibration(num_kept=100), random.Random(1)
    for _ in range(500):
        actual = rng.randint(1, 100)
        calibration.observe(2.0 * actual, actual)
    report = calibration.report
    assert (report.log_error, report.tau) == (pytest.approx(math.log(2)), pytest.approx(1.0))
    for _ in range(128):
        actual = rng.randint(1, 100)
        calibration.observe(1000.0 / actual, actual)
    assert calibration.report.tau == pytest.approx(-1.0)


def test_the_engine_reports_how_good_its_predictor_is() -> None:
    lengths = {f"r{i}": 3 + i for i in range(20)}
    for sigma, least, most in ((0.0, 1.0, 1.0), (1.0, 0.2, 0.95)):
        engine = small_engine(predictor="oracle", predictor_sigma=sigma, lengths=lengths)
        for id, length in lengths.items():
            engine.submit(request(id, [length], max_tokens=length))
        drain(engine)
        calibration = engine.stats().calibration
        assert calibration.num_observed == 20
        assert least <= calibration.tau <= most
        assert (calibration.log_error == 0) == (sigma == 0)


def test_a_bound_is_never_exceeded() -> None:
    assert BoundPredictor().predict(request("a", [1]), 7) == LengthPrediction(7, 7)
    engine = small_engine(predictor="oracle", lengths={"a": 500})
    engine.submit(request("a", [1], max_tokens=9))
    (sequence,) = engine.scheduler.state.waiting
    assert engine.scheduler.state.ledger.expected(sequence) == 9
