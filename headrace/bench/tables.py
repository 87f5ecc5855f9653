"""A report on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from headrace.bench.machine import Machine
from headrace.bench.report import medians, ratios
from headrace.bench.session import BenchReport, PointRuns

LATENCIES = {
    "ttft_ms": "TTFT",
    "tpot_ms": "TPOT",
    "inter_token_ms": "inter-token",
    "end_to_end_ms": "end-to-end",
}
PEAKS = {
    "read_gb_per_s": "read bandwidth, GB/s",
    "float32_fma_gflops": "float32 FMA, GFLOPS",
    "int8_maddubs_gops": "int8 maddubs + madd + add, GOPS",
    "int8_maddubs_x8_gops": "int8, eight maddubs summed in int16, GOPS",
    "int8_avx_vnni_gops": "int8 AVX-VNNI (256 bits), GOPS",
    "int8_avx512_vnni_gops": "int8 AVX-512 VNNI, GOPS",
}
MIN_WIDTH = 110


def print_report(report: BenchReport, console: Console) -> None:
    if console.width < MIN_WIDTH and not console.is_terminal:
        console.width = MIN_WIDTH
    print_machine(report.machine, console)
    console.print(_throughput(report))
    console.print(_latencies(report))
    for runs in report.points:
        for name, rounds in runs.summaries.items():
            for note in dict.fromkeys(note for summary in rounds for note in summary.notes):
                console.print(f"{runs.point.name}, {name}: {note}.", style="yellow")
    if report.num_errors:
        console.print(_errors(report))


def print_machine(machine: Machine, console: Console) -> None:
    load = "" if machine.load_1m is None else f"; load average {machine.load_1m:.1f} before the run"
    console.print(f"{machine.processor}, {machine.cores} cores ({machine.cores_limited_by}){load}", highlight=False)
    console.print(" ".join(machine.instruction_sets), style="dim", highlight=False)
    if machine.peaks is None:
        console.print(f"Limits of the machine {machine.peaks_missing}.", style="yellow", highlight=False)
        return
    table = Table("limit of the machine", *(_threads(n) for n in machine.peaks["threads"]))
    for name, title in PEAKS.items():
        values = machine.peaks.get(name)
        if values:
            table.add_row(title, *(f"{value:.1f}" for value in values))
    console.print(table)


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def _throughput(report: BenchReport) -> Table:
    rounds = report.options.rounds
    table = Table(title=f"Tokens per second (medians of {rounds})" if rounds > 1 else "Tokens per second")
    table.title_justify = "left"
    has_goodput = report.options.objectives.are_given
    for column in ("load", "target", "output", "prompt", "decoding", "requests/s", "cached", "errors", "ratio"):
        table.add_column(column, justify="left" if column in ("load", "target") else "right")
    if has_goodput:
        table.add_column("goodput/s", justify="right")
    for runs in report.points:
        base = next(iter(runs.summaries.values()))
        for name, summaries in runs.summaries.items():
            middle = medians(summaries)
            num_errors = sum(summary.num_errors for summary in summaries)
            ratio = ratios(summaries, base)
            cells: list[str | Text] = [
                *(_number(middle.get(f"{key}_tokens_per_s")) for key in ("output", "prompt", "decode")),
                _number(middle.get("requests_per_s"), 2),
                _cached(middle),
                Text(str(num_errors), style="bold red" if num_errors else ""),
                "" if summaries is base else _number(ratio.get(_headline(runs)), 2),
            ]
            if has_goodput:
                cells.append(_number(middle.get("goodput_per_s"), 2))
            table.add_row(runs.point.name, name, *cells)
    return table


def _headline(runs: PointRuns) -> str:
    """The figure a load is judged by."""
    return "prompt_tokens_per_s" if runs.point.spec.num_output == 1 else "output_tokens_per_s"


def _cached(middle: Mapping[str, float]) -> str:
    if "cached_tokens" not in middle or not middle.get("prompt_tokens"):
        return "-"
    return f"{100 * middle['cached_tokens'] / middle['prompt_tokens']:.0f} %"


def _latencies(report: BenchReport) -> Table:
    table = Table("load", "target", "milliseconds", title="Latencies", title_justify="left")
    for column in ("mean", "P50", "P95", "P99", "max"):
        table.add_column(column, justify="right")
    for runs in report.points:
        for name, summaries in runs.summaries.items():
            middle = medians(summaries)
            for key, title in LATENCIES.items():
                if f"{key}.mean" in middle:
                    values: list[Any] = [middle[f"{key}.{part}"] for part in ("mean", "p50", "p95", "p99", "max")]
                    table.add_row(runs.point.name, name, title, *(_number(value) for value in values))
    return table


def _errors(report: BenchReport) -> Panel:
    lines = []
    for runs in report.points:
        for name, summaries in runs.summaries.items():
            for kind in dict.fromkeys(kind for summary in summaries for kind in summary.errors):
                count = sum(summary.errors.get(kind, 0) for summary in summaries)
                lines.append(f"{runs.point.name}, {name}: {count} x {kind}")
        lines += [f"    {detail}" for detail in runs.examples.values()]
    return Panel(Text("\n".join(lines)), title=f"{report.num_errors} REQUESTS FAILED", style="bold red", expand=False)


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
