"""Shortest first: the mean time to completion on the conversation trace, and what errors of predictions cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from benchmarks.peers.report import table
from benchmarks.policies.lab import (
    SIM,
    Figures,
    Plot,
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
from headrace.engine.ledger import GENERATED_WORK, PROMPT_WORK
from headrace.sim.traces import TraceRow

LOAD = 0.9
MAX_RUNNING = 16
NUM_STRETCHES = 5
"""Of the trace, one after the other: what one of them says of a policy hangs on its few longest replies."""
SIGMAS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
WORKLOADS = {"prompts as recorded": (3000, 1.0), "prompts cut to an eighth": (1500, 1 / 8)}
"""Requests, and what is left of prompts: by service units they are most of the work, and known to everybody."""


def measure(traces: Path, progress: Progress) -> Section:
    path = traces / "azure_llm_2023_conv.csv"
    body = (
        "### Shortest first, and what errors of predictions cost\n\n"
        f"Azure conversation, {LOAD:g} of capacity, at most {MAX_RUNNING} running, lengths of replies hidden from the "
        f"engine; {NUM_STRETCHES} stretches of the trace, each at its own capacity, counted together. Sigma: of the "
        "log-normal factor on the oracle's predictions. End-to-end latency in seconds. Theory: "
        "srpt (oracle) <= sjf (oracle) <= fcfs, and srpt worse with its noise.\n"
    )
    plots = []
    for number, (name, (num_requests, kept)) in enumerate(WORKLOADS.items()):
        stretches = [
            tuple(replace(row, num_prompt=max(1, round(row.num_prompt * kept))) for row in trace(path, num_requests, n))
            for n in range(NUM_STRETCHES)
        ]
        text, plot = _compare(name, stretches, f"policies-noise-{number + 1}", progress)
        body += text
        plots.append(plot)
    return Section(body, tuple(plots))


def _compare(title: str, stretches: Sequence[tuple[TraceRow, ...]], file: str, progress: Progress) -> tuple[str, Plot]:
    sim = replace(SIM, max_running=MAX_RUNNING)
    progress(f"{title}, capacity")
    rates = [LOAD * capacity(sim, rows) for rows in stretches]
    workloads = [at_rate(rows, rate) for rows, rate in zip(stretches, rates, strict=True)]
    configs = {
        "fcfs": scheduled("fcfs"),
        "mlfq": scheduled("mlfq"),
        "sjf, oracle": scheduled("sjf", predictor="oracle"),
    }
    configs |= {noisy(s): scheduled("srpt", predictor="oracle", predictor_sigma=s) for s in SIGMAS}
    configs["srpt, history"] = scheduled("srpt", predictor="history")
    found: dict[str, Figures] = {}
    for name, config in configs.items():
        progress(f"{title}, {name}")
        runs = [figures(replace(sim, scheduling=config), workload, hidden=True) for workload in workloads]
        found[name] = Figures.of_all(runs)
    first = found["fcfs"].mean
    lines = [
        (
            name,
            seconds(one.mean),
            f"{one.mean / first:.2f}",
            *(seconds(percentile(one.latency, p)) for p in (50, 95, 99)),
            *(seconds(percentile(one.ttft, p)) for p in (50, 95)),
            f"{one.preemptions:,}",
        )
        for name, one in found.items()
    ]
    header = ("policy", "mean, s", "of fcfs", "P50", "P95", "P99", "TTFT P50", "TTFT P95", "preemptions")
    means = [found[noisy(sigma)].mean for sigma in SIGMAS]
    oracle, shortest, levels = (found[name].mean for name in (noisy(0.0), "sjf, oracle", "mlfq"))
    as_theory = oracle <= shortest <= first and all(a <= b for a, b in pairwise(means))
    num_prompt, num_output = (
        sum(getattr(row, name) for rows in stretches for row in rows) for name in ("num_prompt", "num_output")
    )
    share = GENERATED_WORK * num_output / (PROMPT_WORK * num_prompt + GENERATED_WORK * num_output)
    text = (
        f"\n**{title.capitalize()}**: {len(stretches)} times {len(stretches[0]):,} requests, {min(rates):.2f} to "
        f"{max(rates):.2f} per second; replies are "
        f"{100 * share:.0f} % of the work.\n\n{table(header, lines)}\n"
        f"The order of theory {'came out' if as_theory else 'did not come out in all places'}: srpt {oracle:.3f}, sjf "
        f"{shortest:.3f}, fcfs {first:.3f} s; srpt by sigma {', '.join(f'{mean:.2f}' for mean in means)}. srpt stops "
        f"paying against fcfs {crossing(SIGMAS, means, first)}, against mlfq, which predicts nothing, "
        f"{crossing(SIGMAS, means, levels)}.\n"
    )
    flat = {"fcfs": first, "mlfq": levels, "oracle": oracle, "history": found["srpt, history"].mean}
    return text, Plot(file, title, "sigma of the predictions", "mean latency, s", {"srpt": (SIGMAS, means)}, flat)


def noisy(sigma: float) -> str:
    return f"srpt, oracle, sigma {sigma:g}" if sigma else "srpt, oracle"


def crossing(xs: tuple[float, ...], ys: list[float], level: float) -> str:
    """Where the line first comes over the level."""
    for i, y in enumerate(ys):
        if y > level:
            if not i:
                return "at no sigma"
            share = (level - ys[i - 1]) / (y - ys[i - 1])
            return f"at sigma {xs[i - 1] + share * (xs[i] - xs[i - 1]):.1f}"
    return f"not up to sigma {xs[-1]:g}"
