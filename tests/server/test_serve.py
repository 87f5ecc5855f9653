"""`headrace serve` as a process: the ready line, signals, ports."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys

import openai
import pytest

from headrace.core.errors import ConfigurationError
from headrace.server import serve as module
from headrace.server.build import ServeConfig
from tests.server.conftest import eventually
from tests.server.fakes import make_deployment
from tests.server.processes import get, served

FAKE = ("-m", "tests.server.fake_serve", "0")
SLOW = [{"role": "user", "content": "say:abcdefghijklmnopqrstuvwxyz"}]


def open_stream(url: str, **options: object) -> openai.Stream:
    client = openai.OpenAI(base_url=url, api_key="x", max_retries=0)
    stream = client.chat.completions.create(model="fake-model", messages=SLOW, stream=True, **options)
    next(iter(stream))
    return stream


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_running_streams_and_exits_0(number: int):
    with served(*FAKE, "20") as (process, url):
        stream = open_stream(url)
        process.send_signal(number)
        eventually(lambda: get(url, "/ready").status_code == 503)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert text.endswith("xyz")
        assert process.wait(10) == 0
        log = process.stderr.read()
        assert "Shutting down: 1 calls may finish" in log
        assert "request id=chatcmpl-" in log
        assert "generated_tokens=27" in log
        assert "finish=stop" in log
        assert "Traceback" not in log


def test_the_vocabulary_is_wrapped_before_a_server_is_ready(monkeypatch: pytest.MonkeyPatch):
    """Afterwards it would hold up every stream."""
    deployment = make_deployment()

    def prepare() -> None:
        raise ConfigurationError("prepared first")

    deployment.grammars.prepare = prepare
    monkeypatch.setattr(module, "build", lambda config, progress=None, *, constrains: deployment)
    with pytest.raises(ConfigurationError, match="prepared first"):
        module.serve(ServeConfig(), module.ServerOptions(port=0))


def test_an_idle_server_exits_at_once():
    with served(*FAKE, "20") as (process, _):
        process.send_signal(signal.SIGTERM)
        assert process.wait(3) == 0


def test_what_outlasts_the_drain_is_aborted_and_the_exit_is_still_0():
    with served(*FAKE, "0.1") as (process, url):
        stream = open_stream(url, max_tokens=200, extra_body={"ignore_eos": True})
        process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="shut down"):
            list(stream)
        assert process.wait(10) == 0


def test_a_second_signal_forces():
    with served(*FAKE, "60") as (process, url):
        open_stream(url, max_tokens=200, extra_body={"ignore_eos": True})
        process.send_signal(signal.SIGTERM)
        eventually(lambda: get(url, "/ready").status_code == 503)
        process.send_signal(signal.SIGTERM)
        assert process.wait(3) == 1


def test_a_port_in_use_is_one_line_and_exit_1():
    """Said before the model is even looked for."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "headrace.cli", "serve", "no-such-model", "--port", str(port)],
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
    assert done.returncode == 1
    assert done.stdout == ""
    assert (
        done.stderr
        == f"headrace: port {port} on 127.0.0.1 is in use; choose another with --port, or 0 for any free one.\n"
    )
