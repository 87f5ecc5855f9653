"""Our own server, row by row: everything passes but what does not apply to it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from headrace import cli
from headrace.conformance.check import Check
from headrace.conformance.client import Target
from headrace.conformance.launcher import Command
from headrace.conformance.outcome import Status
from headrace.conformance.suite import Result, run_suite, select
from tests.conformance.f16 import to_f16
from tests.server.processes import served

MODEL = "smollm2-135m-instruct"
COMMAND = f"{sys.executable} -m headrace.cli serve {{model}} --port {{port}} --kv-memory 200MiB [--threads {{threads}}]"

OTHERS: Mapping[str, str] = {
    "best_isa": "instruction sets",
    "isa_tiers": "instruction sets",
    "portable": "instruction sets",
    "recurrent_checkpoints": "other kinds of models",
    "guarded_dialects": "no other dialect",
}
"""Name of a row that does not apply: a part of the reason."""
LONG = ("thread_count", "two_instances", "default_threads", "quantized_speed", "stream_beside_prefill")
"""Rows that compare the speeds of several servers, or the gaps of one with its median: on a machine that others slow
down they fail whatever the server does. tests/pure/test_budget.py has the pace of streams where times are exact."""
WITHOUT_COMMAND: Mapping[str, str] = {"suffix": "the model was not made for it"}
"""The same of rows that a command opens."""
ASKING = [check for check in select(None) if check.ask is not None or check.is_unseen]
STARTING = [check for check in select(None) if check.start is not None]


@pytest.fixture(scope="module")
def results(smollm2_path: Path) -> Mapping[str, Result]:
    """Name of a row -> its result. What surprises is asked again: rows look at times, on a machine with others."""
    flags = ("--context-length", "1024", "--kv-memory", "400MiB", "--max-running", "16", "--max-queue", "16")
    # The log of so many requests would fill the pipe that nobody reads.
    keys = ("--api-key", "one", "--api-key", "two", "--no-log-requests")
    with served("-m", "headrace.cli", "serve", MODEL, "--port", "0", *flags, *keys) as (_, url):
        target = Target(url, MODEL, api_key="one", other_api_key="two", capacity=32)
        found = {result.check.name: result for result in run_suite(target, ASKING)}
        for _ in range(2):
            doubtful = [result.check for result in found.values() if result.status is Status.FAIL]
            found |= {result.check.name: result for result in run_suite(target, doubtful)}
        return found


@pytest.fixture(scope="module")
def command(smollm2_path: Path) -> Command:
    """Ours, with speculation where it has any."""
    speculates = "speculate" in inspect.signature(cli.serve).parameters
    return Command(COMMAND, MODEL, smollm2_path, None, "--speculate prompt-lookup" if speculates else "")


def names(checks: Sequence[Check]) -> list[ParameterSet]:
    return [pytest.param(each.name, marks=[pytest.mark.long] * (each.name in LONG)) for each in checks]


@pytest.mark.parametrize("name", names(ASKING))
def test_row(results: Mapping[str, Result], name: str):
    passes_or_is_about_others(results[name], OTHERS | WITHOUT_COMMAND)


@pytest.mark.parametrize("name", names(STARTING))
def test_row_about_the_process(command: Command, tmp_path: Path, name: str):
    if name == "quantized_speed":
        file = tmp_path / "f16.gguf"
        assert command.gguf is not None
        to_f16(command.gguf, file)
        command = Command(command.template, command.model, command.gguf, file)
    for _ in range(3):
        (result,) = run_suite(Target("", MODEL), select(name), command=command)
        if result.status is not Status.FAIL:
            break
    if name == "disconnect_speculating" and not command.speculate_args:
        pytest.skip("the server has no speculation yet")
    passes_or_is_about_others(result, OTHERS)


def passes_or_is_about_others(result: Result, others: Mapping[str, str]) -> None:
    if result.check.name in others:
        assert result.status is Status.NOT_APPLICABLE, result.reason
        assert others[result.check.name] in result.reason
    else:
        assert result.status is Status.PASS, result.reason
