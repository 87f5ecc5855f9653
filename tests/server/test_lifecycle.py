"""How calls end otherwise than well: clients that leave, full queues, drains, a failing engine."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import threading
import time

import openai
import pytest

from headrace.core.clock import WallClock
from headrace.core.events import TokenEvent
from headrace.server import service
from headrace.server.engine_thread import EngineThread
from tests.pure.build import request, small_engine
from tests.server.conftest import RunningServer, eventually
from tests.server.fakes import FakeEngine

ENDLESS = {"messages": [{"role": "user", "content": "say:abc"}], "ignore_eos": True}


def leave_after(server: RunningServer, body: dict, num_bytes: int) -> None:
    """A raw client that closes its connection after some bytes of the answer (0: before any)."""
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(head.encode() + data)
        if num_bytes:
            read = 0
            while read < num_bytes:
                read += len(client.recv(4096))
        else:
            eventually(lambda: server.engine.running)


@pytest.mark.parametrize(("stream", "num_bytes"), [(True, 1500), (False, 0)])
def test_a_client_that_leaves_is_aborted_within_a_step(start, stream: bool, num_bytes: int):
    server = start(FakeEngine(step_s=0.01))
    leave_after(server, ENDLESS | {"stream": stream}, num_bytes)
    step = server.engine.num_steps
    eventually(lambda: server.engine.aborted)
    _, choice, at = server.engine.aborted[0]
    assert choice is None
    assert at <= step + 2, "the step that ran when the client left, and one for the news to travel"
    eventually(lambda: not server.engine.has_work)
    eventually(lambda: server.service.num_calls == 0)
    text = server.get("/metrics").text
    assert 'headrace_requests_total{finish_reason="abort"} 1.0' in text
    assert "headrace_requests_running 0.0" in text


def test_a_client_that_leaves_while_its_call_waits_in_the_queue(start):
    server = start(FakeEngine(step_s=0.01, max_running=1))
    client = server.client()
    first = client.chat.completions.create(
        model="fake-model", stream=True, messages=ENDLESS["messages"], extra_body={"ignore_eos": True}
    )
    next(iter(first))
    data = json.dumps(ENDLESS).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as waiting:
        waiting.sendall(
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data
        )
        eventually(lambda: server.engine.waiting)
    eventually(lambda: not server.engine.waiting)
    first.close()
    eventually(lambda: not server.engine.has_work)


def test_a_slow_reader_loses_nothing(start):
    server = start(FakeEngine(context_length=5000))
    stream = server.client().chat.completions.create(
        model="fake-model", stream=True, messages=ENDLESS["messages"], max_tokens=4000, extra_body={"ignore_eos": True}
    )
    text = ""
    for chunk in stream:
        if not text:
            time.sleep(0.3)
        text += chunk.choices[0].delta.content or ""
    assert text == ("abc" * 2000)[: len(text)]
    assert len(text) == 3000, "every fourth token is the end token, which has no text"


def test_a_full_queue_is_429_with_retry_after(start):
    engine = FakeEngine(step_s=0.02, max_running=1, max_queue=1)
    server = start(engine)
    answers: list[int] = []
    retry_after: set[str] = set()

    def call() -> None:
        response = server.post("/v1/chat/completions", json=ENDLESS | {"max_tokens": 30})
        answers.append(response.status_code)
        if response.status_code == 429:
            retry_after.add(response.headers["retry-after"])
            assert response.json()["error"]["code"] == "queue_full"

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers.count(200) >= 2
    assert answers.count(429) >= 5
    assert retry_after == {"1"}
    assert server.post("/v1/chat/completions", json=ENDLESS | {"max_tokens": 1}).status_code == 200
    with pytest.raises(openai.RateLimitError):
        raise_for(server, engine)


def test_an_app_around_any_engine_knows_its_queue(start):
    """The server counted places by caps of its own: `create_app` around a smaller engine let everybody wait to be
    tokenized, and only then refused them."""
    server = start(FakeEngine(step_s=0.02, max_running=1, max_queue=2))
    client = server.client()
    streams = []
    for i in range(3):
        streams.append(
            client.completions.create(
                model="fake-model", prompt="x", max_tokens=200, stream=True, extra_body={"ignore_eos": True}
            )
        )
        eventually(lambda i=i: server.service.engine.stats.num_waiting == i)
    encode = server.service.deployment.tokenizer.encode
    server.service.deployment.tokenizer.encode = None
    response = server.post("/v1/completions", json={"prompt": "x"})
    assert response.status_code == 429, "and before its prompt is tokenized"
    assert response.json()["error"]["code"] == "queue_full"
    server.service.deployment.tokenizer.encode = encode
    for stream in streams:
        stream.close()
    eventually(lambda: not server.engine.has_work)
    assert server.post("/v1/completions", json={"prompt": ["x"] * 3, "max_tokens": 1}).status_code == 200
    assert server.post("/v1/completions", json={"prompt": ["x"] * 4, "max_tokens": 1}).status_code == 429


def test_large_bodies_that_wait_to_be_parsed_are_bounded(start):
    """They were parsed before anything counted them: a slow text pool kept any number of bodies of 8 MiB."""
    server = start()
    free = threading.Event()
    assert server.loop is not None
    for _ in range(service.TEXT_THREADS):
        asyncio.run_coroutine_threadsafe(server.service.in_text_pool(free.wait), server.loop)
    body = json.dumps({"prompt": "say:x", "max_tokens": 1, "metadata": {"padding": "x" * (64 << 10)}}).encode()
    answers: list[int] = []
    threads = [
        threading.Thread(target=lambda: answers.append(server.post("/v1/completions", content=body).status_code))
        for _ in range(service.MAX_PARSING + 3)
    ]
    for thread in threads:
        thread.start()
    eventually(lambda: len(answers) == 3)
    assert answers == [429] * 3
    assert server.get("/health").status_code == 200
    free.set()
    for thread in threads:
        thread.join()
    assert answers[3:] == [200] * service.MAX_PARSING


def test_the_log_gives_a_rate_only_where_it_means_something(start, caplog):
    """Of several choices, or prompts that waited for one another, tokens over time is nobody's speed."""
    caplog.set_level(logging.INFO, "headrace.requests")
    server = start(FakeEngine(step_s=0.01))
    for options, has_rate in (({}, True), ({"n": 2}, False), ({"prompt": ["a", "b"]}, False)):
        caplog.clear()
        server.post("/v1/completions", json={"prompt": "x", "max_tokens": 9, "ignore_eos": True} | options)
        eventually(lambda: "tokens_per_s=" in caplog.text)
        (rate,) = re.findall(r"tokens_per_s=(\S+)", caplog.text)
        assert (20 < float(rate) < 200) if has_rate else rate == "-"


def raise_for(server: RunningServer, engine: FakeEngine) -> None:
    """The client's own exception for it: one call runs, one waits, the third is refused."""
    client = server.client()
    streams = []
    for _ in range(3):
        streams.append(
            client.chat.completions.create(
                model="fake-model",
                stream=True,
                messages=ENDLESS["messages"],
                max_tokens=50,
                extra_body={"ignore_eos": True},
            )
        )
        eventually(lambda: engine.running)


def test_health_and_metrics_do_not_wait_for_a_long_step(start):
    server = start(FakeEngine(step_s=1.0))
    thread = threading.Thread(target=lambda: server.post("/v1/chat/completions", json=ENDLESS | {"max_tokens": 1}))
    thread.start()
    eventually(lambda: server.engine.running)
    for path in ("/health", "/ready", "/metrics"):
        start_s = time.monotonic()
        assert server.get(path).status_code == 200
        assert time.monotonic() - start_s < 0.1
    thread.join()


def test_a_drain_finishes_streams_and_refuses_new_calls(start):
    server = start(FakeEngine(step_s=0.01))
    stream = server.client().chat.completions.create(
        model="fake-model", stream=True, messages=ENDLESS["messages"], max_tokens=60, extra_body={"ignore_eos": True}
    )
    chunks = [next(iter(stream))]
    assert server.loop is not None
    drained = asyncio.run_coroutine_threadsafe(server.service.drain(10), server.loop)
    eventually(lambda: server.service.is_draining)
    for response in (server.get("/ready"), server.post("/v1/chat/completions", json=ENDLESS)):
        assert response.status_code == 503
        assert response.headers["retry-after"]
        assert response.json()["error"]["code"] == "shutting_down"
    assert server.get("/health").status_code == 200
    chunks += list(stream)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert drained.result(5) is True


def test_a_drain_that_takes_too_long_says_so_in_the_streams(start):
    server = start(FakeEngine(step_s=0.01))
    stream = server.client().chat.completions.create(
        model="fake-model", stream=True, messages=ENDLESS["messages"], extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert server.loop is not None
    drained = asyncio.run_coroutine_threadsafe(server.service.drain(0.05), server.loop)
    assert drained.result(5) is False
    with pytest.raises(openai.APIError, match="shut down"):
        list(stream)
    eventually(lambda: not server.engine.has_work)


@pytest.mark.parametrize("stream", [True, False])
def test_an_engine_that_fails_leaves_nobody_waiting(start, caplog, stream: bool):
    caplog.set_level(logging.CRITICAL, "headrace.engine")
    server = start(FakeEngine(step_s=0.005, fail_at_step=5))
    response = server.post("/v1/chat/completions", json=ENDLESS | {"stream": stream})
    if stream:
        assert response.status_code == 200
        error = json.loads(response.text.strip().split("\n\n")[-1].removeprefix("data: "))["error"]
        assert "[DONE]" not in response.text
    else:
        assert response.status_code == 500
        error = response.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "engine_failed")
    assert "a bug of the engine" in caplog.text, "with its traceback"
    assert "Traceback" in caplog.text
    for path in ("/health", "/ready"):
        assert server.get(path).status_code == 503
    assert server.post("/v1/chat/completions", json=ENDLESS).status_code == 503
    assert server.get("/metrics").status_code == 200
    assert 'headrace_requests_total{finish_reason="error"} 1.0' in server.get("/metrics").text


def test_an_engine_that_fails_at_submit(start):
    server = start()

    def broken(request: object) -> None:
        raise ZeroDivisionError

    server.engine.submit = broken  # type: ignore[method-assign]
    assert server.post("/v1/chat/completions", json=ENDLESS).status_code == 500
    assert server.get("/health").status_code == 503


def test_a_bug_in_a_handler_is_a_500_in_the_same_shape(start, caplog):
    server = start()
    server.service.deployment.tokenizer = None  # type: ignore[assignment]
    response = server.post("/v1/completions", json={"prompt": "x"})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"


def test_an_idle_engine_thread_sleeps(start):
    server = start()
    server.post("/v1/chat/completions", json={"messages": ENDLESS["messages"]})
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1
    assert server.engine.stats().num_running == 0


def test_one_wake_up_carries_the_whole_step(start, monkeypatch):
    server = start(FakeEngine(step_s=0.005))
    assert server.loop is not None
    batches: list[int] = []
    deliver = server.service.engine._deliver

    def spy(events: list) -> None:
        batches.append(len(events))
        deliver(events)

    monkeypatch.setattr(server.service.engine, "_deliver", spy)
    reply = server.client().chat.completions.create(
        model="fake-model", messages=ENDLESS["messages"], n=4, max_tokens=10, extra_body={"ignore_eos": True}
    )
    assert reply.usage.completion_tokens == 40
    assert len(batches) == server.engine.num_steps == 10
    assert batches[1:] == [4] * 9


def test_the_engine_thread_waits_for_a_gate_that_opens_by_itself():
    """A batch of one is formed when its window has passed; until then the thread sleeps, and nobody wakes it."""
    engine = small_engine(batching="window", batch_window_ms=150, batch_size=4)
    engine.clock = WallClock()
    num_steps = 0
    step = engine.step

    def count() -> list[TokenEvent]:
        nonlocal num_steps
        num_steps += 1
        return step()

    engine.step = count
    received: list[TokenEvent] = []

    class Sink:
        def push(self, event: TokenEvent) -> None:
            received.append(event)

        def fail(self, error: Exception) -> None:
            pass

    async def main() -> None:
        thread = EngineThread(engine)
        thread.start(asyncio.get_running_loop())
        await thread.submit([request("a", [1], max_tokens=3)], Sink())
        for _ in range(500):
            if received and received[-1].finish_reason:
                break
            await asyncio.sleep(0.01)
        thread.stop()

    asyncio.run(main())
    assert sum(len(event.tokens) for event in received) == 3
    assert received[0].queued_s > 0.14, "on the engine's clock, which the gate reads"
    assert num_steps <= 20
