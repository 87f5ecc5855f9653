"""The loads of `headrace bench` on an engine with a virtual clock, told as a benchmark is told."""

from __future__ import annotations

from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

from headrace.bench.machine import Machine
from headrace.bench.presets import Point
from headrace.bench.report import Objectives, Summary, summarize
from headrace.bench.results import RequestResult
from headrace.bench.session import BenchOptions, BenchReport, PointRuns, Progress, hash_seed
from headrace.core.work import StepTimes
from headrace.sim.build import SimConfig, build_sim
from headrace.sim.replay import Reply, replay
from headrace.sim.workload import Numbers, TokenMaker, Workload, plan

NAME = "simulated"


def run_simulation(
    config: SimConfig,
    times: StepTimes,
    options: BenchOptions,
    machine: Machine,
    *,
    about: dict[str, Any] | None = None,
    maker: TokenMaker | None = None,
    progress: Progress = lambda num_done, num_total, what: None,
) -> BenchReport:
    """Every load and round on an engine of its own. `maker`: numbers without a meaning, unless tokens are given."""
    started = datetime.now(UTC)
    done = []
    for point in options.points:
        runs, examples = [], {}
        for round_number in range(options.rounds):
            spec = replace(point.spec, max_tokens=config.context_length)
            seed = hash_seed(options.seed, point.name, round_number)
            workload = plan(spec, maker or Numbers(config.vocab_size), seed)
            summary, results = simulate(config, times, workload, options.objectives)
            runs.append(summary)
            examples.update({r.error: r.detail for r in results if r.error is not None})
            progress(round_number + 1, options.rounds, point.name)
        done.append(PointRuns(Point(point.name, point.spec), {NAME: runs}, examples))
    described = {"kind": "simulated", "scheduling": asdict(config.scheduling), **(about or {})}
    return BenchReport({NAME: described}, tuple(done), options, machine, started)


def simulate(
    config: SimConfig, times: StepTimes, workload: Workload, objectives: Objectives
) -> tuple[Summary, list[RequestResult]]:
    """One run: its figures, and what became of each request."""
    engine, executor = build_sim(config, times)
    if workload.warmup:  # a real engine's budget has learnt from these
        chains = tuple((request,) for request in workload.warmup)
        replay(engine, executor, Workload(chains, workload.concurrency or len(chains)))
    results = [result_of(reply, is_open=workload.concurrency is None) for reply in replay(engine, executor, workload)]
    summary = summarize(
        results,
        objectives,
        all_at_once=workload.concurrency is not None and workload.concurrency >= len(results),
        planned={request.index: (len(request.prompt), request.num_output) for request in workload.requests},
    )
    return replace(summary, notes=(*workload.notes, *summary.notes)), results


def result_of(reply: Reply, *, is_open: bool) -> RequestResult:
    """As a benchmark tells it."""
    request = reply.request
    return RequestResult(
        index=request.index,
        start_s=reply.sent_s,
        token_times_s=tuple(reply.token_times_s),
        num_prompt=len(request.prompt),
        num_output=len(reply.token_times_s),
        num_cached=reply.num_cached,
        due_s=reply.sent_s if is_open else None,
        tenant=request.tenant,
        error=None if reply.error is None else reply.error.code,
        detail="" if reply.error is None else str(reply.error),
    )
