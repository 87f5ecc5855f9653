"""Fairness: how far two backlogged tenants are apart, one of whom sends ten times as much."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmarks.peers.report import table
from benchmarks.policies.backlogged import Service, gaps, serve_backlogged
from benchmarks.policies.lab import SIM, Plot, Progress, Section, scheduled, times
from headrace.engine.ledger import GENERATED_WORK, PROMPT_WORK
from headrace.sim.build import build_sim

POOL_TOKENS = 4000
LONGEST_PROMPT, LONGEST_REPLY = 256, 128
BACKLOGS = {"heavy": 100, "light": 10}
NUM_STEPS = 6000
NUM_POINTS = 150
BOUND = 2 * max(PROMPT_WORK * LONGEST_PROMPT, GENERATED_WORK * POOL_TOKENS)
HEADS = ("largest difference", "of the bound", "light tenant's share", "weighted tokens/s", "preemptions")


def cells(apart: float, served: Service, took_s: float, preemptions: int) -> tuple[str, ...]:
    """Parallel to `HEADS`. `apart`: how far the tenants were at most; `served`: what each got in all."""
    total = sum(served.values())
    share = served["light"] / total
    return (f"{apart:,.0f}", f"{apart / BOUND:.2f}", f"{share:.2f}", f"{total / took_s:,.0f}", f"{preemptions:,}")


def measure(traces: Path, progress: Progress) -> Section:
    (group,) = SIM.groups
    pool = replace(SIM, num_blocks=(POOL_TOKENS // group.block_size,), max_running=128, jumps=False)
    curves, lines = {}, []
    for policy in ("fair", "fcfs"):
        progress(policy)
        engine, executor = build_sim(replace(pool, scheduling=scheduled(policy)), times())
        at: list[float] = []
        clock = executor.clock
        history = serve_backlogged(
            engine,
            BACKLOGS,
            NUM_STEPS,
            longest_prompt=LONGEST_PROMPT,
            longest_reply=LONGEST_REPLY,
            each_step=lambda served, at=at, clock=clock: at.append(clock.now()),
        )
        apart = gaps(history, dict.fromkeys(BACKLOGS, 1.0))
        lines.append((policy, *cells(max(apart), history[-1], at[-1], engine.stats().preemptions)))
        stride = NUM_STEPS // NUM_POINTS
        curves[policy] = (at[::stride], apart[::stride])
    body = (
        "### Fairness\n\n"
        f"A cache of {POOL_TOKENS:,} tokens and two tenants who never stop waiting, one with ten times the backlog of "
        f"the other ({BACKLOGS['heavy']} and {BACKLOGS['light']} requests); prompts of 5 to {LONGEST_PROMPT} tokens, "
        f"replies of 2 to {LONGEST_REPLY}, {NUM_STEPS:,} steps. The difference of what they were served, in weighted "
        f"tokens (prompt x {PROMPT_WORK:g} + generated x {GENERATED_WORK:g}); the bound of the paper, "
        f"2 max(w_p L_in, w_q M), is {BOUND:,.0f}.\n\n{table(('policy', *HEADS), lines)}"
    )
    plot = Plot(
        "policies-fairness",
        "two backlogged tenants, one sending ten times as much",
        "time, s",
        "difference, weighted tokens",
        curves,
        {"bound": BOUND},
        log_y=True,
    )
    return Section(body, (plot,))
