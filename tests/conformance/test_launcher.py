"""Rows about processes, with servers that are right and some that are wrong on purpose; and that none is left over."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli import app
from headrace.conformance import cpu
from headrace.conformance.client import Target
from headrace.conformance.launcher import Command, Launcher
from headrace.conformance.outcome import NotApplicable, Status
from headrace.conformance.suite import NEEDS_COMMAND, Result, run_suite, select
from headrace.conformance.threads import num_busy
from headrace.core.errors import ConfigurationError
from tests.conformance.fake_server import faking

TEMPLATE = f"{sys.executable} -m tests.conformance.fake_process --port {{port}} --model {{model}}"
TARGET = Target("", "fake", api_key="k1", timeout_s=10)
PROCESS_ROWS = [
    "thread_count",
    "two_instances",
    "default_threads",
    "gguf",
    "quantized_speed",
    "start_up",
    "rope_scaling",
    "disconnect_speculating",
    "sigterm",
]
FAULTS = [
    ("overcommits", "thread_count"),
    ("ignores_cpuset", "two_instances"),
    ("default_is_slow", "default_threads"),
    ("knows_no_gguf", "gguf"),
    ("quantized_is_slow", "quantized_speed"),
    ("is_ready_early", "start_up"),
    ("ignores_scaling", "rope_scaling"),
    ("runs_on_speculating", "disconnect_speculating"),
    ("dies", "sigterm"),
    ("takes_all", "sigterm"),
    ("fails_at_the_end", "sigterm"),
]


@pytest.fixture(autouse=True)
def short_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake's tokens come evenly: fewer of them tell its speed."""
    monkeypatch.setattr(cpu, "_NUM_TOKENS", 20)
    monkeypatch.setattr(cpu, "_ROUNDS", 5)


def command(folder: Path, *faults: str) -> Command:
    for name in ("q4.gguf", "f16.gguf"):
        (folder / name).touch()
    words = f"{TEMPLATE} [--threads {{threads}}] {' '.join(faults)}"
    return Command(words, "fake", folder / "q4.gguf", folder / "f16.gguf", "--speculate")


def run(name: str, made: Command | None, target: Target = TARGET) -> Result:
    (result,) = run_suite(target, select(name), command=made)
    return result


@pytest.mark.parametrize("name", PROCESS_ROWS)
def test_a_right_server_passes(tmp_path: Path, name: str):
    for _ in range(3):  # most rows look at times
        result = run(name, command(tmp_path))
        if result.status is Status.PASS:
            break
    assert result.status is Status.PASS, result.reason


@pytest.mark.parametrize(("fault", "name"), FAULTS)
def test_a_fault_fails_its_row(tmp_path: Path, fault: str, name: str):
    result = run(name, command(tmp_path, fault))
    assert result.status is Status.FAIL, result.reason
    assert "expected" in result.reason


def test_what_a_server_says_before_it_ends_is_the_reason(tmp_path: Path):
    assert "error: a file of an unknown kind" in run("gguf", command(tmp_path, "knows_no_gguf")).reason


def test_rows_about_processes_need_a_command():
    with faking() as url:
        for name in PROCESS_ROWS:
            result = run(name, None, Target(url, "fake", api_key="k1"))
            assert (result.status, result.reason) == (Status.NOT_APPLICABLE, NEEDS_COMMAND)


@pytest.mark.parametrize(
    ("template", "name", "reason"),
    [
        (TEMPLATE, "default_threads", "needs {threads}"),
        (f"{TEMPLATE} --threads {{threads}}", "default_threads", "put that part in brackets"),
        (f"{TEMPLATE} --threads {{threads}}", "thread_count", "put that part in brackets"),
        (TEMPLATE.replace("{model}", "fake"), "rope_scaling", "needs {model}"),
        (TEMPLATE, "gguf", "give --gguf"),
        (TEMPLATE, "quantized_speed", "give --gguf and --f16-gguf"),
        (TEMPLATE, "disconnect_speculating", "give --speculate-args"),
    ],
)
def test_a_row_says_what_it_needs(template: str, name: str, reason: str):
    result = run(name, Command(template, "fake"))
    assert result.status is Status.NOT_APPLICABLE
    assert reason in result.reason


def test_the_words_of_a_command():
    made = Command("python -m x {model} --port {port} [-t {threads}] --json '{\"a\": [1]}'", "small")
    assert made.words(80) == ["python", "-m", "x", "small", "--port", "80", "--json", '{"a": [1]}']
    assert made.words(80, threads=3, more="--spec 'a b'")[6:8] == ["-t", "3"]
    assert made.words(80, model="/a b.gguf", more="--spec 'a b'")[3:] == [
        "/a b.gguf",
        "--port",
        "80",
        "--json",
        '{"a": [1]}',
        "--spec",
        "a b",
    ]


@pytest.mark.parametrize(
    ("template", "message"),
    [("python x", "has no {port}"), ("python '{port}", "cannot be read"), ("no-such-program {port}", "no program")],
)
def test_a_command_that_cannot_be_started(template: str, message: str):
    with pytest.raises(ConfigurationError, match=message):
        Command(template, "fake")


def test_without_url_the_other_rows_ask_a_started_server():
    found = run_suite(TARGET, [*select("stop_string"), *select("start_up")], command=Command(TEMPLATE, "fake"))
    assert [(each.check.name, each.status) for each in found] == [
        ("stop_string", Status.PASS),
        ("start_up", Status.PASS),
    ]
    with pytest.raises(ConfigurationError, match="give --url, or --command"):
        run_suite(TARGET, select("stop_string"))
    with pytest.raises(ConfigurationError, match=r"starts no server: .* unknown kind"):
        run_suite(TARGET, select("stop_string"), command=Command(f"{TEMPLATE} knows_no_gguf", "x.gguf"))


def test_no_server_is_left_behind(tmp_path: Path):
    """Neither by a row that fails while one runs, nor of a server that does not end by itself."""
    pids = []

    async def fail() -> None:
        with Launcher(Command(f"{TEMPLATE} dies", "fake"), TARGET) as launcher:
            async with launcher.start() as started:
                pids.append(started.group)
                raise NotApplicable("in the midst of it")

    with pytest.raises(NotApplicable):
        asyncio.run(fail())
    assert not is_there(pids[0])


def test_servers_end_with_the_suite(tmp_path: Path):
    """SIGTERM to the suite itself."""
    arguments = ["-m", "headrace.cli", "conformance", "--model", "fake", "--api-key", "k1", "--only", "default_threads"]
    marked = f"{TEMPLATE} [--threads {{threads}}] a-mark-{os.getpid()}"
    with subprocess.Popen([sys.executable, *arguments, "--command", marked]) as suite:
        wait_until(lambda: len(marked_processes()) >= 2)  # the suite, and a server
        suite.send_signal(signal.SIGTERM)
        assert suite.wait(20) == 128 + signal.SIGTERM
    assert marked_processes() == []


def test_the_command_line(tmp_path: Path):
    arguments = ["conformance", "--model", "fake", "--api-key", "k1", "--command", TEMPLATE, "--only", "sigterm"]
    ended = CliRunner().invoke(app, arguments)
    assert ended.exit_code == 0, ended.output
    assert "1 pass, 0 fail" in ended.output
    assert CliRunner().invoke(app, ["conformance", "--model", "fake"]).exit_code == 1


def test_threads_that_pass_tokens_on_are_not_busy():
    assert num_busy({1: 5.0, 2: 5.0}, {1: 5.1, 2: 6.0, 3: 0.9, 4: 0.0}) == 2
    assert num_busy({}, {1: 0.0}) == 0


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def marked_processes() -> list[str]:
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and process.name != str(os.getpid()):
            try:
                words = (process / "cmdline").read_bytes().decode()
            except OSError:
                continue
            if f"a-mark-{os.getpid()}" in words:
                found.append(process.name)
    return found


def wait_until(holds, timeout_s: float = 20.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.02)
