"""Sends a workload to a target: closed loop or open loop, then target after target, round after round."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from headrace.bench.report import Objectives, Summary, summarize
from headrace.bench.results import RequestResult
from headrace.bench.targets import Target
from headrace.sim.workload import Chain, PlannedRequest, Workload

Tick = Callable[[], None]
"""Called when a measured request has ended."""


@dataclass(frozen=True, slots=True)
class Run:
    """One workload against one target, once."""

    target: str
    round: int
    results: tuple[RequestResult, ...]
    summary: Summary


async def warm_up(target: Target, workload: Workload) -> None:
    """Send the warm-up requests; what becomes of them is not looked at."""
    if workload.warmup:
        await target.prepare(workload.warmup)
        chains = [(request,) for request in workload.warmup]
        await _closed_loop(target, chains, workload.concurrency or len(chains), lambda: None)


async def run_once(
    target: Target, workload: Workload, round_number: int, objectives: Objectives, tick: Tick = lambda: None
) -> Run:
    requests = workload.requests
    await target.prepare(requests)
    cpu_s = time.process_time()
    due: dict[int, float] = {}
    if workload.concurrency is None:
        due = await _open_loop(target, workload.chains, tick)
    else:
        await _closed_loop(target, workload.chains, workload.concurrency, tick)
    cpu_s = time.process_time() - cpu_s
    results = tuple(replace(result, due_s=due.get(result.index)) for result in target.results())
    summary = summarize(
        results,
        objectives,
        all_at_once=workload.concurrency is not None and workload.concurrency >= len(requests),
        client_cpu_s=cpu_s if target.measures_client else None,
        planned={request.index: (len(request.prompt), request.num_output) for request in requests},
    )
    return Run(target.name, round_number, results, replace(summary, notes=(*workload.notes, *summary.notes)))


async def run_interleaved(
    targets: Sequence[Target],
    workloads: Sequence[Workload],
    objectives: Objectives,
    tick: Tick = lambda: None,
    after: Callable[[Target, Run], None] = lambda target, run: None,
) -> list[Run]:
    """Each round's workload against each target: A B A B, so that a drift of the machine meets all alike.

    Rounds have workloads of their own, for a target's cache knows those of the rounds before.
    """
    for target in targets:
        await warm_up(target, workloads[0])
    runs = []
    for round_number, workload in enumerate(workloads):
        for target in targets:
            run = await run_once(target, workload, round_number, objectives, tick)
            after(target, run)
            runs.append(run)
    return runs


async def _closed_loop(target: Target, chains: Sequence[Chain], concurrency: int, tick: Tick) -> None:
    """`concurrency` places; each takes the next chain when its own has ended."""
    waiting: Iterator[Chain] = iter(chains)

    async def place() -> None:
        for chain in waiting:
            await _follow(target, chain, tick)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(chains))):
            group.create_task(place())


async def _open_loop(target: Target, chains: Sequence[Chain], tick: Tick) -> dict[int, float]:
    """Starts each chain when it is due, whatever has become of the others. Returns index -> when it was due."""
    begin_s = time.monotonic()
    due: dict[int, float] = {}
    async with asyncio.TaskGroup() as group:
        for chain in sorted(chains, key=lambda chain: chain[0].arrival_s or 0.0):
            at_s = begin_s + (chain[0].arrival_s or 0.0)
            due[chain[0].index] = at_s
            if (wait_s := at_s - time.monotonic()) > 0:
                await asyncio.sleep(wait_s)
            group.create_task(_follow(target, chain, tick))
    return due


async def _follow(target: Target, chain: Sequence[PlannedRequest], tick: Tick) -> None:
    """One request after the other. A turn whose predecessor failed is sent all the same: its history is planned."""
    for request in chain:
        if request.think_s:
            await asyncio.sleep(request.think_s)
        await target.send(request)
        tick()
