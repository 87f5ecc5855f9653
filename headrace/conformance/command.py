"""`headrace conformance`. Only the options are read when the command line is; all else is imported when it runs."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from headrace.conformance.suite import Report


def conformance(
    *,
    url: Annotated[
        str | None, typer.Option(help="An OpenAI-compatible server, with or without /v1. Default: one of --command.")
    ] = None,
    model: Annotated[str, typer.Option("--model", "-m", help="The name in requests.")],
    command: Annotated[
        str | None,
        typer.Option(
            help="Starts a server, for the rows about its process: 'headrace serve {model} --port {port} "
            "[--threads {threads}]'. A part in brackets is left out where a row sets nothing."
        ),
    ] = None,
    gguf: Annotated[Path | None, typer.Option(help="A model file; {model} of the command. Default: --model.")] = None,
    f16_gguf: Annotated[Path | None, typer.Option(help="The same model in 16 bits, to compare speeds with.")] = None,
    speculate_args: Annotated[
        str, typer.Option(help="Words after the command that turn speculation on: '--speculate prompt-lookup'.")
    ] = "",
    api_key: Annotated[
        str | None, typer.Option(envvar="HEADRACE_CONFORMANCE_API_KEY", help="Sent to the server.")
    ] = None,
    other_api_key: Annotated[str | None, typer.Option(help="Of a second tenant, for the rows that need one.")] = None,
    context_length: Annotated[
        int | None, typer.Option(min=256, help="Tokens of prompt and reply. Default: as the server says.")
    ] = None,
    capacity: Annotated[
        int | None,
        typer.Option(min=4, help="Requests the server holds at once, running and waiting, if it has a bound."),
    ] = None,
    only: Annotated[
        str | None, typer.Option(help="Checks whose number, chapter, name or title match: 4, 4.3, 'stop_*'.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for one reply.")] = 60.0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write everything here; - for standard output.")
    ] = None,
) -> None:
    """Check a server's behaviour row by row: what passes, what fails and why, what does not apply.

    Exits with 1 when a row fails.
    """
    from headrace.cli import friendly_errors  # noqa: PLC0415

    with friendly_errors():
        from rich.console import Console  # noqa: PLC0415

        from headrace.conformance.client import Target  # noqa: PLC0415
        from headrace.conformance.launcher import Command  # noqa: PLC0415
        from headrace.conformance.outcome import Status  # noqa: PLC0415
        from headrace.conformance.report import counts, document, print_results  # noqa: PLC0415
        from headrace.conformance.suite import run_suite, select  # noqa: PLC0415

        target = Target(url or "", model, api_key, other_api_key, context_length, capacity, timeout)
        started = None if command is None else Command(command, model, gguf, f16_gguf, speculate_args)
        checks = select(only)
        with _progress_bar(len(checks)) as report, _terminated_in_order():
            results = run_suite(target, checks, report, started)
        to_stdout = json_file is not None and str(json_file) == "-"
        print_results(results, Console(stderr=to_stdout))
        if json_file is not None:
            text = json.dumps(document(results, url or "", model), indent=2) + "\n"
            if to_stdout:
                sys.stdout.write(text)
            else:
                json_file.write_text(text, "utf-8")
        if counts(results)[Status.FAIL]:
            raise typer.Exit(1)


@contextlib.contextmanager
def _terminated_in_order() -> Iterator[None]:
    """SIGTERM becomes an exception, so that started servers end with the suite."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _progress_bar(num_checks: int) -> Iterator[Report]:
    """Checks done and the one that runs, on standard error."""
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    from headrace.conformance.check import Check  # noqa: PLC0415
    from headrace.conformance.suite import Result  # noqa: PLC0415

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=4, transient=True) as bars:
        task = bars.add_task("", total=num_checks)

        def report(check: Check, result: Result | None) -> None:
            bars.update(task, description=f"{check.id} {check.title}", advance=0 if result is None else 1)

        yield report
