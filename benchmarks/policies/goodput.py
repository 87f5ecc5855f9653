"""Goodput under overload: requests that keep their objectives, with admission control and without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmarks.peers.report import table
from benchmarks.policies.lab import SIM, Progress, Section, at_rate, capacity, percentile, run, scheduled, tpot, trace

LOAD = 2.0
NUM_REQUESTS = 3000
MAX_RUNNING = 32
TTFT_S, TPOT_S = 2.0, 0.1


def measure(traces: Path, progress: Progress) -> Section:
    rows = trace(traces / "azure_llm_2023_conv.csv", NUM_REQUESTS)
    sim = replace(SIM, max_running=MAX_RUNNING)
    rate = LOAD * capacity(sim, rows)
    workload = at_rate(rows, rate)
    sent_s = rows_s(workload.requests[-1].arrival_s)
    ttft_ms, token_ms = 1e3 * TTFT_S, 1e3 * TPOT_S
    history = {"predictor": "history"}
    configs = {
        "all admitted": (scheduled("fcfs"), False),
        "all admitted, inter-token target": (scheduled("fcfs", inter_token_ms=token_ms), False),
        "admission, lengths known": (scheduled("fcfs", ttft_ms=ttft_ms), False),
        "admission, inter-token target, lengths known": (
            scheduled("fcfs", ttft_ms=ttft_ms, inter_token_ms=token_ms),
            False,
        ),
        "admission, history": (scheduled("fcfs", ttft_ms=ttft_ms, **history), True),
        "admission, inter-token target, history": (
            scheduled("fcfs", ttft_ms=ttft_ms, inter_token_ms=token_ms, **history),
            True,
        ),
        "admission, bound of 256 tokens": (scheduled("fcfs", ttft_ms=ttft_ms), True),
    }
    lines, goodputs = [], {}
    for name, (config, hidden) in configs.items():
        progress(name)
        replies, _ = run(replace(sim, scheduling=config), workload, hidden=hidden)
        served = [reply for reply in replies if reply.error is None]
        first = [reply.token_times_s[0] - reply.sent_s for reply in served]
        later = [tpot(reply) for reply in served]
        good = sum(a <= TTFT_S and b <= TPOT_S for a, b in zip(first, later, strict=True))
        goodputs[name] = good / sent_s
        lines.append(
            (
                name,
                f"{good / sent_s:.2f}",
                f"{good / len(replies):.2f}",
                f"{1 - len(served) / len(replies):.2f}",
                f"{good / len(served):.2f}",
                f"{percentile(first, 95):.2f}",
                f"{1e3 * percentile(later, 95):.0f}",
            )
        )
    header = ("", "goodput, req/s", "good of all", "refused", "good of served", "TTFT P95, s", "TPOT P95, ms")
    without = max(goodputs[name] for name in configs if name.startswith("all"))
    known, learnt = (max(goodputs[n] for n in configs if n.endswith(end)) for end in ("known", "history"))
    body = (
        "### Goodput with admission control\n\n"
        f"Azure conversation, the first {NUM_REQUESTS:,} requests at {LOAD:g} times capacity ({rate:.2f} requests per "
        f"second), fcfs, at most {MAX_RUNNING} running. Good: the first token within {TTFT_S:g} s and at most "
        f"{1e3 * TPOT_S:g} ms per token after it; goodput counts good requests per second in which requests came, so "
        f"that the time a queue takes to drain counts against nobody.\n\n{table(header, lines)}\n"
        f"Against the better one without: {times(known, without)} with lengths known, {times(learnt, without)} with "
        "predictions from history (asked: 1.5).\n"
    )
    return Section(body)


def rows_s(last_s: float | None) -> float:
    assert last_s is not None, "a trace is an open loop"
    return last_s


def times(with_it: float, without: float) -> str:
    return f"{with_it / without:.1f} times" if without else f"{with_it:.2f} requests per second for none"
