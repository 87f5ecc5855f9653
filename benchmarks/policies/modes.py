"""Batching modes: the latency of each over the load, and the load that each carries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.peers.report import table
from benchmarks.policies.lab import (
    SCALE,
    SIM,
    Plot,
    Progress,
    Section,
    at_rate,
    capacity,
    chat,
    percentile,
    run,
    scheduled,
)
from benchmarks.simulator_speed import COEFFICIENTS
from headrace.engine.composition import BATCHING
from headrace.sim.build import SimConfig

LOADS = (0.05, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95)
WORSE = (2.0, 3.0)
"""Times the P95 of continuous batching at the lowest load: what is still allowed."""
NUM_HALVINGS = 3


@dataclass(frozen=True, slots=True)
class Machine:
    name: str
    about: str
    sim: SimConfig
    coefficients: Sequence[float]
    length_scale: float
    num_requests: int


CORES = Machine("two cores", "SmolLM2 on two cores, lengths scaled", SIM, COEFFICIENTS, SCALE, 400)
ACCELERATOR = Machine(
    "accelerator",
    "7 billion parameters in 16 bits at 1.5 TB/s and 250 TFLOPS, by its roofline: a step reads 13.5 GB",
    replace(SIM, max_step_tokens=2048),
    (0.009, 0.0, 0.0, 0.000054, 0.00002, 0.0003, 0.00035, 0.000002),
    1.0,
    1000,
)


def measure(traces: Path, progress: Progress) -> Section:
    parts = [_on(machine, progress) for machine in (CORES, ACCELERATOR)]
    body = (
        "### Batching modes\n\n"
        f"The chat workload, fcfs, at most {SIM.max_running} running, lengths known; loads as shares of "
        "the capacity of continuous batching. Carried: the highest load whose P95 end-to-end latency stays "
        f"under {' and '.join(f'{worse:g}' for worse in WORSE)} times that of continuous batching at load "
        f"{LOADS[0]:g}, and as a share of what continuous batching carries. P95 in seconds. A static batch computes "
        "nothing for replies that have ended: it has no padding, and loses only the places.\n\n"
    )
    return Section(body + "\n".join(part.body for part in parts), tuple(plot for part in parts for plot in part.plots))


def _on(machine: Machine, progress: Progress) -> Section:
    rows = chat(machine.num_requests, machine.length_scale)
    full = capacity(machine.sim, rows, hidden=False, coefficients=machine.coefficients)

    def p95(mode: str, load: float) -> float:
        """Of the end-to-end latency, in seconds."""
        progress(f"{machine.name}, {mode}, load {load:.2f}")
        sim = replace(machine.sim, scheduling=scheduled(batching=mode))
        workload = at_rate(rows, load * full)
        replies, _ = run(sim, workload, hidden=False, coefficients=machine.coefficients)
        return percentile([reply.token_times_s[-1] - reply.sent_s for reply in replies], 95)

    def carries(mode: str, bound: float) -> float:
        """The highest load within the bound; 0 where the lowest is not."""
        low, high = 0.0, 0.0
        for load, latency in found[mode].items():
            if latency > bound:
                high = load
                break
            low = load
        for _ in range(NUM_HALVINGS if low and high else 0):
            middle = (low + high) / 2
            low, high = (middle, high) if p95(mode, middle) <= bound else (low, middle)
        return low

    found = {mode: {load: p95(mode, load) for load in LOADS} for mode in BATCHING}
    bounds = [worse * found["continuous"][LOADS[0]] for worse in WORSE]
    carried = {mode: [carries(mode, bound) for bound in bounds] for mode in BATCHING}
    lines = [
        (
            mode,
            *(
                f"{load * full:.2f}, {load / best:.2f}x"
                for load, best in zip(loads, carried["continuous"], strict=True)
            ),
            *(f"{latency:.2f}" for latency in found[mode].values()),
        )
        for mode, loads in carried.items()
    ]
    header = (
        "batching",
        *(f"carried within {bound:.2f} s, req/s" for bound in bounds),
        *(f"P95 at {load:g}" for load in LOADS),
    )
    ratios = [
        f"{best / load:.1f}" if load else "any number of"
        for best, load in zip(carried["continuous"], carried["static"], strict=True)
    ]
    verdict = f"Continuous batching carries {' and '.join(ratios)} times what static batching does (asked: 2)."
    body = (
        f"**{machine.name.capitalize()}** ({machine.about}): {machine.num_requests:,} requests, capacity {full:.2f} "
        f"requests per second.\n\n{table(header, lines)}\n{verdict}\n"
    )
    curves = {mode: (LOADS, list(by_load.values())) for mode, by_load in found.items()}
    name = f"policies-batching-{machine.name.replace(' ', '-')}"
    plot = Plot(
        name,
        machine.name,
        "load",
        "P95 end to end, s",
        curves,
        {f"{worse:g} times": bound for worse, bound in zip(WORSE, bounds, strict=True)},
        log_y=True,
    )
    return Section(body, (plot,))
