"""A reply streams while long prompts keep arriving: how long it stands still, and what that costs the prompts.

`python -m benchmarks.stall` prints it; `--write` also puts it into the section `stall` of docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from benchmarks.peers.report import replace_section, table
from headrace.conformance.threads import stolen_seconds
from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.engine.budget import FixedBudget, PacedBudget, TokenBudget
from headrace.engine.composition import SchedulingConfig, make_gates
from headrace.engine.costs import StepCosts
from headrace.engine.engine import Engine
from headrace.server.build import ServeConfig, build

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
PROMPT, MAX_STEP, MAX_RUNNING = 4000, 4096, 8
VICTIM_TOKENS = 7000
WARM_UP = 30
"""Tokens that the reply has to itself."""
TARGET_S = 0.04


@dataclass
class Variant:
    name: str
    budget: Callable[[StepCosts], TokenBudget]
    batching: str = "continuous"
    gaps_s: list[float] = field(default_factory=list)
    alone_s: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    """Prompt tokens a second, one of each round."""

    def gap_s(self, share: float) -> float:
        ordered = sorted(self.gaps_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def measure(engine: Engine, variant: Variant, seconds: float, draw: random.Random, vocab_size: int) -> None:
    """One round. A prompt always waits behind the one that is read."""
    engine.scheduler.budget = variant.budget(engine.scheduler.state.ledger.costs)
    engine.scheduler.gates = make_gates(SchedulingConfig(batching=variant.batching), MAX_RUNNING)
    number = draw.getrandbits(60)
    engine.submit(Request(f"victim {number}", (1, 2, 3, number % 997), SamplingParams(max_tokens=VICTIM_TOKENS)))
    last_s = time.perf_counter()
    for index in range(WARM_UP):
        engine.step()
        now_s = time.perf_counter()
        if index:
            variant.alone_s.append(now_s - last_s)
        last_s = now_s
    num_sent = 0
    computed = engine.stats().computed_tokens
    num_streamed, begin_s = 0, last_s
    while (now_s := time.perf_counter()) - begin_s < seconds:
        if not engine.stats().num_waiting:
            prompt = tuple(draw.choices(range(vocab_size), k=PROMPT))
            engine.submit(Request(f"{number} {num_sent}", prompt, SamplingParams(max_tokens=1)))
            num_sent += 1
        for event in engine.step():
            if event.request_id.startswith("victim") and event.tokens:
                now_s = time.perf_counter()
                variant.gaps_s.append(now_s - last_s)
                last_s = now_s
                num_streamed += 1
    elapsed_s = time.perf_counter() - begin_s
    variant.gaps_s.append(
        begin_s + elapsed_s - last_s
    )  # the last one is cut short: a stream that stood still has it only
    variant.rates.append((engine.stats().computed_tokens - computed - num_streamed) / elapsed_s)
    engine.abort(f"victim {number}")
    for index in range(num_sent):
        engine.abort(f"{number} {index}")
    while engine.has_work:
        engine.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each variant and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    options = parser.parse_args()
    console = Console(stderr=True)
    with console.status("loading"):
        deployment = build(ServeConfig(kv_memory_bytes=1 << 30, max_running=MAX_RUNNING, max_step_tokens=MAX_STEP))
    variants = [
        Variant(f"paced, {1e3 * TARGET_S:.0f} ms", lambda costs: PacedBudget(MAX_STEP, costs, TARGET_S)),
        Variant(f"paced, {PacedBudget.STRETCH:g}x", lambda costs: PacedBudget(MAX_STEP, costs)),
        Variant("unlimited", lambda costs: FixedBudget(MAX_STEP)),
        Variant("prefill first", lambda costs: FixedBudget(MAX_STEP), "two-queues"),
    ]
    draw, loads, begin_s, stolen_s = random.Random(0), [], time.perf_counter(), stolen_seconds()
    for _ in range(options.rounds):
        for variant in variants:
            loads.append(os.getloadavg()[0])
            measure(deployment.engine, variant, options.seconds, draw, deployment.vocab_size)
            console.print(f"{variant.name}: P99 {1e3 * variant.gap_s(0.99):.0f} ms, {variant.rates[-1]:.0f} tokens/s")
    share = (stolen_seconds() - stolen_s) / (time.perf_counter() - begin_s) / (os.cpu_count() or 1)
    body = report(variants, options.rounds, options.seconds, loads, share)
    print(body)
    if options.write:
        PAGE.write_text(replace_section(PAGE.read_text("utf-8"), "stall", body), "utf-8")


def report(variants: list[Variant], num_rounds: int, seconds: float, loads: list[float], stolen_share: float) -> str:
    unlimited = statistics.median(next(v for v in variants if v.name == "unlimited").rates)
    rows = []
    for variant in variants:
        p50, p99, most = variant.gap_s(0.5), variant.gap_s(0.99), max(variant.gaps_s)
        rate = statistics.median(variant.rates)
        rows.append(
            (
                variant.name,
                f"{1e3 * p50:.0f}",
                f"{1e3 * p99:.0f} ({p99 / TARGET_S:.2f}x)",
                f"{1e3 * most:.0f} ({most / TARGET_S:.2f}x)",
                f"{p99 / statistics.median(variant.alone_s):.1f}x",
                f"{rate:.0f} ({rate / unlimited:.2f}x)",
            )
        )
    heads = ("", "gap P50, ms", "P99 (of 40 ms)", "largest", "P99 of a gap alone", "prompt tokens/s (of unlimited)")
    return (
        "## A stream beside long prompts\n\n"
        f"Made by `python -m benchmarks.stall` on {time.strftime('%Y-%m-%d')}: SmolLM2-135M-Instruct Q4_1 in process, "
        f"one reply streams while prompts of {PROMPT} tokens keep arriving, {seconds:.0f} s of each, {num_rounds} "
        f"round{'s' if num_rounds > 1 else ''} in turn; load of the machine {min(loads):.1f} to {max(loads):.1f}, "
        f"{100 * stolen_share:.1f} % of its processor time taken by its host. "
        f"Wanted: P99 at most 1.25x the target, the largest gap at most 2x, prompts at least 0.80x of unlimited."
        f"\n\n{table(heads, rows)}"
    )


if __name__ == "__main__":
    main()
