"""How fast the simulator is, and what the scheduler's own Python costs per step.

    python -m benchmarks.simulator_speed [--requests 20000] [--no-jumps]

The chat workload (marginals of the Azure conversation trace, lengths scaled 1/8) at 0.8 of the capacity of a machine
like two cores with SmolLM2. Processor time of this process, so that others do not show; one core.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Annotated

import typer

from headrace.bench.report import Objectives
from headrace.bench.simulation import simulate
from headrace.core.cache import CacheGroup, CacheKind
from headrace.core.cost_model import CostModel
from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.sim.build import SimConfig, build_sim
from headrace.sim.generators import generate
from headrace.sim.replay import replay
from headrace.sim.workload import Numbers, Workload, WorkloadSpec, plan

GROUP = CacheGroup("full", CacheKind.FULL, block_size=16, bytes_per_block=1)
COEFFICIENTS = (0.0035, 0.0005, 0.0006, 0.0006, 0.00005, 0.0004, 0.003, 0.0006)
"""Of the cost model (`headrace.core.cost_model.FEATURES`), seconds: about those of two cores and SmolLM2."""
LOAD = 0.8
WIDTHS = (64, 256, 512)
WAITING = 1000


def chat(num_requests: int, rate_per_s: float, config: SimConfig) -> Workload:
    rows = generate("chat", num_requests, rate_per_s, 1, 1 / 8)
    spec = WorkloadSpec(
        num_requests=num_requests, concurrency=None, trace=rows, num_warmup=0, max_tokens=config.context_length
    )
    return plan(spec, Numbers(config.vocab_size), 1)


def step_us(num_running: int, num_waiting: int, num_steps: int = 200) -> float:
    """Microseconds of schedule and commit per running sequence, decoding; the median step."""

    config = SimConfig((GROUP,), (60_000,), 8192, 49_152, max_running=num_running, max_step_tokens=4096, jumps=False)
    engine, executor = build_sim(replace(config, max_queue=2 * WAITING), CostModel())
    for number in range(num_running + num_waiting):
        prompt = tuple(range(number, number + 64))
        engine.submit(Request(str(number), prompt, SamplingParams(max_tokens=1000, temperature=0.0)))
    while any(sequence.num_computed < 64 for sequence in engine.scheduler.state.running) or not engine.stats().steps:
        engine.step()
    times = []
    for _ in range(num_steps):
        begin = time.thread_time()
        plan = engine.scheduler.schedule(0.0)
        took_s = time.thread_time() - begin
        result = executor.launch(plan).result()
        begin = time.thread_time()
        engine.scheduler.commit(plan, result, 0.0)
        times.append(took_s + time.thread_time() - begin)
    return 1e6 * statistics.median(times) / num_running


def main(
    requests: int = 20_000,
    jumps: Annotated[bool, typer.Option(help="Take steps that are alike at once.")] = True,
) -> None:
    times = CostModel()
    times.coefficients = list(COEFFICIENTS)
    config = SimConfig((GROUP,), (6000,), 8192, 49_152, jumps=jumps)
    full = replace(chat(500, 1.0, config), concurrency=16)
    capacity = simulate(config, times, full, Objectives())[0].requests_per_s
    begin = time.process_time()
    workload = chat(requests, LOAD * capacity, config)
    planned_s = time.process_time() - begin
    engine, executor = build_sim(config, times)
    begin = time.process_time()
    replies = replay(engine, executor, workload)
    took_s = time.process_time() - begin
    stats = engine.stats()
    print(f"{len(replies):,} requests, {LOAD * capacity:.2f} per second, {stats.steps:,} steps, ", end="")
    print(f"{stats.generated_tokens:,} tokens, {executor.clock.now():,.0f} s of virtual time")
    print(f"simulated in {took_s:.2f} s ({1e3 * took_s / requests:.3f} ms per request); planned in {planned_s:.2f} s")
    for width in WIDTHS:
        alone, beside = step_us(width, 0), step_us(width, WAITING)
        print(f"{width} running: {alone:.2f} us per sequence and step, {beside:.2f} with {WAITING:,} waiting")


if __name__ == "__main__":
    typer.run(main)
