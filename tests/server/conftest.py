"""A real uvicorn on 127.0.0.1 around the fake deployment."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from headrace.server.app import create_app
from headrace.server.service import Service
from tests.server.fakes import FakeEngine, make_deployment


class RunningServer:
    """The app on a thread of its own; `engine` is the fake behind it."""

    def __init__(self, engine: FakeEngine, vocab_size: int | None = None, **options: Any) -> None:
        self.engine = engine
        deployment = make_deployment(engine, vocab_size)
        self.app = create_app(deployment, **options)
        self.service: Service = self.app.state.service
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        config = uvicorn.Config(self.app, loop="uvloop", http="httptools", ws="none", log_config=None, access_log=False)
        self._server = uvicorn.Server(config)
        self.loop: asyncio.AbstractEventLoop | None = None
        self._http = httpx.Client(timeout=20, verify=False, trust_env=False)  # one: certificates take 70 ms to load
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        eventually(lambda: self._server.started)

    def _run(self) -> None:
        async def main() -> None:
            self.loop = asyncio.get_running_loop()
            await self._server.serve(sockets=[self._listener])

        with asyncio.Runner(loop_factory=self._server.config.get_loop_factory()) as runner:
            runner.run(main())

    def client(self, **options: Any) -> openai.OpenAI:
        options = {"api_key": "none", "max_retries": 0, "http_client": self._http, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", **options)

    def post(self, path: str, **options: Any) -> httpx.Response:
        return self.request("POST", path, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.request("GET", path, **options)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        return self._http.request(method, self.url + path, **options)

    def stop(self) -> None:
        self._http.close()
        self._server.should_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive()


def eventually(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"not within {timeout_s} s"
        time.sleep(0.002)


@pytest.fixture
def start() -> Iterator[Callable[..., RunningServer]]:
    """`start(engine, **create_app_options)` -> a server that stops with the test."""
    with contextlib.ExitStack() as stack:

        def begin(engine: FakeEngine | None = None, **options: Any) -> RunningServer:
            server = RunningServer(engine or FakeEngine(), **options)
            stack.callback(server.stop)
            return server

        yield begin


@pytest.fixture(scope="module")
def shared() -> Iterator[RunningServer]:
    """One server for tests that leave it as they found it."""
    server = RunningServer(FakeEngine())
    yield server
    server.stop()
