"""`headrace bench`. Only the options are read when the command line is; all else is imported when the command runs."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.bench.options import (
    GeneratedWorkload,
    LengthScale,
    OutputTokens,
    Prefixes,
    PrefixTokens,
    PromptTokens,
    Rate,
    Requests,
    SloTpot,
    SloTtft,
    Think,
    Trace,
    Turns,
    TurnTokens,
    Zipf,
)
from headrace.models.catalogue import DEFAULT_MODEL

if TYPE_CHECKING:
    from headrace.bench.presets import Point
    from headrace.bench.prompts import PromptMaker
    from headrace.bench.session import Progress
    from headrace.bench.targets import Target


def bench(
    *,
    url: Annotated[
        list[str] | None, typer.Option(help="An OpenAI-compatible server, as URL or NAME=URL; again for another.")
    ] = None,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="Measure the engine in this process (the default without --url).")
    ] = False,
    model: Annotated[str, typer.Option("--model", "-m", help="In process: what to load.")] = DEFAULT_MODEL,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="In process: FIELD=VALUE of ServeConfig, such as block_size=32.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="The model whose tokenizer makes the prompts. Default: --model.")
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="A load of the tables: prompt, decode, http-128-64 or shared-prefix.")
    ] = None,
    requests: Requests = None,
    prompt_tokens: PromptTokens = 128,
    output_tokens: OutputTokens = 64,
    prefix_tokens: PrefixTokens = 0,
    prefixes: Prefixes = 1,
    turns: Turns = 1,
    turn_tokens: TurnTokens = 32,
    think: Think = 0.0,
    tenants: Annotated[int, typer.Option(min=0, help="Tenants (in process, and as `user` over HTTP).")] = 0,
    zipf: Zipf = 1.1,
    concurrency: Annotated[
        str | None, typer.Option(help="Closed loop: requests in flight, such as 8 or 1,8,16. The default is 1.")
    ] = None,
    rate: Rate = None,
    trace: Trace = None,
    workload: GeneratedWorkload = None,
    time_scale: Annotated[float, typer.Option(help="Of a trace: multiplies times; 0.5 is twice as fast.")] = 1.0,
    length_scale: LengthScale = 1.0,
    warmup: Annotated[int | None, typer.Option(min=0, help="Requests before the first round, not counted.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Times all targets are measured, in turn; medians are told.")] = 1,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.")] = 0,
    endpoint: Annotated[str, typer.Option(help="Of servers: completions or chat.")] = "completions",
    prompt_as: Annotated[
        str, typer.Option(help="To completions: tokens, text, or auto (what is counted right).")
    ] = "auto",
    model_name: Annotated[str | None, typer.Option(help="Sent to servers. Default: the first they list.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="HEADRACE_BENCH_API_KEY", help="Sent to servers.")] = None,
    extra: Annotated[
        list[str] | None,
        typer.Option(help="JSON object with more fields of request bodies, for one target: NAME=JSON."),
    ] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Ask servers for all --output-tokens.")] = True,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for one reply.")] = 600.0,
    slo_ttft_ms: SloTtft = None,
    slo_tpot_ms: SloTpot = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write everything here; - for standard output.")
    ] = None,
    record: Annotated[Path | None, typer.Option(help="Keep the servers' raw streams here (JSONL).")] = None,
    allow_errors: Annotated[bool, typer.Option("--allow-errors", help="Exit with 0 even if requests failed.")] = False,
    machine: Annotated[bool, typer.Option(help="Measure the limits of this machine first.")] = True,
) -> None:
    """Measure latency and throughput, in process or of servers; several targets are measured in turns.

    Exits with 1 when requests failed.
    """
    given = dict(locals())
    from headrace.cli import friendly_errors  # noqa: PLC0415

    with friendly_errors():
        _bench(given)


def _bench(given: Mapping[str, Any]) -> None:
    from rich.console import Console  # noqa: PLC0415

    from headrace.bench.machine import inspect_machine  # noqa: PLC0415
    from headrace.bench.report import Objectives  # noqa: PLC0415
    from headrace.bench.session import BenchOptions, run_bench  # noqa: PLC0415
    from headrace.bench.tables import print_report  # noqa: PLC0415

    points = points_of(given)
    maker = _prompt_maker(given["tokenizer"] or given["model"])
    targets = _targets(given, maker)
    options = BenchOptions(
        points, given["rounds"], given["seed"], Objectives(given["slo_ttft_ms"], given["slo_tpot_ms"]), given["record"]
    )
    machine = inspect_machine(given["machine"])  # before a model takes the memory it reads
    with progress_bar() as progress:
        report = run_bench(targets, maker, options, machine, progress)
    json_file = given["json_file"]
    to_stdout = json_file is not None and str(json_file) == "-"
    print_report(report, Console(stderr=to_stdout))
    if json_file is not None:
        text = json.dumps(report.document(), indent=2) + "\n"
        if to_stdout:
            sys.stdout.write(text)
        else:
            json_file.write_text(text, "utf-8")
    if report.num_errors and not given["allow_errors"]:
        raise typer.Exit(1)


def points_of(given: Mapping[str, Any]) -> list[Point]:
    """The loads asked for: a preset, or one per concurrency or rate, or a trace."""
    from dataclasses import replace  # noqa: PLC0415

    from headrace.bench.presets import PRESETS, Point  # noqa: PLC0415
    from headrace.core.errors import ConfigurationError  # noqa: PLC0415
    from headrace.sim.traces import read_trace  # noqa: PLC0415
    from headrace.sim.workload import WorkloadSpec  # noqa: PLC0415

    drivers = [name for name in ("concurrency", "rate", "trace") if given[name] is not None]
    if len(drivers) > 1:
        raise ConfigurationError(f"--{drivers[0]} and --{drivers[1]} are two ways to send requests; give one.")
    changes = {"num_requests": given["requests"], "num_warmup": given["warmup"]}
    changes = {name: value for name, value in changes.items() if value is not None}
    if given["preset"] is not None:
        if given["preset"] not in PRESETS:
            raise ConfigurationError(f"there is no preset {given['preset']!r}; there are {', '.join(PRESETS)}.")
        if drivers and drivers != ["concurrency"]:
            raise ConfigurationError(f"a preset has its own load; leave --{drivers[0]} out.")
        points = PRESETS[given["preset"]]()
        if drivers:
            wanted = _numbers(given["concurrency"], "concurrency", int)
            points = [p for p in points if p.spec.concurrency in wanted]
            if not points:
                raise ConfigurationError(f"preset {given['preset']} has no load with concurrency {wanted}.")
        return [Point(point.name, replace(point.spec, **changes)) for point in points]
    lengths = {
        "num_prompt": given["prompt_tokens"],
        "num_output": given["output_tokens"],
        "num_prefix": given["prefix_tokens"],
        "num_prefixes": given["prefixes"],
        "num_turns": given["turns"],
        "num_turn": given["turn_tokens"],
        "think_s": given["think"],
        "num_tenants": given["tenants"],
        "zipf": given["zipf"],
        **changes,
    }
    if given["trace"] is not None:
        rows = read_trace(given["trace"], time_scale=given["time_scale"], length_scale=given["length_scale"])
        lengths.setdefault("num_requests", len(rows))
        return [Point(given["trace"].stem, WorkloadSpec(**lengths, concurrency=None, trace=rows))]
    name = f"{given['prompt_tokens']}+{given['output_tokens']}"
    if given["workload"] is not None:
        return _generated(given, lengths)
    if given["rate"] is not None:
        return [
            Point(f"{name} {rate:g}/s", WorkloadSpec(**lengths, concurrency=None, rate_per_s=rate))
            for rate in _numbers(given["rate"], "rate", float)
        ]
    return [
        Point(f"{name} c{count}", WorkloadSpec(**lengths, concurrency=count))
        for count in _numbers(given["concurrency"] or "1", "concurrency", int)
    ]


def _generated(given: Mapping[str, Any], lengths: dict[str, Any]) -> list[Point]:
    from headrace.bench.presets import Point  # noqa: PLC0415
    from headrace.core.errors import ConfigurationError  # noqa: PLC0415
    from headrace.sim.generators import generate  # noqa: PLC0415
    from headrace.sim.workload import WorkloadSpec  # noqa: PLC0415

    if given["rate"] is None:
        raise ConfigurationError("--workload needs --rate, in requests per second.")
    lengths.setdefault("num_requests", 500)
    points = []
    for rate in _numbers(given["rate"], "rate", float):
        rows = generate(given["workload"], lengths["num_requests"], rate, given["seed"], given["length_scale"])
        points.append(Point(f"{given['workload']} {rate:g}/s", WorkloadSpec(**lengths, concurrency=None, trace=rows)))
    return points


def _numbers(text: str, name: str, kind: type[int] | type[float]) -> list[Any]:
    from headrace.core.errors import ConfigurationError  # noqa: PLC0415

    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise ConfigurationError(f"--{name} is {text!r}; write a number, or several with commas.") from None


def _prompt_maker(model: str) -> PromptMaker:
    from headrace.bench.prompts import PromptMaker  # noqa: PLC0415
    from headrace.bench.settings import open_tokenizer  # noqa: PLC0415
    from headrace.cli import progress_bars  # noqa: PLC0415

    with progress_bars() as progress:
        return PromptMaker(open_tokenizer(model, progress))


def _targets(given: Mapping[str, Any], maker: PromptMaker) -> list[Target]:
    """In the order: servers as given, then this process."""
    from headrace.bench.http_target import HttpOptions, HttpTarget  # noqa: PLC0415
    from headrace.bench.in_process import InProcessTarget  # noqa: PLC0415
    from headrace.bench.settings import as_json, choice, parse_extra, parse_named_url, serve_config  # noqa: PLC0415
    from headrace.cli import progress_bars  # noqa: PLC0415
    from headrace.server.build import build  # noqa: PLC0415

    named = [parse_named_url(text, i) for i, text in enumerate(given["url"] or ())]
    extra = parse_extra(given["extra"] or (), [name for name, _ in named])
    targets: list[Target] = []
    for name, url in named:
        options = HttpOptions(
            endpoint=choice("--endpoint", given["endpoint"], ("completions", "chat")),
            prompt_as=choice("--prompt-as", given["prompt_as"], ("auto", "tokens", "text")),
            model=given["model_name"],
            api_key=given["api_key"],
            ignore_eos=given["ignore_eos"],
            extra=extra[name],
            timeout_s=given["timeout"],
            record=given["record"] is not None,
        )
        targets.append(HttpTarget(name, url, maker, options))
    if given["in_process"] or not named:
        config = serve_config(given["model"], given["setting"] or ())

        def load() -> Any:
            with progress_bars() as progress:
                return build(config, progress)

        targets.append(InProcessTarget("in process", load, {"config": as_json(config)}))
    return targets


@contextlib.contextmanager
def progress_bar() -> Iterator[Progress]:
    """Requests done, per load, on standard error."""
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn  # noqa: PLC0415
    from rich.progress import Progress as Bars  # noqa: PLC0415

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    tasks: dict[str, TaskID] = {}
    # Twice a second: drawing must not be what is measured.
    with Bars(*columns, console=Console(stderr=True), refresh_per_second=2) as bars:

        def report(num_done: int, num_total: int, what: str) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=num_total)
            bars.update(tasks[what], completed=num_done)

        yield report
