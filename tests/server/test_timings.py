"""`timings: true`: the parts of a call's time, by the engine's stamps."""

from __future__ import annotations

import json
import time

import pytest

from headrace.core.events import TokenEvent
from headrace.core.request import Request
from tests.server.fakes import FakeEngine, Running
from tests.server.test_extras import PATHS, error_of


class Stamped(FakeEngine):
    """A request waits 0.2 s, its first token comes 0.5 s after its submission, each further one 0.1 s later."""

    def submit(self, request: Request) -> None:
        self.submitted_s = time.monotonic()
        super().submit(request)

    def _next(self, run: Running) -> TokenEvent:
        event = super()._next(run)
        return event._replace(time_s=self.submitted_s + 0.4 + 0.1 * run.num_sent, queued_s=0.2)

    def _admit(self, request: Request) -> list[TokenEvent]:
        return [event._replace(time_s=self.submitted_s + 0.5, queued_s=0.2) for event in super()._admit(request)]


def chunks_of(text: str) -> list[dict]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("n", [1, 2])
def test_whole_and_streamed(start, path: str, n: int):
    server = start(Stamped())
    body = PATHS[path] | {"n": n, "max_tokens": 6, "ignore_eos": True, "timings": True}
    for again in (False, True):
        whole = server.post(path, json=body).json()["timings"]
        assert whole["queue_ms"] == pytest.approx(200)
        assert whole["prefill_ms"] == pytest.approx(300, abs=30)
        assert whole["decode_ms"] == pytest.approx(500)
        assert whole["tokens_per_second"] == pytest.approx(10 * n)
        assert (whole["cached_tokens"] > 0) == again
    for include_usage in (False, True):
        options = {"stream": True} | ({"stream_options": {"include_usage": True}} if include_usage else {})
        *chunks, last = chunks_of(server.post(path, json=body | options).text)
        assert last["choices"] == []
        assert ("usage" in last) == include_usage
        assert last["timings"] == pytest.approx(whole, abs=30)
        assert not any("timings" in chunk for chunk in chunks)


@pytest.mark.parametrize("path", PATHS)
def test_not_unless_asked(start, path: str):
    server = start()
    assert "timings" not in server.post(path, json=PATHS[path]).json()
    chunks = chunks_of(server.post(path, json=PATHS[path] | {"stream": True, "timings": False}).text)
    assert all(chunk["choices"] and "timings" not in chunk for chunk in chunks)
    assert error_of(server, path, PATHS[path] | {"timings": "yes"})["param"] == "timings"


def test_a_reply_without_decoding(start):
    server = start(Stamped())
    body = {"prompt": "score me", "echo": True, "max_tokens": 0, "timings": True}
    scored = server.post("/v1/completions", json=body | {"logprobs": 1}).json()["timings"]
    assert scored["prefill_ms"] == pytest.approx(300, abs=30)
    assert (scored["decode_ms"], scored["tokens_per_second"]) == (0, None)
    only_echo = server.post("/v1/completions", json=body).json()["timings"]
    assert set(only_echo.values()) == {0, None}, "nothing was computed"
    one = server.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, "timings": True}).json()["timings"]
    assert (one["decode_ms"], one["tokens_per_second"]) == (0, None)
