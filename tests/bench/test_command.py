"""`headrace bench` as it is typed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import headrace.server.build
from headrace.bench import command
from headrace.bench.machine import COMPILERS, PeaksError, inspect_machine, measure_peaks
from headrace.bench.presets import PRESETS
from headrace.bench.settings import parse_extra, parse_named_url, serve_config
from headrace.cli import app
from headrace.core.errors import ConfigurationError
from tests.server.fakes import FakeEngine, make_deployment

from .scripted_server import serving

RUNNER = CliRunner()
SCRIPT = {"first_s": 0.005, "gaps_s": [0.002]}


@pytest.fixture(autouse=True)
def fakes(monkeypatch, letters):
    monkeypatch.setattr(command, "_prompt_maker", lambda model: letters)
    monkeypatch.setattr(headrace.server.build, "build", lambda config, progress=None: make_deployment(FakeEngine()))


def run(*arguments: str):
    return RUNNER.invoke(app, ["bench", "--no-machine", *arguments])


def test_two_servers_and_this_process(tmp_path):
    out = tmp_path / "out.json"
    with serving(SCRIPT) as (_, a), serving(SCRIPT) as (_, b):
        load = ("--requests", "6", "--prompt-tokens", "30", "--output-tokens", "4", "--concurrency", "1,3")
        done = run("--url", f"ours={a}/v1", "--url", b, "--in-process", *load, "--rounds", "2", "--json", str(out))
    assert done.exit_code == 0, done.output
    document = json.loads(out.read_text())
    assert [point["name"] for point in document["points"]] == ["30+4 c1", "30+4 c3"]
    for point in document["points"]:
        assert list(point["targets"]) == ["ours", "B", "in process"]
        for target in point["targets"].values():
            assert len(target["rounds"]) == 2
            assert target["median"]["output_tokens"] == 24
        assert point["targets"]["ours"]["ratio"]["output_tokens_per_s"] == 1
        assert 0.2 < point["targets"]["B"]["ratio"]["output_tokens_per_s"] < 5
    assert document["machine"]["cores"] >= 1
    assert "Latencies" in done.output and "inter-token" in done.output


def test_errors_are_loud(tmp_path):
    with serving(SCRIPT | {"fail_every": 2}) as (_, url):
        load = ("--url", url, "--requests", "4", "--prompt-tokens", "20", "--output-tokens", "2", "--warmup", "0")
        done = run(*load)
        assert done.exit_code == 1
        assert "2 REQUESTS FAILED" in done.output and "2 x http 429" in done.output
        done = run(*load, "--allow-errors", "--json", "-")
    assert done.exit_code == 0
    assert json.loads(done.stdout)["num_errors"] == 2, "standard output is the document alone"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--preset", "no-such"), "there is no preset 'no-such'"),
        (("--concurrency", "2", "--rate", "1"), "--concurrency and --rate are two ways"),
        (("--concurrency", "many"), "--concurrency is 'many'"),
        (("--url", "127.0.0.1:8000"), "is no URL of a server"),
        (("--url", "http://127.0.0.1:9"), "does not answer"),
        (("--record", "x"), "--record keeps the streams of --url targets"),
        (("--set", "colour=red"), "is not FIELD=VALUE"),
        (("--set", "block_size=red"), "needs a value of type"),
        (("--url", "http://h:1", "--extra", "[1]"), "write a JSON object"),
        (("--url", "http://h:1", "--endpoint", "chats"), "--endpoint is 'chats'"),
        (("--prompt-tokens", "5000"), "at most 256"),
    ],
)
def test_what_cannot_be_is_one_line(arguments, message):
    done = run(*arguments)
    assert done.exit_code == 1
    assert message in done.stderr
    assert "Traceback" not in done.output


def test_presets_are_the_loads_of_the_tables():
    loads = {name: [point.spec for point in make()] for name, make in PRESETS.items()}
    assert [(s.num_requests, s.num_prompt, s.num_output, s.concurrency) for s in loads["http-128-64"]] == [
        (64, 128, 64, n) for n in (1, 8, 16)
    ]
    (shared,) = loads["shared-prefix"]
    assert (shared.num_prefix, shared.num_prompt, shared.num_output, shared.concurrency) == (1000, 1030, 32, 8)
    assert [s.concurrency for s in loads["decode"]] == [1, 2, 4, 8, 16, 32, 64]
    assert all(s.num_requests == s.concurrency and s.num_output == 128 for s in loads["decode"])
    (prompt,) = loads["prompt"]
    assert (prompt.num_prompt, prompt.num_output) == (512, 1)


def test_the_command_line_alone_loads_none_of_it():
    program = "import sys, headrace.cli; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    heavy = {"numpy", "httptools", "asyncio", "rich.progress", "headrace.bench.session", "headrace.server.build"}
    assert not heavy & set(loaded)


def test_option_texts():
    assert parse_named_url("ours=http://h:1", 0) == ("ours", "http://h:1")
    assert parse_named_url("http://h:1/a=b", 2) == ("C", "http://h:1/a=b")
    found = parse_extra(['{"a": 1}', 'x={"a": 2, "b": 3}'], ["x", "y"])
    assert found == {"x": {"a": 2, "b": 3}, "y": {"a": 1}}
    assert serve_config("m", ["block_size=32", "context_length=64"]).block_size == 32
    with pytest.raises(ConfigurationError, match="x=1"):
        parse_extra(["x=1"], ["x"])


def test_without_a_compiler_the_report_says_so(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    machine = inspect_machine()
    assert machine.peaks is None
    assert machine.peaks_missing.startswith("not measured: no C++ compiler (looked for no-such-compiler)")


def test_a_compiler_that_fails_is_told(monkeypatch, tmp_path):
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho it is broken >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    with pytest.raises(PeaksError, match="it is broken"):
        measure_peaks(1)
    assert COMPILERS
