"""The benchmark against a scripted server, and against a second client that reads the same recorded streams.

The second client shares no code with the first: `http.client` parses the raw bytes, `json` the events, and the arrival
of a line is looked up by its place in the stream.
"""

from __future__ import annotations

import base64
import bisect
import http.client
import io
import itertools
import json
import statistics
import time

import pytest

from headrace.bench.http_target import HttpOptions, HttpTarget
from headrace.bench.machine import inspect_machine
from headrace.bench.presets import Point
from headrace.bench.report import medians
from headrace.bench.session import BenchOptions, run_bench
from headrace.core.errors import ConfigurationError
from headrace.sim.workload import WorkloadSpec

from .scripted_server import serving

SCRIPT = {"first_s": 0.05, "gaps_s": [0.01, 0.03, 0.02, 0.05], "cached": 3, "add": 1}


class Replayed(io.BytesIO):
    """What `http.client` needs of a socket; `tell` says how far it has read."""

    def makefile(self, mode):
        return self

    def peek(self, size=-1):
        return self.getvalue()[self.tell() :][:size]

    def close(self):  # at its end the response closes what it read from
        pass


def second_client(line: str) -> tuple[float, list[float], int]:
    """A recorded stream -> (when it was sent, arrivals of its tokens, tokens by the server's count)."""
    record = json.loads(line)
    pieces = [(t, base64.b64decode(data)) for t, data in record["pieces"]]
    ends = list(itertools.accumulate(len(data) for _, data in pieces))
    stream = Replayed(b"".join(data for _, data in pieces))
    response = http.client.HTTPResponse(stream)
    response.begin()
    assert response.status == 200
    arrivals, count = [], 0
    while text := response.readline():
        if not text.startswith(b"data: {"):
            continue
        event = json.loads(text[6:])
        count = event.get("usage", {}).get("completion_tokens", count)
        if any(c.get("text") or c.get("delta", {}).get("content") for c in event["choices"]):
            arrivals.append(pieces[bisect.bisect_left(ends, stream.tell())][0])
    return record["start_s"], arrivals, count


def measure(url, maker, spec, tmp_path, **options):
    target = HttpTarget("server", url, maker, HttpOptions(record=True, **options))
    bench = BenchOptions([Point("load", spec)], record=tmp_path / "streams.jsonl")
    report = run_bench([target], maker, bench, inspect_machine(measure=False))
    return report, report.points[0].summaries["server"][0]


def test_two_clients_agree(letters, tmp_path):
    """16 streams of 20 tokens, 8 at once: TTFT, inter-token times and throughput within 1 %."""
    spec = WorkloadSpec(num_requests=16, num_prompt=40, num_output=20, concurrency=8, num_warmup=1)
    with serving(SCRIPT) as (server, url):
        report, summary = measure(url, letters, spec, tmp_path)
    streams = [second_client(line) for line in (tmp_path / "streams.jsonl").read_text().splitlines()]
    assert len(streams) == 16
    ttft = [times[0] - start for start, times, _ in streams]
    gaps = [b - a for _, times, _ in streams for a, b in itertools.pairwise(times)]
    duration = max(times[-1] for _, times, _ in streams) - min(start for start, _, _ in streams)
    agree = {"rel": 0.01}
    assert summary.ttft_ms.mean == pytest.approx(1e3 * statistics.fmean(ttft), **agree)
    assert summary.ttft_ms.p50 == pytest.approx(1e3 * statistics.median(ttft), **agree)
    assert summary.inter_token_ms.mean == pytest.approx(1e3 * statistics.fmean(gaps), **agree)
    quantiles = statistics.quantiles(gaps, n=100, method="inclusive")
    for percent, value in ((50, summary.inter_token_ms.p50), (99, summary.inter_token_ms.p99)):
        assert value == pytest.approx(1e3 * quantiles[percent - 1], **agree)
    assert summary.output_tokens_per_s == pytest.approx(sum(n for _, _, n in streams) / duration, **agree)
    assert summary.output_tokens == 16 * 20
    assert summary.num_errors == 0 and not summary.notes
    assert summary.cached_tokens == 16 * 3
    # And against the script: what is sent at known times arrives then, and never before.
    written = server.sent[1:]  # the first stream is the warm-up
    assert len(written) == 16
    measured = sorted(times[-1] for _, times, _ in streams)
    assert all(arrived >= sent for arrived, sent in zip(measured, sorted(s[-1] for s in written), strict=True))
    assert statistics.median(gaps) == pytest.approx(0.025, abs=0.01)
    assert all(t >= 0.05 for t in ttft)
    # The prompts: one token less was sent than planned, for the server adds one.
    assert {len(body["prompt"]) for body in server.bodies} == {39}
    assert {body["max_tokens"] for body in server.bodies} == {20}
    assert report.targets["server"]["prompt_overhead_tokens"] == 1
    assert "ttft_ms.p50" in medians([summary])


def test_words_travel_as_chat_and_as_text(words, tmp_path):
    """SmolLM2's words, for the server counts words: one token each."""
    spec = WorkloadSpec(num_requests=4, num_prompt=40, num_output=5, concurrency=4, num_warmup=0)
    with serving(SCRIPT) as (server, url):
        report, summary = measure(url, words, spec, tmp_path, endpoint="chat")
        assert summary.output_tokens == 20 and not summary.notes
        assert report.targets["server"]["prompts"] == "chat"
        assert {len(body["messages"][0]["content"].split()) for body in server.bodies} == {39}
        _, summary = measure(url, words, spec, tmp_path, prompt_as="text")
        assert summary.prompt_tokens == 160 and not summary.notes
        assert all(isinstance(body["prompt"], str) for body in server.bodies[4:])


def test_a_server_that_counts_otherwise_is_refused(letters, tmp_path):
    """It counts words, and a prompt of letters is one word: the wrong tokenizer."""
    with serving(SCRIPT) as (_, url), pytest.raises(ConfigurationError, match="40 tokens were read as 2"):
        measure(url, letters, WorkloadSpec(), tmp_path, endpoint="chat")


def test_errors_are_counted_by_kind_and_measured_in_nothing(letters, tmp_path):
    spec = WorkloadSpec(num_requests=9, num_prompt=20, num_output=4, concurrency=3, num_warmup=0)
    with serving(SCRIPT | {"fail_every": 3, "usage": False}) as (_, url):
        report, summary = measure(url, letters, spec, tmp_path)
    assert summary.errors == {"http 429": 3} and report.num_errors == 3
    assert summary.output_tokens == 6 * 4
    assert "no usage" in summary.notes[0]
    assert "the queue is full" in report.points[0].examples["http 429"]


def test_a_stream_that_breaks_and_one_that_takes_too_long(letters, tmp_path):
    spec = WorkloadSpec(num_requests=1, num_prompt=20, num_output=100, concurrency=1, num_warmup=0)
    with serving({"first_s": 0.01, "gaps_s": [0.05]}) as (_, url):
        _, summary = measure(url, letters, spec, tmp_path, timeout_s=0.3)
    assert summary.errors == {"timeout": 1}
    with serving(SCRIPT | {"break_after": 3}) as (_, url):
        _, summary = measure(url, letters, spec, tmp_path)
    assert summary.errors == {"connection lost": 1}
    assert summary.output_tokens == 0


def test_open_loop_sends_when_it_is_due(letters, tmp_path):
    """Forty arrivals at 100 per second of requests that take 0.2 s each: nobody waits for anybody."""
    spec = WorkloadSpec(num_requests=40, num_prompt=20, num_output=2, concurrency=None, rate_per_s=100.0, num_warmup=0)
    with serving({"first_s": 0.05, "gaps_s": [0.1]}) as (_, url):
        start_s = time.monotonic()
        _, summary = measure(url, letters, spec, tmp_path)
        took_s = time.monotonic() - start_s
    assert summary.num_errors == 0
    assert took_s < 40 * 0.15, "one after the other it would take 6 s"
    assert summary.max_send_lag_ms is not None and summary.max_send_lag_ms < 200
