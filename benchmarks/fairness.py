"""Fairness on the real engine: two backlogged tenants, one of whom sends ten times as much.

    python -m benchmarks.fairness [--bounds 50] [--threads N] [--write]

The load of `benchmarks.policies.fairness`, which has it on a virtual clock, on the native backend with SmolLM2 and a
cache of as many tokens, until they have been served so many times the bound. Counted in tokens, so a machine's other
work does not change it: ten minutes a policy. `--write` puts the table into docs/benchmarks.md.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from benchmarks.peers.report import replace_section, table
from benchmarks.policies.backlogged import gaps, serve_backlogged
from benchmarks.policies.fairness import BACKLOGS, BOUND, HEADS, LONGEST_PROMPT, LONGEST_REPLY, POOL_TOKENS, cells
from headrace.engine.composition import SchedulingConfig
from headrace.server.build import ServeConfig, build

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
BYTES_PER_TOKEN = 30 * 2 * 192 * 2
"""Of SmolLM2-135M in f16: layers, keys and values, 3 heads of 64."""


def main(
    bounds: float = 50, threads: int | None = None, write: Annotated[bool, typer.Option("--write")] = False
) -> None:
    rows = []
    with Progress() as progress:
        for policy in ("fair", "fcfs"):
            task = progress.add_task(policy, total=bounds * BOUND)
            config = ServeConfig(
                kv_memory_bytes=POOL_TOKENS * BYTES_PER_TOKEN,
                context_length=512,
                threads=threads,
                scheduling=SchedulingConfig(policy=policy),
            )
            engine = build(config).engine
            capacity = engine.scheduler.state.memory.groups[0].pool.num_blocks * config.block_size
            begin_s = time.perf_counter()
            history = serve_backlogged(
                engine,
                BACKLOGS,
                least_service=bounds * BOUND,
                longest_prompt=LONGEST_PROMPT,
                longest_reply=LONGEST_REPLY,
                each_step=lambda served, task=task: progress.update(task, completed=sum(served.values())),
            )
            took_s = time.perf_counter() - begin_s
            served = sum(history[-1].values()) / BOUND
            apart = max(gaps(history, dict.fromkeys(BACKLOGS, 1.0)))
            figures = cells(apart, history[-1], took_s, engine.stats().preemptions)
            rows.append((policy, f"{capacity:,}", f"{served:.1f}", *figures))
    heads = ("policy", "cache, tokens", "served, bounds", *HEADS)
    options = f"--bounds {bounds:g}" + (f" --threads {threads}" if threads else "")
    body = (
        "## Fairness on the real engine\n\n"
        f"Made by `python -m benchmarks.fairness {options} --write` on {time.strftime('%Y-%m-%d')}: "
        f"SmolLM2-135M-Instruct Q4_1, two tenants who never stop waiting ({BACKLOGS['heavy']} and {BACKLOGS['light']} "
        f"requests), prompts of 5 to {LONGEST_PROMPT} tokens, replies of 2 to {LONGEST_REPLY}. Weighted tokens; the "
        f"bound, 2 max(w_p L_in, w_q M), is {BOUND:,.0f}.\n\n{table(heads, rows)}"
    )
    print(body)
    if write:
        PAGE.write_text(replace_section(PAGE.read_text("utf-8"), "fairness", body), "utf-8")


if __name__ == "__main__":
    typer.run(main)
