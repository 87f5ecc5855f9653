"""`headrace calibrate` and `headrace simulate`. What they need is imported when they run."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

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

ModelOption = Annotated[str, typer.Option("--model", "-m", help="Catalogue name, file, folder or hub id.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Of the native backend. Default: the usable cores.")]
Isa = Annotated[str, typer.Option(help="Instruction set of the native backend. Default: the best.")]


def calibrate(
    *,
    model: ModelOption = DEFAULT_MODEL,
    threads: Threads = None,
    isa: Isa = "",
    rounds: Annotated[int, typer.Option(min=1, help="Times every kind of step is measured.")] = 2,
    seed: Annotated[int, typer.Option(help="Of the order of the steps, and of their tokens.")] = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to save it. Default: in the user's cache.")
    ] = None,
) -> None:
    """Measure how long the steps of a model take here, and fit the cost model that `headrace simulate` runs on."""
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    from headrace.bench import calibration  # noqa: PLC0415
    from headrace.bench.command import progress_bar  # noqa: PLC0415
    from headrace.cli import friendly_errors, progress_bars  # noqa: PLC0415
    from headrace.core.cost_model import FEATURES  # noqa: PLC0415
    from headrace.server.build import ServeConfig, build  # noqa: PLC0415
    from headrace.server.serve import settle_interpreter  # noqa: PLC0415
    from headrace.server.step_costs import cost_model_path  # noqa: PLC0415

    with friendly_errors():
        config = ServeConfig(model=model, threads=threads, isa=isa)
        with progress_bars() as progress:
            deployment = build(config, progress)
        settle_interpreter()
        with progress_bar() as progress:
            measured = calibration.measure(
                deployment.engine, deployment.vocab_size, rounds=rounds, seed=seed, progress=progress
            )
        fitted = calibration.fit(measured)
        console = Console()
        table = Table("step", "times", "measured, ms", "predicted, ms", "error")
        errors = []
        for row in calibration.table(fitted, measured):
            error = row.predicted_s / row.measured_s - 1
            errors.append(abs(error))
            numbers = (f"{1e3 * row.measured_s:.2f}", f"{1e3 * row.predicted_s:.2f}", f"{100 * error:+.0f} %")
            table.add_row(str(row.load), str(row.num_steps), *numbers)
        console.print(table)
        for name, coefficient in zip(FEATURES, fitted.coefficients, strict=True):
            console.print(f"{1e3 * coefficient:9.4f} ms per {name}", highlight=False)
        console.print(f"mean absolute error over the kinds of steps: {100 * sum(errors) / len(errors):.1f} %")
        path = output or cost_model_path(config)
        calibration.save(path, config, deployment, fitted)
        console.print(f"saved to {path}", highlight=False)


SCHEDULING = ("policy", "batching", "predictor", "predictor_sigma", "budget", "inter_token_ms", "ttft_ms")
"""Options that go into a `SchedulingConfig`."""


def simulate(
    *,
    cost_model: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="A file of `headrace calibrate`.")
    ] = None,
    model: ModelOption = DEFAULT_MODEL,
    threads: Threads = None,
    isa: Isa = "",
    kv_memory: Annotated[str | None, typer.Option(help="Size of the pool: 512MiB. Default: as calibrated.")] = None,
    max_running: Annotated[int, typer.Option(min=1, help="Sequences that run at once.")] = 64,
    max_step_tokens: Annotated[int, typer.Option(min=1, help="Tokens computed in one step.")] = 160,
    inter_token_ms: Annotated[float | None, typer.Option(min=0.1, help="As of `headrace serve`.")] = None,
    max_queue: Annotated[int, typer.Option(min=1, help="Requests that may wait.")] = 256,
    depth: Annotated[int, typer.Option(min=1, max=2, help="Steps kept launched.")] = 1,
    policy: Annotated[str, typer.Option(help="Who is first, as of `headrace serve`: fair(ageing(srpt)) and so on.")] = (
        "fair(priority(fcfs))"
    ),
    batching: Annotated[
        str, typer.Option(help="As of `headrace serve`: continuous, static, window ...")
    ] = "continuous",
    predictor: Annotated[str, typer.Option(help="Of reply lengths: bound, which here is right, or history.")] = "bound",
    predictor_sigma: Annotated[float, typer.Option(min=0, help="Log-normal noise on what it predicts.")] = 0.0,
    budget: Annotated[str, typer.Option(help="Of a step: paced or fixed.")] = "paced",
    ttft_ms: Annotated[
        float | None, typer.Option(min=1, help="Refuse who is predicted to wait longer for its first token.")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="A load of the tables, as of `headrace bench`.")] = None,
    workload: GeneratedWorkload = None,
    requests: Requests = None,
    prompt_tokens: PromptTokens = 128,
    output_tokens: OutputTokens = 64,
    prefix_tokens: PrefixTokens = 0,
    prefixes: Prefixes = 1,
    turns: Turns = 1,
    turn_tokens: TurnTokens = 32,
    think: Think = 0.0,
    tenants: Annotated[int, typer.Option(min=0, help="Tenants.")] = 0,
    zipf: Zipf = 1.1,
    concurrency: Annotated[str | None, typer.Option(help="Closed loop: requests in flight, such as 8 or 1,8.")] = None,
    rate: Rate = None,
    trace: Trace = None,
    time_scale: Annotated[float, typer.Option(help="Of a trace: multiplies times.")] = 1.0,
    length_scale: LengthScale = 1.0,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, each of a seed of its own; medians are told.")] = 1,
    seed: Annotated[int, typer.Option(help="Of lengths, arrivals and tokens.")] = 0,
    slo_ttft_ms: SloTtft = None,
    slo_tpot_ms: SloTpot = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything here; -: standard output.")] = None,
) -> None:
    """Run the engine's own scheduler and memory on a virtual clock, and tell latency and throughput as bench does."""
    given = dict(locals()) | {"warmup": None}
    from headrace.cli import friendly_errors  # noqa: PLC0415

    with friendly_errors():
        _simulate(given)


def _simulate(given: Mapping[str, Any]) -> None:
    from rich.console import Console  # noqa: PLC0415

    from headrace.bench.command import points_of, progress_bar  # noqa: PLC0415
    from headrace.bench.machine import inspect_machine  # noqa: PLC0415
    from headrace.bench.report import Objectives  # noqa: PLC0415
    from headrace.bench.session import BenchOptions  # noqa: PLC0415
    from headrace.bench.simulation import run_simulation  # noqa: PLC0415
    from headrace.bench.tables import print_report  # noqa: PLC0415
    from headrace.core.cost_model import load_cost_model  # noqa: PLC0415
    from headrace.core.errors import ConfigurationError  # noqa: PLC0415
    from headrace.server.build import ServeConfig  # noqa: PLC0415
    from headrace.server.step_costs import cost_model_path  # noqa: PLC0415

    path = given["cost_model"]
    if path is None:
        path = cost_model_path(ServeConfig(model=given["model"], threads=given["threads"], isa=given["isa"]))
        if not path.exists():
            raise ConfigurationError(
                f"no cost model of {given['model']} for these threads and instruction set: run headrace calibrate "
                f"--model {given['model']}, or pass --cost-model."
            )
    times, about = load_cost_model(path)
    options = BenchOptions(
        points_of(given), given["rounds"], given["seed"], Objectives(given["slo_ttft_ms"], given["slo_tpot_ms"])
    )
    config = sim_config(given, about)
    with progress_bar() as progress:
        report = run_simulation(
            config,
            times,
            options,
            inspect_machine(measure=False),
            about={"cost_model": {key: about[key] for key in ("model", "processor", "threads", "isa", "kv_format")}},
            progress=progress,
        )
    to_stdout = given["json_file"] is not None and str(given["json_file"]) == "-"
    print_report(report, Console(stderr=to_stdout))
    if given["json_file"] is not None:
        text = json.dumps(report.document(), indent=2) + "\n"
        if to_stdout:
            sys.stdout.write(text)
        else:
            given["json_file"].write_text(text, "utf-8")


def sim_config(given: Mapping[str, Any], about: dict[str, Any]) -> Any:
    """A `SimConfig` out of the options and what was calibrated."""
    from headrace.bench.calibration import cache_groups_of  # noqa: PLC0415
    from headrace.cli import parse_bytes  # noqa: PLC0415
    from headrace.engine.composition import SchedulingConfig  # noqa: PLC0415
    from headrace.executor.sizing import blocks_within  # noqa: PLC0415
    from headrace.sim.build import SimConfig  # noqa: PLC0415

    groups = cache_groups_of(about)
    num_blocks = tuple(about["num_blocks"])
    num_bytes = parse_bytes(given["kv_memory"])
    if num_bytes is not None:
        num_blocks = blocks_within(
            groups,
            num_bytes,
            context_length=about["context_length"],
            max_running=given["max_running"],
            max_step_tokens=given["max_step_tokens"],
            depth=given["depth"],
        )
    return SimConfig(
        groups=groups,
        num_blocks=num_blocks,
        context_length=about["context_length"],
        vocab_size=about["vocab_size"],
        max_running=given["max_running"],
        max_step_tokens=given["max_step_tokens"],
        scheduling=SchedulingConfig(**{name: given[name] for name in SCHEDULING}),
        max_queue=given["max_queue"],
        depth=given["depth"],
    )
