"""A client that streams one reply after the other, in a process of its own: whatever makes a test's other requests
keeps the interpreter busy, for half a second at a time, and that is no gap of the server's."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import NamedTuple

import httpx

STREAM_TOKENS = 100
TIMEOUT_S = 30


class Streamed(NamedTuple):
    gaps_s: list[float]
    """Between tokens of one reply."""
    texts: list[str]
    """Of the replies; the last one may have been cut short."""
    errors: list[str]


class Healthy:
    """`streamed` has what came, once `running` is over."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.streamed = Streamed([], [], [])

    @contextmanager
    def running(self) -> Iterator[Healthy]:
        context = multiprocessing.get_context("spawn")
        is_over, (results, sender) = context.Event(), context.Pipe(duplex=False)
        process = context.Process(target=_stream, args=(self._url, is_over, sender))
        process.start()
        sender.close()
        try:
            assert results.recv() == "streaming"
            yield self
        finally:
            is_over.set()
            self.streamed = results.recv()
            process.join()


def _stream(url: str, is_over: Event, results: Connection) -> None:
    gaps_s, texts, errors = streamed = Streamed([], [], [])
    body = {"prompt": "Once upon a time", "max_tokens": STREAM_TOKENS, "temperature": 0, "stream": True}
    with httpx.Client(base_url=url, timeout=TIMEOUT_S, verify=False) as client:
        while not is_over.is_set():
            text, last_s = "", None
            with client.stream("POST", "/completions", json=body | {"ignore_eos": True}) as answer:
                for line in answer.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    now_s = time.monotonic()
                    if last_s is not None:
                        gaps_s.append(now_s - last_s)
                    elif not texts:
                        results.send("streaming")
                    last_s = now_s
                    chunk = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        errors.append(str(chunk))
                        break
                    text += chunk["choices"][0]["text"]
            texts.append(text)
    results.send(streamed)
