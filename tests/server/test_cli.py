"""The command line around a fake model, in this process."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
from typer.testing import CliRunner

import headrace.llm
from headrace.backends.native import _native
from headrace.cli import app, capacity, parse_bytes, show_bytes
from headrace.core.errors import ConfigurationError, HeadraceError
from headrace.server import system
from headrace.server.build import ServeConfig, build
from headrace.server.inspection import report_model
from tests.server.fakes import REPLY, FakeEngine, make_deployment

RUNNER = CliRunner()


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    fake = FakeEngine()
    monkeypatch.setattr(headrace.llm, "build", lambda config, progress=None: make_deployment(fake))
    return fake


def test_generate():
    done = RUNNER.invoke(app, ["generate", "say:some words", "--stop", "wor"])
    assert (done.exit_code, done.stdout) == (0, "some \n")
    assert RUNNER.invoke(app, ["generate", "-"], input="say:piped").stdout == "piped\n"


def test_chat_from_a_pipe_remembers_the_conversation(engine: FakeEngine):
    done = RUNNER.invoke(app, ["chat", "--system", "be kind"], input="say:one\n\nhello\n/clear\nsay:three\n")
    assert done.exit_code == 0
    assert done.stdout == "one\none\nthree\n", "the second reply still sees the first message's say:"
    texts = [bytes(t for t in r.prompt if t < 256).decode() for r in engine.requests]
    assert texts[1] == "system\nbe kinduser\nsay:oneassistant\noneuser\nhelloassistant\n"
    assert texts[2] == "system\nbe kinduser\nsay:threeassistant\n"


def test_a_full_context_does_not_end_a_chat():
    done = RUNNER.invoke(app, ["chat"], input=f"{'x' * 300}\nsay:still here\n")
    assert (done.exit_code, done.stdout) == (0, "still here\n")
    assert "/clear begins anew" in done.stderr


def test_errors_are_one_line():
    done = RUNNER.invoke(app, ["generate", "x" * 300])
    assert done.exit_code == 1
    assert done.stderr.startswith("headrace: this model reads at most 256 tokens")
    assert len(done.stderr.splitlines()) == 1
    done = RUNNER.invoke(app, ["inspect", "no-such-model"])
    assert done.exit_code == 1
    assert "no-such-model" in done.stderr


def test_every_error_of_ours_has_one_base():
    """`headrace` catches it and prints one line; CheckpointError and others had bases of their own, to be listed."""
    python = (name for _, name, _ in pkgutil.walk_packages(headrace.__path__, "headrace.") if "_native" not in name)
    modules = [name for name in python if ".bench" not in name]
    found = set()
    for name in modules:
        for kind in vars(importlib.import_module(name)).values():
            if isinstance(kind, type) and issubclass(kind, Exception) and kind.__module__.startswith("headrace."):
                found.add(kind)
    assert {kind.__name__ for kind in found} >= {"FetchError", "CheckpointError", "TemplateError", "ProgramError"}
    assert [kind for kind in found if not issubclass(kind, HeadraceError)] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "x", "--temperature", "-1"], "temperature is -1.0; it must be between 0 and 100."),
        (["generate", "x", "--top-p", "0"], "top_p is 0.0; it must be above 0 and at most 1."),
        (["generate", "x", "--stop", ""], "stop has ''; a string of at least one character is needed."),
        (["generate", "\udce9x"], "the prompt is not UTF-8 (at character 0)."),
        (["chat", "--temperature", "101"], "temperature is 101.0; it must be between 0 and 100."),
        (["chat", "--system", "\udce9"], "--system is not UTF-8 (at character 0)."),
        (["chat", "one", "--model", "two"], "two models are given, 'one' and 'two'; give one."),
    ],
)
def test_what_is_wrong_is_said_before_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch, arguments, message):
    def build(config: object, progress: object = None) -> None:
        raise AssertionError("loaded first")

    monkeypatch.setattr(headrace.llm, "build", build)
    done = RUNNER.invoke(app, arguments)
    assert (done.exit_code, done.stderr) == (1, f"headrace: {message}\n")


def test_the_model_is_an_option_everywhere_and_an_argument_where_nothing_else_is(monkeypatch: pytest.MonkeyPatch):
    configs = []

    def build(config: ServeConfig, progress: object = None) -> object:
        configs.append(config)
        return make_deployment()

    monkeypatch.setattr(headrace.llm, "build", build)
    for arguments in (["chat", "m"], ["chat", "--model", "m"], ["generate", "x", "-m", "m"], ["chat", "m", "-m", "m"]):
        assert RUNNER.invoke(app, arguments, input="").exit_code == 0
    assert [config.model for config in configs] == ["m"] * 4
    flags = ["--backend", "reference", "--threads", "3", "--isa", "avx2", "--kv-format", "f32"]
    for arguments in (["chat", *flags], ["generate", "x", *flags]):
        RUNNER.invoke(app, arguments, input="")
        config = configs.pop()
        assert (config.backend, config.threads, config.isa, config.kv_format) == ("reference", 3, "avx2", "f32")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--backend", "cuda"], "backend is 'cuda'; it must be one of 'native', 'reference'."),
        (["--kv-format", "q8"], "kv_format is 'q8'; it must be one of 'f16', 'f32'."),
        (["--isa", "mmx"], "isa is 'mmx'; it must be one of"),
        (["--policy", "fair(best)"], "policy has 'best'; it must be one of fcfs, sjf, srpt, mlfq, edf, slack"),
        (["--batching", "huge"], "batching is 'huge'; it must be one of 'continuous', 'static'"),
        (["--predictor", "crystal"], "predictor is 'crystal'; it must be one of 'bound', 'history', 'oracle'."),
        (["--key-weight", "secret=much"], "a key's weight is 'much'; write KEY=2."),
    ],
)
def test_serve_checks_its_flags_before_it_fetches_anything(flags: list[str], message: str):
    done = RUNNER.invoke(app, ["serve", "no-such-model", "--port", "0", *flags])
    assert done.exit_code == 1
    assert done.stderr.startswith(f"headrace: {message}")


def test_version():
    done = RUNNER.invoke(app, ["--version"])
    assert (done.exit_code, done.stdout) == (0, f"headrace {system.version()}\n")


def test_a_bad_size_is_one_line():
    assert RUNNER.invoke(app, ["generate", "x", "--kv-memory", "lots"]).stderr.startswith(
        "headrace: 'lots' is not a size"
    )


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("1000", 1000), ("512MiB", 512 << 20), ("4GB", 4 * 10**9), ("1.5 KiB", 1536), ("2g", 2 * 10**9)],
)
def test_sizes(text: str, num_bytes: int):
    assert parse_bytes(text) == num_bytes


def test_sizes_that_are_none():
    assert parse_bytes(None) is None
    with pytest.raises(ConfigurationError):
        parse_bytes("-1")


def test_show_bytes():
    assert [show_bytes(n) for n in (5, 2048, 3 << 20, 5 << 40)] == ["5 B", "2.0 KiB", "3.0 MiB", "5.0 TiB"]


def test_inspect_the_system():
    done = RUNNER.invoke(app, ["inspect", "--system"])
    assert done.exit_code == 0
    for word in ("processor", "instruction sets", "usable cores", "memory", "python", "headrace"):
        assert word in done.stdout
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("native backend"))
    assert line.split()[2] == f"{_native.isas()[0]},", "the best is chosen"
    assert f"{system.usable_cores()[0]} threads" in line


def test_inspect_a_model(data_path):
    done = RUNNER.invoke(app, ["inspect", str(data_path / "tiny" / "gemma3")])
    assert done.exit_code == 0, done.output
    for word in ("gemma3", "F32", "window", "full", "per token", "Available here"):
        assert word in done.stdout


def test_a_path_in_a_pipe_is_one_line(data_path, tmp_path):
    """rich broke it at 80 columns: no script could read it."""
    folder = tmp_path / ("long" * 30)
    folder.symlink_to(data_path / "tiny" / "gemma3")
    assert f"   {folder}\n" in RUNNER.invoke(app, ["inspect", str(folder)]).stdout


def test_inspect_promises_what_serve_gives(smollm2_path, monkeypatch: pytest.MonkeyPatch):
    """It promised the whole memory, in float32; `serve` takes a quarter of it, in float16, for 64 sequences at most."""
    monkeypatch.setattr(system, "memory_bytes", lambda: (1 << 30, 400 << 20))
    report = report_model(smollm2_path)
    config = ServeConfig(str(smollm2_path))
    deployment = build(config)
    memory = deployment.engine.scheduler.state.memory
    cache = report.cache
    assert 99 << 20 <= cache.num_bytes <= 100 << 20
    assert cache.num_tokens == memory.groups[0].pool.num_blocks * config.block_size
    assert cache.longest_tokens == min(report.context_length, memory.capacity_tokens(config.max_step_tokens, 1))
    assert cache.num_full_sequences == min(64, cache.num_tokens // report.context_length)
    assert f"{cache.num_tokens:,} tokens in all" in capacity(report)
    assert "No sequence may be longer than" in capacity(report)
    monkeypatch.setattr(system, "memory_bytes", lambda: (1 << 30, 100 << 20))
    assert capacity(report_model(smollm2_path)).startswith("Does not fit: 100.0 MiB are available here")


def test_a_folder_without_a_model_is_said_to_be_none(tmp_path):
    assert RUNNER.invoke(app, ["inspect", str(tmp_path)]).stderr == (
        f"headrace: {tmp_path} is no model folder (no config.json, no .gguf)\n"
    )


def test_the_default_reply(engine: FakeEngine):
    assert RUNNER.invoke(app, ["generate", "x"]).stdout == f"{REPLY}\n"
