"""The DRY penalty against its author's loop."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.sampling import SamplingParams
from headrace.executor.dry import dry_penalties, repeats


def by_the_loop(history: list[int], params: SamplingParams) -> dict[int, float]:
    """Each earlier place of the last token, walked backwards: quadratic, and as the sampler was first published."""
    tokens = history[-params.dry_range :] if params.dry_range else history
    if not tokens or tokens[-1] in params.dry_breakers:
        return {}
    lengths: dict[int, int] = {}
    for i in range(len(tokens) - 1):
        follower = tokens[i + 1]
        if tokens[i] != tokens[-1] or follower in params.dry_breakers:
            continue
        length = 1
        while (
            i - length >= 0
            and tokens[i - length] == tokens[-1 - length]
            and tokens[i - length] not in params.dry_breakers
        ):
            length += 1
        lengths[follower] = max(length, lengths.get(follower, 0))
    return {
        token: params.dry_multiplier * params.dry_base ** (length - params.dry_allowed_length)
        for token, length in lengths.items()
        if length >= params.dry_allowed_length
    }


@settings(max_examples=500, deadline=None)
@given(
    history=st.lists(st.integers(0, 3), max_size=40),
    breakers=st.frozensets(st.integers(0, 3), max_size=2),
    allowed=st.integers(1, 5),
    look_back=st.integers(0, 45),
    base=st.sampled_from([1.0, 1.75, 3.0]),
)
def test_the_same_as_the_loop(history, breakers, allowed, look_back, base):
    params = SamplingParams(
        dry_multiplier=0.8, dry_base=base, dry_allowed_length=allowed, dry_range=look_back, dry_breakers=breakers
    )
    assert dry_penalties(history, params) == pytest.approx(by_the_loop(history, params))


def test_a_phrase_about_to_be_said_again():
    params = SamplingParams(dry_multiplier=0.8, dry_base=1.75, dry_allowed_length=2)
    # "1 2 3 4" was said; after "9 1 2 3" token 4 would go on with it: a repeat of three, one more than is allowed.
    assert dry_penalties([1, 2, 3, 4, 9, 1, 2, 3], params) == {4: pytest.approx(0.8 * 1.75)}
    assert repeats([1, 2, 3, 4, 9, 1, 2, 3], frozenset()) == {4: 3}
    assert repeats([1, 2, 3, 4, 9, 1, 2, 3], frozenset({2})) == {4: 1}


def test_long_repetition_stays_finite_and_linear():
    """The loop takes minutes for this; and 1.75 ** 20000 is no number."""
    params = SamplingParams(dry_multiplier=0.8)
    start_s = time.process_time()
    (penalty,) = dry_penalties([7] * 20_000, params).values()
    dry_penalties([1, 2, 3] * 7_000, params)
    assert time.process_time() - start_s < 0.5
    assert math.isfinite(penalty)
    assert penalty > 1e80
    assert dry_penalties([7] * 20_000, SamplingParams(dry_multiplier=0.8, dry_base=1.0)) == {7: 0.8}
