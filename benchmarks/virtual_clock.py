"""The virtual clock beside the real engine, on the chat workload.

    python -m benchmarks.virtual_clock [--rate 3] [--requests 100] [--seeds 11,12,13] [--threads N] [--write]

For each seed: steps are calibrated, the workload runs on the real engine (in process, native backend), steps are
calibrated again, and the same requests run on the virtual clock with the cost model of these two calibrations. The
workload's own steps are in no fit. A machine with other work changes from minute to minute: that is what calibrating on
both sides is for. `--write` puts the table into docs/benchmarks.md.
"""

from __future__ import annotations

import asyncio
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.peers.report import machine_text, replace_section, table
from headrace.bench import calibration
from headrace.bench.in_process import InProcessTarget
from headrace.bench.machine import inspect_machine
from headrace.bench.prompts import PromptMaker
from headrace.bench.report import Objectives, Summary, flatten
from headrace.bench.runner import run_once, warm_up
from headrace.bench.simulation import policy_named, simulate
from headrace.server.build import Deployment, ServeConfig, build
from headrace.server.serve import settle_interpreter
from headrace.sim.build import SimConfig
from headrace.sim.generators import generate
from headrace.sim.workload import Workload, WorkloadSpec, plan

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


async def real(deployment: Deployment, workload: Workload) -> Summary:
    target = InProcessTarget("real", lambda: deployment)
    await target.open()
    try:
        await warm_up(target, workload)
        return (await run_once(target, workload, 0, Objectives())).summary
    finally:
        await target.close()


def one_seed(config: ServeConfig, num_requests: int, rate_per_s: float, seed: int) -> tuple[Summary, Summary]:
    """(real, simulated)."""
    deployment = build(config)
    workload = chat(deployment, num_requests, rate_per_s, seed)

    def calibrate(round_seed: int) -> list[calibration.Measured]:
        engine, size = deployment.engine, deployment.vocab_size
        return calibration.measure(engine, size, 1, round_seed, lambda num_done, num_total, what: None)

    steps = calibrate(2 * seed)
    measured = asyncio.run(real(deployment, workload))
    steps += calibrate(2 * seed + 1)
    about = calibration.about(config, deployment)
    simulated, _ = simulate(
        SimConfig(
            groups=calibration.cache_groups_of(about),
            num_blocks=tuple(about["num_blocks"]),
            context_length=deployment.context_length,
            vocab_size=deployment.vocab_size,
            max_running=config.max_running,
            max_step_tokens=config.max_step_tokens,
            max_queue=config.max_queue,
        ),
        calibration.fit(steps),
        workload,
        Objectives(),
        policy_named("fair"),
    )
    return measured, simulated


def main(
    rate: Annotated[float, typer.Option(help="Requests per second: 0.8 of what the machine can do.")] = 3.0,
    requests: int = 100,
    seeds: str = "11,12,13",
    threads: int | None = None,
    write: bool = False,
) -> None:
    console = Console()
    machine = inspect_machine()
    settle_interpreter()
    config = ServeConfig(threads=threads)
    rows: list[tuple[str, ...]] = []
    ratios: dict[str, list[float]] = {}
    for seed in map(int, seeds.split(",")):
        measured, simulated = one_seed(config, requests, rate, seed)
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
        head = (
            f"Made by `python -m benchmarks.virtual_clock --rate {rate:g} --requests {requests} --seeds {seeds}"
            f"{f' --threads {threads}' if threads else ''} --write`: SmolLM2-135M-Instruct Q4_1, chat workload, lengths "
            f"scaled 1/8, {rate:g} requests per second. Aim: within {100 * ALLOWED:.0f} %.\n\n{machine_text(asdict(machine))}\n\n"
        )
        body = f"## The virtual clock beside the real engine\n\n{head}{text}"
        PAGE.write_text(replace_section(PAGE.read_text("utf-8"), "virtual-clock", body), "utf-8")


if __name__ == "__main__":
    typer.run(main)
