"""Who is sent when: a target that notes it."""

from __future__ import annotations

import asyncio
import time

from headrace.bench.report import Objectives
from headrace.bench.results import RequestResult
from headrace.bench.runner import run_interleaved, run_once
from headrace.sim.workload import WorkloadSpec, plan


class Notebook:
    """Answers after `reply_s`, and notes who was in flight."""

    measures_client = True
    max_tokens = None

    def __init__(self, name: str, log: list, reply_s: float = 0.002) -> None:
        self.name, self.log, self.reply_s = name, log, reply_s
        self.in_flight: set[int] = set()
        self.most = 0
        self.done: list[RequestResult] = []

    async def open(self):
        pass

    async def prepare(self, requests):
        self.done = []
        self.log.append((self.name, "prepare", tuple(r.index for r in requests)))

    async def send(self, request):
        start_s = time.monotonic()
        self.in_flight.add(request.index)
        self.most = max(self.most, len(self.in_flight))
        self.log.append((self.name, "send", request.index))
        await asyncio.sleep(self.reply_s)
        self.in_flight.remove(request.index)
        self.log.append((self.name, "end", request.index))
        self.done.append(RequestResult(request.index, start_s, (time.monotonic(),), 1, request.num_output))

    def results(self):
        return sorted(self.done, key=lambda r: r.index)

    def describe(self):
        return {}

    async def close(self):
        pass


def test_a_closed_loop_keeps_its_places_full(letters):
    workload = plan(WorkloadSpec(num_requests=20, num_output=1, concurrency=4, num_warmup=0), letters, 0)
    target = Notebook("A", [])
    ticks = []
    run = asyncio.run(run_once(target, workload, 0, Objectives(), lambda: ticks.append(1)))
    assert target.most == 4
    assert len(ticks) == len(run.results) == 20
    assert [result.index for result in run.results] == list(range(20))
    assert run.summary.max_send_lag_ms is None


def test_turns_wait_for_their_predecessors_and_think(letters):
    spec = WorkloadSpec(num_requests=9, num_output=1, num_turns=3, think_s=0.01, concurrency=2, num_warmup=0)
    target = Notebook("A", [])
    asyncio.run(run_once(target, plan(spec, letters, 0), 0, Objectives()))
    assert target.most == 2
    for first in (0, 3, 6):
        order = [(what, index) for _, what, index in target.log[1:] if index in range(first, first + 3)]
        assert order == [(what, index) for index in range(first, first + 3) for what in ("send", "end")]


def test_targets_take_turns_and_warm_up_once(letters):
    log: list = []
    targets = [Notebook("A", log), Notebook("B", log)]
    workloads = [plan(WorkloadSpec(num_requests=2, num_output=1, num_warmup=1), letters, seed) for seed in range(3)]
    runs = asyncio.run(run_interleaved(targets, workloads, Objectives()))
    assert [(run.target, run.round) for run in runs] == [(t, r) for r in range(3) for t in "AB"]
    assert [(name, indices) for name, what, indices in log if what == "prepare"] == [
        ("A", (-1,)),
        ("B", (-1,)),
        *[(name, (0, 1)) for _ in range(3) for name in "AB"],
    ]
