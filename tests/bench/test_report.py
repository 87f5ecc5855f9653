"""The arithmetic of reports against a brute force that shares no code with it."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.bench.report import Objectives, flatten, medians, ratios, summarize
from headrace.bench.results import RequestResult

times = st.lists(st.floats(0, 100, allow_nan=False).map(lambda x: round(x, 4)), min_size=1, max_size=12)


@st.composite
def results(draw):
    count = draw(st.integers(1, 8))
    made = []
    for index in range(count):
        start = draw(st.floats(0, 10)) + 100
        if draw(st.integers(0, 4)) == 0:
            made.append(RequestResult(index, start, error=draw(st.sampled_from(["timeout", "http 429"]))))
            continue
        arrivals = sorted(start + t for t in draw(times))
        num_output = len(arrivals) + draw(st.integers(0, 2))
        made.append(RequestResult(index, start, tuple(arrivals), 10, num_output, draw(st.integers(0, 10))))
    return made


def brute_percentile(values, percent):
    """Between the ranks around (n - 1) * percent / 100, in exact fractions."""
    ordered = sorted(Fraction(v) for v in values)
    rank = Fraction(percent, 100) * (len(ordered) - 1)
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return float(ordered[low] + (rank - low) * (ordered[high] - ordered[low]))


def check(found, seconds):
    if not seconds:
        assert found is None
        return
    ms = [1e3 * s for s in seconds]
    assert found.count == len(ms)
    assert found.mean == pytest.approx(sum(ms) / len(ms), abs=1e-6)
    for percent, value in ((50, found.p50), (95, found.p95), (99, found.p99), (100, found.max)):
        assert value == pytest.approx(brute_percentile(ms, percent), abs=1e-6)


@settings(deadline=None, max_examples=200)
@given(results())
def test_against_a_brute_force(made):
    summary = summarize(made, Objectives(ttft_ms=20_000, tpot_ms=3_000))
    ttft, tpot, gaps, whole, met, last = [], [], [], [], 0, 0.0
    for r in made:
        if r.error:
            continue
        first, *_ = r.token_times_s
        end = r.token_times_s[-1]
        last = max(last, end)
        ttft.append(first - r.start_s)
        whole.append(end - r.start_s)
        for i in range(1, len(r.token_times_s)):
            gaps.append(r.token_times_s[i] - r.token_times_s[i - 1])
        mean = (end - first) / (r.num_output - 1) if r.num_output > 1 and len(r.token_times_s) > 1 else None
        if mean is not None:
            tpot.append(mean)
        met += first - r.start_s <= 20 and (mean is None or mean <= 3)
    check(summary.ttft_ms, ttft)
    check(summary.tpot_ms, tpot)
    check(summary.inter_token_ms, gaps)
    check(summary.end_to_end_ms, whole)
    good = [r for r in made if not r.error]
    assert summary.num_errors == len(made) - len(good) == sum(summary.errors.values())
    if not good:
        assert summary.output_tokens_per_s == 0
        return
    duration = last - min(r.start_s for r in made)
    assert summary.duration_s == pytest.approx(duration)
    if duration > 0:
        assert summary.output_tokens_per_s == pytest.approx(sum(r.num_output for r in good) / duration)
        assert summary.total_tokens_per_s == pytest.approx(sum(r.num_output + 10 for r in good) / duration)
        assert summary.requests_per_s == pytest.approx(len(good) / duration)
        assert summary.goodput_per_s == pytest.approx(met / duration)
    assert summary.cached_tokens == sum(r.num_cached for r in good)


def test_the_decoding_rate_counts_only_while_all_generate():
    """Two replies: all generate between 2.0 (the last first token) and 4.0 (the first last token)."""
    a = RequestResult(0, 0.0, (1.0, 2.0, 3.0, 4.0), 1, 4)
    b = RequestResult(1, 0.0, (2.0, 2.5, 3.0, 3.5, 4.0, 4.5), 1, 6)
    assert summarize([a, b], all_at_once=True).decode_tokens_per_s == (2 + 4) / 2
    assert summarize([a, b]).decode_tokens_per_s is None


def test_notes_tell_what_is_not_as_planned():
    a = RequestResult(0, 0.0, (1.0, 2.0), 11, 2, is_counted=False)
    notes = summarize([a], planned={0: (10, 3)}, client_cpu_s=1.5).notes
    assert len(notes) == 4
    assert "75 % of a core" in " ".join(notes)


def test_tenants_and_lag():
    made = [
        RequestResult(0, 0.0, (1.0,), 1, 1, tenant="tenant-10", due_s=-0.25),
        RequestResult(1, 0.0, (3.0,), 1, 1, tenant="tenant-2", due_s=0.0),
    ]
    summary = summarize(made)
    assert summary.max_send_lag_ms == 250
    assert list(summary.tenants) == ["tenant-2", "tenant-10"]
    assert summary.tenants["tenant-2"]["ttft_ms_p50"] == 3000


def test_medians_and_ratios_are_taken_round_by_round():
    """The machine slows down threefold over the rounds; B is always twice as fast as A."""
    a = [summarize([RequestResult(0, 0.0, (float(t), 2.0 * t), 4, 2)]) for t in (1, 2, 3)]
    b = [summarize([RequestResult(0, 0.0, (t / 2, float(t)), 4, 2)]) for t in (1, 2, 3)]
    assert medians(a)["ttft_ms.p50"] == 2000
    assert ratios(b, a)["ttft_ms.p50"] == 0.5
    assert ratios(b, a)["output_tokens_per_s"] == 2
    assert "errors" not in flatten(a[0])
