"""The virtual clock beside the real engine, on the chat workload.

    python -m benchmarks.virtual_clock [--load 0.8] [--requests 100] [--seeds 11,12,13] [--processor-time] [--write]

Steps are calibrated; then, for each seed, the workload runs on the real engine (native backend, in this process), steps
are calibrated again, and the same requests run on the virtual clock with the cost model of the calibrations before and
after. The workload's own steps are in no fit. Both engines are driven by `headrace.sim.replay`, so that what differs is
the executor and the clock alone. On a machine with other work a wall clock measures that work too:
`--processor-time` counts the time of the engine's thread instead. `--write` puts the table into docs/benchmarks.md.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.peers.report import machine_text, replace_section, table
from headrace.bench import calibration
from headrace.bench.machine import inspect_machine
from headrace.bench.prompts import PromptMaker
from headrace.bench.report import Objectives, Summary, flatten, summarize
from headrace.bench.simulation import result_of, simulate
from headrace.core.plan import StepPlan
from headrace.core.protocols import Executor
from headrace.core.work import StepTimes
from headrace.executor.local import Finished
from headrace.server.build import Deployment, ServeConfig, build
from headrace.server.serve import settle_interpreter
from headrace.sim.build import SimConfig
from headrace.sim.generators import generate
from headrace.sim.replay import replay
from headrace.sim.workload import Numbers, Workload, WorkloadSpec, plan

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
FIGURES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "end_to_end_ms": "end-to-end"}
PARTS = ("p50", "p95")
ALLOWED = 0.15
SCALE = 1 / 8


def chat(deployment: Deployment, num_requests: int, rate_per_s: float, seed: int) -> Workload:
    rows = generate("chat", num_requests, rate_per_s, seed, SCALE)
    spec = WorkloadSpec(
        num_requests=num_requests, concurrency=None, trace=rows, max_tokens=deployment.context_length, num_warmup=2
    )
    return plan(spec, PromptMaker(deployment.tokenizer), seed)


class ProcessorClock:
    """Processor time of this thread: other processes do not show in it. Idle time is passed over."""

    def __init__(self) -> None:
        self._skipped_s = 0.0

    def now(self) -> float:
        return time.thread_time() + self._skipped_s

    def advance_to(self, time_s: float) -> None:
        self._skipped_s += max(0.0, time_s - self.now())


class WallClock:
    def now(self) -> float:
        return time.monotonic()

    def advance_to(self, time_s: float) -> None:
        time.sleep(max(0.0, time_s - self.now()))


class Clocked:
    """An executor whose steps are told to have taken what `clock` says: a budget learns from that too."""

    def __init__(self, executor: Executor, clock: ProcessorClock | WallClock) -> None:
        self._executor = executor
        self._clock = clock

    def launch(self, plan: StepPlan) -> Finished:
        begin_s = self._clock.now()
        result = self._executor.launch(plan).result()
        return Finished(result._replace(compute_s=self._clock.now() - begin_s))


@dataclass
class Measured:
    """A real engine under the driver of the simulation: it goes step by step, so `until_s` means nothing to it."""

    clock: ProcessorClock | WallClock
    until_s: float = math.inf


def real(deployment: Deployment, workload: Workload, clock: ProcessorClock | WallClock) -> Summary:
    engine = deployment.engine
    engine.clock, executor = clock, engine.executor
    engine.executor = Clocked(executor, clock)
    requests = workload.requests
    replay(engine, Measured(clock), Workload(tuple((request,) for request in workload.warmup), 2))
    replies = replay(engine, Measured(clock), workload)
    engine.executor = executor
    planned = {request.index: (len(request.prompt), request.num_output) for request in requests}
    return summarize([result_of(reply, is_open=True) for reply in replies], planned=planned)


def sim_config(config: ServeConfig, deployment: Deployment) -> SimConfig:
    about = calibration.about(config, deployment)
    return SimConfig(
        groups=calibration.cache_groups_of(about),
        num_blocks=tuple(about["num_blocks"]),
        context_length=deployment.context_length,
        vocab_size=deployment.vocab_size,
        max_running=config.max_running,
        max_step_tokens=config.max_step_tokens,
        max_queue=config.max_queue,
    )


def capacity(config: SimConfig, times: StepTimes) -> float:
    """Requests per second with sixteen always in flight, on the virtual clock."""
    rows = generate("chat", 200, 1.0, 1, SCALE)
    spec = WorkloadSpec(num_requests=200, concurrency=None, trace=rows, max_tokens=config.context_length)
    workload = replace(plan(spec, Numbers(config.vocab_size), 1), concurrency=16)
    return simulate(config, times, workload, Objectives())[0].requests_per_s


def main(
    *,
    load: Annotated[float, typer.Option(help="Share of the machine's capacity, found on the virtual clock.")] = 0.8,
    requests: int = 100,
    seeds: str = "11,12,13",
    threads: int | None = None,
    processor_time: Annotated[
        bool, typer.Option("--processor-time", help="Count the engine's processor time, on one thread.")
    ] = False,
    write: bool = False,
) -> None:
    console = Console()
    machine = inspect_machine()
    config = ServeConfig(threads=1 if processor_time else threads)
    deployment = build(config)
    settle_interpreter()
    engine, timer = deployment.engine, time.thread_time if processor_time else time.perf_counter
    sim = sim_config(config, deployment)

    def calibrate(seed: int) -> list[calibration.Measured]:
        return calibration.measure(engine, deployment.vocab_size, rounds=1, seed=seed, timer=timer)

    before = calibrate(0)
    rate = load * capacity(sim, calibration.fit(before))
    rows: list[tuple[str, ...]] = []
    ratios: dict[str, list[float]] = {}
    for number, seed in enumerate(map(int, seeds.split(",")), 1):
        workload = chat(deployment, requests, rate, seed)
        measured = real(deployment, workload, ProcessorClock() if processor_time else WallClock())
        after = calibrate(number)
        times = calibration.fit([*before, *after])
        simulated, _ = simulate(sim, times, workload, Objectives())
        before = after
        flats = flatten(measured), flatten(simulated)
        for key, title in FIGURES.items():
            for part in PARTS:
                a, b = (flat[f"{key}.{part}"] for flat in flats)
                ratios.setdefault(f"{title} {part.upper()}", []).append(b / a)
                rows.append((str(seed), f"{title} {part.upper()}", f"{a:.1f}", f"{b:.1f}", f"{b / a:.2f}"))
        for name, summary in (("real", measured), ("simulated", simulated)):
            console.print(f"seed {seed}, {name}: {summary.requests_per_s:.2f} requests/s, errors {summary.num_errors}")
    for name, found in ratios.items():
        middle = statistics.median(found)
        verdict = "" if abs(middle - 1) <= ALLOWED else " **over**"
        rows.append(("median", name, "", "", f"{middle:.2f}{verdict}"))
    text = table(("seed", "", "real, ms", "simulated, ms", "ratio"), rows)
    console.print(text)
    if write:
        options = f"--load {load:g} --requests {requests} --seeds {seeds}"
        options += " --processor-time" if processor_time else f" --threads {threads}" if threads else ""
        clock = (
            "Times are processor time of the engine's thread (one native thread), for other work was running."
            if processor_time
            else "Times are the clock's on the wall."
        )
        body = (
            "## The virtual clock beside the real engine\n\n"
            f"Made by `python -m benchmarks.virtual_clock {options} --write`: SmolLM2-135M-Instruct Q4_1, the chat "
            f"workload scaled 1/8, {rate:.2f} requests per second ({load:g} of capacity). {clock} Aim: within "
            f"{100 * ALLOWED:.0f} %.\n\n{machine_text(asdict(machine))}\n\n{text}"
        )
        PAGE.write_text(replace_section(PAGE.read_text("utf-8"), "virtual-clock", body), "utf-8")


if __name__ == "__main__":
    typer.run(main)
