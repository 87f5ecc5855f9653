"""Workloads on the virtual clock: deterministic, exact in the times that can be worked out by hand, whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.prefix_hits import num_distinct, tree_hits
from headrace.core.cache import CacheGroup, CacheKind
from headrace.core.clock import ManualClock
from headrace.core.errors import ConfigurationError
from headrace.core.work import StepWork
from headrace.engine.composition import SchedulingConfig
from headrace.sim.build import SimConfig, build_sim
from headrace.sim.generators import WORKLOADS, generate
from headrace.sim.replay import Reply, replay
from headrace.sim.traces import read_trace
from headrace.sim.workload import Numbers, PlannedRequest, Workload, WorkloadSpec, plan

GROUP = CacheGroup("full", CacheKind.FULL, block_size=16, bytes_per_block=1)


class Times:
    def seconds(self, work: StepWork) -> float:
        return 0.25 + 0.125 * work.num_streams + 0.0625 * work.num_prompt


def config(**changes) -> SimConfig:
    return SimConfig(
        **({"groups": (GROUP,), "num_blocks": (512,), "context_length": 4096, "vocab_size": 5000} | changes)
    )


def chat(seed: int, num_requests: int = 150, rate: float = 0.05) -> Workload:
    rows = generate("chat", num_requests, rate, seed, 1 / 8)
    spec = WorkloadSpec(num_requests=num_requests, concurrency=None, trace=rows, num_warmup=0, max_tokens=4096)
    return plan(spec, Numbers(5000), seed)


def run(workload: Workload, sim: SimConfig) -> list[Reply]:
    engine, executor = build_sim(sim, Times())
    return replay(engine, executor, workload, engine.scheduler.check)


def test_times_by_hand():
    """A request of two tokens at 1.0, one of three at 1.1, replies of three tokens: five steps."""
    first = PlannedRequest(0, (1, 2), 3, arrival_s=1.0)
    second = PlannedRequest(1, (3, 4, 5), 3, arrival_s=1.1)
    replies = run(Workload(((first,), (second,)), None), config())
    # 1.0: prompt of 2, 0.375.  1.375: a stream and a prompt of 3, 0.5625.  Then two streams, 0.5.  Then one, 0.375.
    assert replies[0].token_times_s == [1.375, 1.9375, 2.4375]
    assert replies[1].token_times_s == [1.9375, 2.4375, 2.8125]
    assert [reply.sent_s for reply in replies] == [1.0, 1.1]
    assert replies[1].queued_s == 0.0, "from when the engine reads it, between two steps"


@pytest.mark.parametrize("num_blocks", [80, 512])
def test_jumps_change_no_time(num_blocks):
    jumping, stepping = (run(chat(3), config(jumps=jumps, num_blocks=(num_blocks,))) for jumps in (True, False))
    times = [[(reply.sent_s, reply.token_times_s, reply.num_cached) for reply in run] for run in (jumping, stepping)]
    assert times[0] == times[1]


def test_the_same_seed_gives_the_same_run():
    assert run(chat(5), config()) == run(chat(5), config())
    assert run(chat(5), config()) != run(chat(6), config())


@pytest.mark.parametrize("depth", [1, 2])
def test_every_reply_is_whole(depth):
    workload = chat(7)
    replies = run(workload, config(depth=depth))
    assert [reply.request for reply in replies] == sorted(workload.requests, key=lambda r: r.arrival_s)
    for reply in replies:
        times = reply.token_times_s
        assert len(times) == reply.request.num_output
        assert reply.sent_s < times[0] and times == sorted(times)


def test_a_closed_loop_keeps_its_places_and_a_turn_waits_for_the_one_before():
    spec = WorkloadSpec(num_requests=12, num_prompt=20, num_output=5, num_turns=3, think_s=2.0, concurrency=2)
    workload = plan(spec, Numbers(5000), 1)
    replies = run(workload, config())
    assert len(replies) == 12
    moments = sorted([(r.sent_s, 1) for r in replies] + [(r.token_times_s[-1], -1) for r in replies])
    num_open = most = 0
    for _, change in moments:
        num_open += change
        most = max(most, num_open)
    assert most == 2
    by_turn = {(r.request.session, r.request.turn): r for r in replies}
    for (session, turn), reply in by_turn.items():
        if turn:
            assert reply.sent_s == by_turn[session, turn - 1].token_times_s[-1] + 2.0
            assert reply.num_cached > 0, "it resends what has been read"


def test_a_refused_request_is_told():
    replies = run(Workload(((PlannedRequest(0, (1,) * 5000, 3, arrival_s=0.0),),), None), config())
    assert replies[0].error is not None and replies[0].error.code == "context_length_exceeded"
    assert not replies[0].token_times_s


def test_time_only_goes_on():
    clock = ManualClock(2.0)
    with pytest.raises(ValueError):
        clock.advance_to(1.0)


@pytest.mark.parametrize(("name", "prompt", "output"), [("chat", 1155, 211), ("code", 2048, 27.9)])
def test_generated_lengths_have_the_means_of_the_traces(name, prompt, output):
    """The last thousandth of the code trace's outputs is spread evenly up to its longest: 5 % more than there are."""
    rows = generate(name, 20_000, 5.0, 1)
    assert sum(row.num_output for row in rows) / len(rows) == pytest.approx(output, rel=0.08)
    fresh = [row for row in rows if len(set(row.block_ids)) == -(-row.num_prompt // row.block_tokens)]
    assert len(fresh) == len(rows), "every block of a prompt has an id"
    assert len(rows) / rows[-1].arrival_s == pytest.approx(5.0, rel=0.03)
    seen: set[int] = set()
    num_later = 0
    first_prompts = []
    for row in rows:
        is_later = not seen.isdisjoint(row.block_ids)
        num_later += is_later
        if not is_later:
            first_prompts.append(row.num_prompt)
        seen.update(row.block_ids)
    assert num_later / len(rows) == pytest.approx(WORKLOADS[name].later_turns, abs=0.05)
    assert sum(first_prompts) / len(first_prompts) == pytest.approx(prompt, rel=0.05)


def test_an_unknown_workload_is_refused():
    with pytest.raises(ConfigurationError, match="chat"):
        generate("poetry", 10, 1.0, 0)


@pytest.mark.parametrize(("name", "rate"), [("conversation", 0.366), ("synthetic", 0.640)])
def test_the_prefix_tree_hits_what_the_mooncake_traces_share(name, rate):
    """The figures of the traces' own blocks, counted independently; see docs/benchmarks.md for smaller caches."""
    folder = os.environ.get("HEADRACE_TRACES")
    if not folder:
        pytest.skip("HEADRACE_TRACES does not name a folder with the Mooncake traces")
    rows = read_trace(Path(folder) / f"mooncake_{name}.jsonl")
    hit, count = tree_hits(rows, num_distinct(rows))
    assert hit / count == pytest.approx(rate, abs=0.001)


@pytest.mark.parametrize("predictor", ["bound", "oracle"])
def test_hidden_lengths(predictor):
    """Replies are as long as planned, and only the oracle knows it before.

    It took the mapping, still empty when the engine is made, for none, and predicted the bound.
    """
    workload, lengths, most = chat(4, num_requests=60), {}, 300
    engine, executor = build_sim(config(scheduling=SchedulingConfig(predictor=predictor)), Times(), lengths)
    predicted: dict[str, float] = {}

    def each_step():
        engine.scheduler.check()
        for sequence in engine.scheduler.state.running:
            if not sequence.num_generated:
                predicted[sequence.request.id] = engine.scheduler.state.ledger.expected(sequence)

    replies = replay(
        engine, executor, workload, each_step, lengths=lengths, max_tokens=most, stop_token=executor.stop_token
    )
    assert [len(reply.token_times_s) for reply in replies] == [reply.request.num_output for reply in replies]
    assert predicted
    known = [lengths[id] if predictor == "oracle" else most for id in predicted]
    assert list(predicted.values()) == known
