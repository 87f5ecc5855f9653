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
WORSE = 3.0
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


def measure(traces: Path, progress: Progress) -> Section:
    parts = [_on(machine, progress) for machine in (CORES,)]
    body = (
        "### Batching modes\n\n"
        f"The chat workload, fcfs, at most {SIM.max_running} running, lengths known; loads as shares of "
        "the capacity of continuous batching. Carried: the highest load whose P95 end-to-end latency stays "
        f"under {WORSE:g} times that of continuous batching at load {LOADS[0]:g}. P95 in seconds. A static batch "
        "computes nothing for replies that have ended: it has no padding, and loses only the places.\n\n"
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
    bound = WORSE * found["continuous"][LOADS[0]]
    carried = {mode: carries(mode, bound) for mode in BATCHING}
    lines = [
        (
            mode,
            f"{carried[mode] * full:.2f}",
            f"{carried[mode] / carried['continuous']:.2f}",
            *(f"{latency:.2f}" for latency in found[mode].values()),
        )
        for mode in BATCHING
    ]
    header = ("batching", "carried, req/s", "of continuous", *(f"P95 at {load:g}" for load in LOADS))
    static = carried["static"]
    verdict = (
        f"Continuous batching carries {carried['continuous'] / static:.1f} times what static batching does (asked: 2)."
        if static
        else f"Static batching is over the bound at load {LOADS[0]:g} already."
    )
    body = (
        f"**{machine.name.capitalize()}** ({machine.about}): {machine.num_requests:,} requests, capacity {full:.2f} "
        f"requests per second, bound {bound:.2f} s.\n\n{table(header, lines)}\n{verdict}\n"
    )
    curves = {mode: (LOADS, list(by_load.values())) for mode, by_load in found.items()}
    name = f"policies-batching-{machine.name.replace(' ', '-')}"
    plot = Plot(name, machine.name, "load", "P95 end to end, s", curves, {"bound": bound}, log_y=True)
    return Section(body, (plot,))
