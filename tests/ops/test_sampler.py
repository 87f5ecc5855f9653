"""The sampler against brute force: distributions, ties, penalties, reproducible randomness."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.errors import InvalidRequest
from headrace.core.randomness import coin, uniform
from headrace.core.sampling import SamplingParams
from headrace.executor.sampler import SampleRow, adjust, distribution, sample, token_logprob, xtc_threshold


def row(params: SamplingParams, *, choice=0, position=10, num_prompt=4, history=None) -> SampleRow:
    return SampleRow(params, choice, position, num_prompt, history)


def typical(ranked: list[int], weights: dict[int, float], mass: float) -> list[int]:
    """Meister et al. 2022, equation 6; the result falls in probability, as `ranked` does."""
    total = sum(weights[i] for i in ranked)
    p = {i: weights[i] / total for i in ranked}
    entropy = sum(-p[i] * math.log(p[i]) for i in ranked)
    chosen: list[int] = []
    for i in sorted(ranked, key=lambda i: (round(abs(-math.log(p[i]) - entropy), 9), i)):
        if sum(weights[j] for j in chosen) >= mass * total:
            break
        chosen.append(i)
    return [i for i in ranked if i in chosen]


def brute_force(logits: list[float], params: SamplingParams, xtc: float = 0.0) -> dict[int, float]:
    """Probabilities by the definitions, with sorted lists and plain loops."""
    weights = {i: math.exp((x - max(logits)) / params.temperature) for i, x in enumerate(logits)}
    ranked = sorted(weights, key=lambda i: (-weights[i], i))
    if params.top_k:
        ranked = ranked[: params.top_k]
    if params.typical_p < 1:
        ranked = typical(ranked, weights, params.typical_p)
    total = sum(weights[i] for i in ranked)
    kept, mass = [], 0.0
    for i in ranked:
        if params.top_p < 1 and mass >= params.top_p * total:
            break
        kept.append(i)
        mass += weights[i]
    kept = [i for i in kept if weights[i] >= params.min_p * weights[kept[0]]]
    total = sum(weights[i] for i in kept)
    top = [i for i in kept if 0 < xtc <= weights[i] / total]
    kept = [i for i in kept if i not in top[:-1]]
    total = sum(weights[i] for i in kept)
    return {i: weights[i] / total for i in kept}


@settings(max_examples=300, deadline=None)
@given(
    # Few distinct values: ties at every threshold.
    logits=st.lists(st.integers(-6, 6), min_size=2, max_size=40),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.integers(0, 45),
    top_p=st.sampled_from([0.05, 0.31, 0.77, 0.93, 1.0]),
    min_p=st.sampled_from([0.0, 0.03, 0.21, 1.0]),
    typical_p=st.sampled_from([1.0, 1.0, 0.07, 0.42, 0.91]),
    xtc=st.sampled_from([0.0, 0.0, 0.011, 0.083, 0.29]),
)
def test_the_kept_distribution_is_that_of_the_definitions(logits, temperature, top_k, top_p, min_p, typical_p, xtc):
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, typical_p=typical_p)
    kept, weights = distribution(np.array(logits, np.float64), params, xtc)
    found = dict(zip(kept.tolist(), (weights / weights.sum()).tolist(), strict=True))
    expected = brute_force([float(x) for x in logits], params, xtc)
    assert found.keys() == expected.keys()
    assert all(found[i] == pytest.approx(expected[i], rel=1e-9) for i in expected)
    assert list(found) == sorted(found)


def test_sampled_frequencies_follow_the_distribution():
    rng = np.random.default_rng(1)
    logits = rng.normal(size=30).astype(np.float32)
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=3)
    expected = brute_force(logits.tolist(), params)
    num_draws = 20_000
    counts = np.bincount([sample(logits, row(params, position=p)) for p in range(num_draws)], minlength=30)
    assert set(np.flatnonzero(counts)) == set(expected)
    chi_squared = sum((counts[i] - num_draws * p) ** 2 / (num_draws * p) for i, p in expected.items())
    assert chi_squared < len(expected) - 1 + 5 * math.sqrt(2 * len(expected))


def test_randomness_depends_on_seed_choice_and_position_only():
    values = {(s, c, p): uniform(s, c, p) for s in range(20) for c in range(20) for p in range(50)}
    assert len(set(values.values())) == len(values)
    assert all(0 <= value < 1 for value in values.values())
    array = np.array(list(values.values()))
    assert abs(array.mean() - 0.5) < 0.01
    assert np.histogram(array, bins=20, range=(0, 1))[0].std() < 60
    # Fixed for ever: a seed given by a client must give the same reply after an upgrade.
    assert uniform(0, 0, 0).hex() == "0x1.1c13ade1c7e5cp-3"
    assert uniform(-1, 3, 17) == uniform(2**64 - 1, 3, 17)


def test_the_coin_is_fair_and_independent_of_the_draw():
    tosses = np.array([(uniform(s, c, p), coin(s, c, p)) for s in range(20) for c in range(5) for p in range(100)])
    assert np.abs(tosses.mean(axis=0) - 0.5).max() < 0.01
    assert abs(np.corrcoef(tosses.T)[0, 1]) < 0.03
    shifted = {uniform(s, c, p) for s in range(20) for c in range(5) for p in range(105)}
    assert shifted.isdisjoint(tosses[:, 1]), "no token's draw is another one's coin"
    assert coin(0, 0, 0).hex() == "0x1.0983a45556400p-3"  # fixed for ever


def test_top_choices_are_excluded_as_often_as_asked():
    params = SamplingParams(xtc_probability=0.3, xtc_threshold=0.1, seed=9)
    thresholds = [xtc_threshold(params, 0, p) for p in range(4000)]
    assert set(thresholds) == {0.0, 0.1}
    assert thresholds.count(0.1) == pytest.approx(1200, abs=90)
    logits = np.array([3.0, 2.9, 2.8, -4.0], np.float32)
    drawn = {p: sample(logits, row(params, position=p)) for p in range(4000)}
    assert {token for p, token in drawn.items() if thresholds[p]} <= {2, 3}
    assert {token for p, token in drawn.items() if not thresholds[p]} >= {0, 1, 2}


def test_dry_lowers_what_would_go_on_with_a_repeat():
    logits = np.array([5.0, 5.0, 5.0, 5.5], np.float32)
    params = SamplingParams(temperature=0, dry_multiplier=1.0, dry_base=2.0, logit_bias=((1, 0.25),))
    assert not params.is_plain
    adjusted = adjust(logits, row(params, num_prompt=2, position=6, history=[0, 1, 2, 3, 0, 1, 2]))
    assert adjusted.tolist() == [5.0, 5.25, 5.0, 3.5]  # a repeat of three: 2 ** (3 - 2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("typical_p", 0.0),
        ("typical_p", 1.1),
        ("xtc_probability", -0.1),
        ("xtc_threshold", 0.0),
        ("dry_multiplier", -1.0),
        ("dry_base", 0.5),
        ("dry_base", math.nan),
        ("dry_allowed_length", 0),
        ("dry_range", -1),
    ],
)
def test_values_out_of_range_are_named(name: str, value: float):
    with pytest.raises(InvalidRequest, match=f"{name} is {value}") as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


def test_greedy_takes_the_first_of_equals():
    assert sample(np.array([1, 5, 5, 2], np.float32), row(SamplingParams(temperature=0))) == 1


def test_penalties_by_their_formulas():
    logits = np.array([2.0, -2.0, 1.0, 0.5], np.float32)
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0)
    # Prompt: tokens 0 and 1; reply: 2, 2.
    adjusted = adjust(logits, row(params, num_prompt=2, position=4, history=[0, 1, 2, 2]))
    assert adjusted.tolist() == [1.0, -4.0, 0.5 - 0.5 - 0.25 * 2, 0.5]


def test_bias_and_the_mask_of_early_stops():
    params = SamplingParams(
        temperature=0, logit_bias=((1, -5.0), (3, 2.0)), min_tokens=2, stop_token_ids=frozenset({0})
    )
    logits = np.array([9.0, 4.0, 0.0, 0.5], np.float32)
    assert sample(logits, row(params, num_prompt=4, position=5)) == 3  # one token generated: no stop yet
    assert sample(logits, row(params, num_prompt=4, position=6)) == 0


def test_the_mask_of_early_stops_leaves_a_token():
    """With every token a stop token all were masked: NaN probabilities, and the first id whatever the logits."""
    logits = np.array([0.5, 9.0, 4.0], np.float32)
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, min_tokens=5, stop_token_ids=frozenset(range(3)), seed=2)
        free = SamplingParams(temperature=temperature, seed=2)
        for position in range(4, 9):
            assert sample(logits, row(params, position=position)) == sample(logits, row(free, position=position))


def test_the_least_temperatures_are_greedy():
    """Ties included, so that a division which overflows to infinity decides nothing."""
    for temperature in (0.0, 1e-300, 9e-6):
        params = SamplingParams(temperature=temperature, seed=3)
        assert params.is_greedy
        assert {sample(np.array([1, 5, 5], np.float32), row(params, position=p)) for p in range(20)} == {1}
    assert not SamplingParams(temperature=1e-5).is_greedy


def test_stop_tokens_may_come_as_any_iterable():
    assert SamplingParams(stop_token_ids=[3, 3, 4]).stop_token_ids == frozenset({3, 4})


@settings(max_examples=100, deadline=None)
@given(logits=st.lists(st.integers(-8, 8), min_size=1, max_size=30), num_top=st.integers(0, 35), data=st.data())
def test_logprobs_are_of_the_raw_distribution(logits, num_top, data):
    token = data.draw(st.integers(0, len(logits) - 1))
    entry = token_logprob(np.array(logits, np.float32), token, num_top)
    log_sum = math.log(sum(math.exp(x) for x in logits))
    assert entry.logprob == pytest.approx(logits[token] - log_sum, abs=1e-9)
    assert entry.rank == sum(x > logits[token] for x in logits)
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:num_top]
    assert [i for i, _ in entry.top] == ranked
    assert [p for _, p in entry.top] == pytest.approx([logits[i] - log_sum for i in ranked], abs=1e-9)


def test_extreme_logits_and_temperatures_stay_finite():
    logits = np.array([3e38, -3e38, 0.0, 3e38], np.float32)
    for temperature in (1e-6, 1.0, 100.0):
        assert sample(logits, row(SamplingParams(temperature=temperature, seed=5))) in (0, 3)
    assert math.isfinite(token_logprob(logits, 0, 2).logprob)
