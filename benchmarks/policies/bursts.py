"""Bursts: how long short requests stand behind long ones, on the code trace with the arrivals it was recorded with."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

from benchmarks.peers.report import table
from benchmarks.policies.lab import (
    SIM,
    Progress,
    Section,
    at_rate,
    capacity,
    figures,
    percentile,
    scheduled,
    seconds,
    trace,
)

LOADS = (0.2, 0.5)
NUM_REQUESTS = 3000
MAX_RUNNING = 16


def measure(traces: Path, progress: Progress) -> Section:
    rows = trace(traces / "azure_llm_2023_code.csv", NUM_REQUESTS)
    sim = replace(SIM, max_running=MAX_RUNNING)
    full = capacity(sim, rows)
    progress("alone")
    alone = figures(sim, replace(at_rate(rows, full), concurrency=1), hidden=True).latency
    configs = {
        "fcfs": scheduled("fcfs"),
        "mlfq": scheduled("mlfq"),
        "srpt, oracle": scheduled("srpt", predictor="oracle"),
    }
    lines = []
    for load, (name, config) in product(LOADS, configs.items()):
        progress(f"load {load:g}, {name}")
        one = figures(replace(sim, scheduling=config), at_rate(rows, load * full), hidden=True)
        slowdowns = [took / least for took, least in zip(one.latency, alone, strict=True)]
        lines.append(
            (
                f"{load:g}",
                name,
                *(seconds(percentile(one.ttft, p)) for p in (50, 95, 99)),
                f"{sum(slowdowns) / len(slowdowns):.1f}",
                *(f"{percentile(slowdowns, p):.1f}" for p in (50, 99)),
                seconds(one.mean),
                f"{one.preemptions:,}",
            )
        )
    header = (
        "load",
        "policy",
        "TTFT P50, s",
        "P95",
        "P99",
        "mean slowdown",
        "P50",
        "P99",
        "mean latency, s",
        "preemptions",
    )
    body = (
        "### Head-of-line blocking in bursts\n\n"
        f"Azure code, the first {NUM_REQUESTS:,} requests with the bursts they came in, loads as shares of "
        f"the capacity of {full:.2f} requests per second in the mean, at most {MAX_RUNNING} running, lengths hidden. "
        f"Slowdown: end-to-end latency over that of the same request alone.\n\n{table(header, lines, 2)}"
    )
    return Section(body)
