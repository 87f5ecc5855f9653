"""From results to figures. Percentiles interpolate linearly between the two nearest ranks, as NumPy does by default."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from headrace.bench.results import RequestResult

MAX_CLIENT_SHARE = 0.5
"""Of a core: above it, what is measured may be this process."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of durations, in milliseconds."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of_seconds(cls, values: Iterable[float]) -> Distribution | None:
        """None of nothing."""
        ms = np.fromiter(values, np.float64) * 1e3
        if not len(ms):
            return None
        p50, p95, p99 = (float(value) for value in np.percentile(ms, (50, 95, 99)))
        return cls(len(ms), float(ms.mean()), p50, p95, p99, float(ms.max()))


@dataclass(frozen=True, slots=True)
class Objectives:
    """What a good reply is: each bound in milliseconds, None: none."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    @property
    def are_given(self) -> bool:
        return self.ttft_ms is not None or self.tpot_ms is not None

    def met_by(self, result: RequestResult) -> bool:
        """A reply of one token has no TPOT and meets any."""
        if result.error is not None or result.ttft_s is None:
            return False
        if self.ttft_ms is not None and result.ttft_s * 1e3 > self.ttft_ms:
            return False
        return self.tpot_ms is None or result.tpot_s is None or result.tpot_s * 1e3 <= self.tpot_ms


@dataclass(frozen=True, slots=True)
class Summary:
    """One run of one workload against one target. Requests that failed count as errors and in nothing else.

    `duration_s`: from the first request sent to the last token of any. `inter_token_ms`: between neighbouring arrivals
    of one reply, all replies together; `tpot_ms`: one mean per reply. `goodput_per_s`: replies per second that meet
    the objectives. `decode_tokens_per_s`: tokens per second while all requests in flight were generating, between
    the last first token and the first last token; only where all were sent at once, else None.
    """

    num_requests: int
    num_errors: int
    errors: dict[str, int]
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    """None where the target does not tell."""
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    inter_token_ms: Distribution | None
    end_to_end_ms: Distribution | None
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    """Prompt and output."""
    prompt_tokens_per_s: float
    """Prompt tokens over the duration: the speed of reading where replies have one token."""
    decode_tokens_per_s: float | None
    goodput_per_s: float | None
    max_send_lag_ms: float | None
    """Open loop: the longest that a request left behind its plan."""
    client_cpu_share: float | None = None
    """Of one core, used by this process during the run; None in process, where it is the engine's too."""
    notes: tuple[str, ...] = ()
    tenants: dict[str, dict[str, float]] = field(default_factory=dict)
    """Per tenant: requests, output tokens, TTFT P50 and P99 (ms)."""


def summarize(
    results: Sequence[RequestResult],
    objectives: Objectives | None = None,
    *,
    all_at_once: bool = False,
    client_cpu_s: float | None = None,
    planned: dict[int, tuple[int, int]] | None = None,
) -> Summary:
    """The figures of one run.

    `all_at_once`: every request was sent at the start. `client_cpu_s`: CPU time of this process between the first
    request and the last. `planned`: index -> (prompt tokens, output tokens), to hold the target's counts against.
    """
    good = [result for result in results if result.error is None]
    duration_s = 0.0
    if good:
        duration_s = max(r.token_times_s[-1] for r in good) - min(r.start_s for r in results)
    rate = 1 / duration_s if duration_s > 0 else 0.0
    prompt_tokens = sum(_num_prompt(r, planned) for r in good)
    output_tokens = sum(r.num_output for r in good)
    cached = [r.num_cached for r in good if r.num_cached is not None]
    lags = [r.start_s - r.due_s for r in results if r.due_s is not None]
    share = client_cpu_s / duration_s if client_cpu_s is not None and duration_s > 0 else None
    return Summary(
        num_requests=len(results),
        num_errors=len(results) - len(good),
        errors=dict(Counter(r.error for r in results if r.error is not None).most_common()),
        duration_s=duration_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        cached_tokens=sum(cached) if cached else None,
        ttft_ms=Distribution.of_seconds(r.ttft_s for r in good if r.ttft_s is not None),
        tpot_ms=Distribution.of_seconds(r.tpot_s for r in good if r.tpot_s is not None),
        inter_token_ms=Distribution.of_seconds(gap for r in good for gap in _gaps(r.token_times_s)),
        end_to_end_ms=Distribution.of_seconds(r.end_to_end_s for r in good if r.end_to_end_s is not None),
        requests_per_s=len(good) * rate,
        output_tokens_per_s=output_tokens * rate,
        total_tokens_per_s=(prompt_tokens + output_tokens) * rate,
        prompt_tokens_per_s=prompt_tokens * rate,
        decode_tokens_per_s=_decode_rate(good) if all_at_once and len(good) == len(results) else None,
        goodput_per_s=sum(map(objectives.met_by, good)) * rate if objectives and objectives.are_given else None,
        max_send_lag_ms=max(lags) * 1e3 if lags else None,
        client_cpu_share=share,
        notes=tuple(_notes(good, share, planned)),
        tenants=_by_tenant(good),
    )


def _gaps(times: Sequence[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(times)]


def _num_prompt(result: RequestResult, planned: dict[int, tuple[int, int]] | None) -> int:
    if result.num_prompt is not None:
        return result.num_prompt
    return planned[result.index][0] if planned else 0


def _decode_rate(results: Sequence[RequestResult]) -> float | None:
    if not results:
        return None
    start_s = max(r.token_times_s[0] for r in results)
    end_s = min(r.token_times_s[-1] for r in results)
    if end_s <= start_s:
        return None
    return sum(sum(start_s < time <= end_s for time in r.token_times_s) for r in results) / (end_s - start_s)


def _notes(
    results: Sequence[RequestResult], share: float | None, planned: dict[int, tuple[int, int]] | None
) -> Iterable[str]:
    if any(not r.is_counted for r in results):
        yield "the target tells no usage: output tokens are counted as events with text"
    if share is not None and share > MAX_CLIENT_SHARE:
        yield f"this client used {100 * share:.0f} % of a core: it may be what was measured"
    if planned is None:
        return
    prompts = sum(r.num_prompt is not None and r.num_prompt != planned[r.index][0] for r in results)
    outputs = sum(r.num_output != planned[r.index][1] for r in results)
    if prompts:
        yield f"{prompts} of {len(results)} prompts had another number of tokens than planned, as the target counts"
    if outputs:
        yield f"{outputs} of {len(results)} replies had another number of tokens than asked for"


def _by_tenant(results: Sequence[RequestResult]) -> dict[str, dict[str, float]]:
    names = sorted({r.tenant for r in results if r.tenant}, key=lambda name: (len(name), name))
    found = {}
    for name in names:
        own = [r for r in results if r.tenant == name]
        ttft = Distribution.of_seconds(r.ttft_s for r in own if r.ttft_s is not None)
        found[name] = {
            "requests": float(len(own)),
            "output_tokens": float(sum(r.num_output for r in own)),
            "ttft_ms_p50": ttft.p50 if ttft else 0.0,
            "ttft_ms_p99": ttft.p99 if ttft else 0.0,
        }
    return found


# Several rounds and targets. A summary becomes a flat mapping: "ttft_ms.p50" -> value.


def flatten(summary: Summary) -> dict[str, float]:
    """The numbers of a summary by dotted name."""
    flat: dict[str, float] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{prefix}.{key}" if prefix else key, inner)
        elif isinstance(value, int | float):
            flat[prefix] = value

    walk("", {k: v for k, v in asdict(summary).items() if k not in ("errors", "tenants")})
    return flat


def medians(rounds: Sequence[Summary]) -> dict[str, float]:
    """Of each figure over the rounds; one that is missing in a round is left out."""
    flats = [flatten(summary) for summary in rounds]
    return {
        name: statistics.median(flat[name] for flat in flats)
        for name in (flats[0] if flats else ())
        if all(name in flat for flat in flats)
    }


def ratios(rounds: Sequence[Summary], base: Sequence[Summary]) -> dict[str, float]:
    """Median over the rounds of (figure / the base's figure in the same round): a drift of the machine cancels out."""
    pairs = [(flatten(a), flatten(b)) for a, b in zip(rounds, base, strict=True)]
    names = [n for n in pairs[0][0] if all(n in a and b.get(n) for a, b in pairs)] if pairs else []
    return {name: statistics.median(a[name] / b[name] for a, b in pairs) for name in names}
