"""The command line around a fake model, in this process."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

import headrace.llm
from headrace.cli import app, parse_bytes, show_bytes
from headrace.core.errors import ConfigurationError
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


def test_inspect_a_model(data_path):
    done = RUNNER.invoke(app, ["inspect", str(data_path / "tiny" / "gemma3")])
    assert done.exit_code == 0, done.output
    for word in ("gemma3", "F32", "window", "full", "per token", "Available here"):
        assert word in done.stdout


def test_the_default_reply(engine: FakeEngine):
    assert RUNNER.invoke(app, ["generate", "x"]).stdout == f"{REPLY}\n"
