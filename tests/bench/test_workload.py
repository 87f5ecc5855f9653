"""Plans: exact, deterministic, shared as asked."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from headrace.bench.prompts import PromptMaker
from headrace.bench.settings import open_tokenizer
from headrace.core.errors import ConfigurationError
from headrace.sim.traces import TraceRow
from headrace.sim.workload import PlannedRequest, WorkloadSpec, plan


def common(a: PlannedRequest, b: PlannedRequest) -> int:
    """Tokens two prompts have in common at their heads."""
    pairs = zip(a.prompt, b.prompt, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a.prompt), len(b.prompt)))


@pytest.mark.parametrize("model", ["smollm2_path", "gemma_path"])
def test_texts_encode_to_exactly_the_planned_tokens(model, request):
    """Byte-level BPE and SentencePiece, each prompt and each turn, whole and without its last tokens."""
    tokenizer = open_tokenizer(str(request.getfixturevalue(model)))
    maker = PromptMaker(tokenizer)
    assert len(maker.words) > 1000
    spec = WorkloadSpec(num_requests=60, num_prompt=97, num_prefix=40, num_turns=3, num_turn=11, num_output=5)
    for planned in plan(spec, maker, seed=3).requests:
        assert len(planned.prompt) == 97 + planned.turn * (5 + 11)
        assert tuple(tokenizer.encode(maker.text(planned.prompt))) == planned.prompt
        assert tuple(tokenizer.encode(maker.text(planned.prompt[:-7]))) == planned.prompt[:-7]


def test_a_plan_is_the_same_in_every_process(words, smollm2_path):
    program = (
        "import sys; from pathlib import Path; from tests.bench.test_workload import fingerprint;"
        "print(fingerprint(Path(sys.argv[1])))"
    )
    root = Path(__file__).parents[2]
    other = subprocess.run(
        [sys.executable, "-c", program, str(smollm2_path)], cwd=root, capture_output=True, text=True, check=True
    )
    assert other.stdout.strip() == fingerprint(smollm2_path)
    spec = WorkloadSpec(num_requests=8, concurrency=None, rate_per_s=3.0, num_tenants=3)
    assert plan(spec, words, 1) == plan(spec, words, 1)
    assert plan(spec, words, 1).requests[0].prompt != plan(spec, words, 2).requests[0].prompt


def fingerprint(model: Path) -> str:
    import hashlib

    spec = WorkloadSpec(num_requests=9, num_turns=2, num_prefix=16, concurrency=None, rate_per_s=5.0, num_tenants=2)
    text = repr([(r, r.prompt) for r in plan(spec, PromptMaker(open_tokenizer(str(model))), 42).requests])
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("num_prefixes", [1, 3])
def test_prefixes_are_shared_exactly_as_far_as_asked(words, num_prefixes):
    spec = WorkloadSpec(num_requests=12, num_prompt=80, num_prefix=48, num_prefixes=num_prefixes)
    workload = plan(spec, words, 0)
    for a in workload.requests:
        for b in workload.requests[a.index + 1 :]:
            same = a.index % num_prefixes == b.index % num_prefixes
            assert common(a, b) == (48 if same else 0)
    for warm in workload.warmup:
        assert all(common(warm, request) == 0 for request in workload.requests)


def test_nothing_is_shared_without_a_prefix(words):
    requests = plan(WorkloadSpec(num_requests=40), words, 0).requests
    assert all(common(a, b) == 0 for a in requests for b in requests if a.index < b.index)


def test_turns_resend_their_history(words):
    spec = WorkloadSpec(num_requests=7, num_turns=3, num_prompt=20, num_output=6, num_turn=4, think_s=0.5)
    workload = plan(spec, words, 0)
    assert [len(chain) for chain in workload.chains] == [3, 3, 1]
    for chain in workload.chains:
        for before, after in itertools.pairwise(chain):
            assert after.prompt[: len(before.prompt)] == before.prompt
            assert len(after.prompt) == len(before.prompt) + 6 + 4
        assert [request.think_s for request in chain] == [0.0, 0.5, 0.5][: len(chain)]
    assert [request.index for request in workload.requests] == list(range(7))


def test_tenants_follow_zipf(words):
    spec = WorkloadSpec(num_requests=4000, num_prompt=1, num_output=1, num_tenants=5, zipf=1.1)
    counts = Counter(request.tenant for request in plan(spec, words, 0).requests)
    total = sum((i + 1) ** -1.1 for i in range(5))
    for i in range(5):
        assert counts[f"tenant-{i}"] == pytest.approx(4000 * (i + 1) ** -1.1 / total, rel=0.15)


def test_poisson_arrivals(words):
    spec = WorkloadSpec(num_requests=4000, num_prompt=1, num_output=1, concurrency=None, rate_per_s=8.0)
    times = [request.arrival_s for request in plan(spec, words, 0).requests]
    assert times[0] == 0 and times == sorted(times)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 8, rel=0.05)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.1)


def test_a_trace_keeps_lengths_arrivals_and_shared_blocks(words):
    rows = (
        TraceRow(0.0, 25, 4, (0, 1, 2), 10),
        TraceRow(1.5, 30, 2, (0, 1, 7), 10),
        TraceRow(2.5, 8, 1),
        TraceRow(3.0, 95, 9, tuple(range(10)), 10),
    )
    workload = plan(WorkloadSpec(num_requests=4, concurrency=None, trace=rows, max_tokens=60), words, 0)
    first, second, third, long = workload.requests
    assert [len(r.prompt) for r in workload.requests] == [25, 30, 8, 51]
    assert [r.num_output for r in workload.requests] == [4, 2, 1, 9]
    assert [r.arrival_s for r in workload.requests] == [0.0, 1.5, 2.5, 3.0]
    assert (common(first, second), common(first, third), common(first, long)) == (20, 0, 25)
    assert workload.notes == ("1 of 4 requests were clipped to the context of 60 tokens",)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_prefix": 128}, "num_prefix is 128"),
        ({"concurrency": None}, "one of concurrency, rate_per_s and trace"),
        ({"rate_per_s": 2.0}, "one of concurrency, rate_per_s and trace"),
        ({"max_tokens": 191}, "192 tokens"),
        ({"num_turns": 2, "max_tokens": 200}, "288 tokens"),
    ],
)
def test_what_makes_no_sense_is_refused(fields, message):
    with pytest.raises(ConfigurationError, match=message):
        WorkloadSpec(**fields)
