"""Headrace in this process: a deployment on an engine thread, without HTTP and without text."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from headrace.bench.results import RequestResult
from headrace.core.errors import HeadraceError, RequestError
from headrace.core.events import TokenEvent
from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.server.build import Deployment
from headrace.server.engine_thread import EngineThread
from headrace.sim.workload import PlannedRequest


class InProcessTarget:
    """An engine on a thread of its own. Tokens are stamped by the engine's clock when their step is committed."""

    measures_client = False

    def __init__(self, name: str, load: Callable[[], Deployment], settings: dict[str, Any] | None = None) -> None:
        """`load` builds the deployment when the target is opened; `settings` are told in the report."""
        self.name = name
        self.max_tokens: int | None = None
        self._load = load
        self._settings = settings or {}
        self._deployment: Deployment | None = None
        self._thread: EngineThread | None = None
        self._replies: list[_Reply] = []
        self._num_runs = 0

    async def open(self) -> None:
        self._deployment = self._load()
        self.max_tokens = self._deployment.context_length
        self._thread = EngineThread(self._deployment.engine)
        self._thread.start(asyncio.get_running_loop())

    async def prepare(self, requests: Sequence[PlannedRequest]) -> None:
        self._replies = []
        self._num_runs += 1

    async def send(self, request: PlannedRequest) -> None:
        assert self._thread is not None, "open() comes first"
        reply = _Reply(request)
        self._replies.append(reply)
        engine_request = Request(
            id=f"bench-{self._num_runs}-{request.index}",
            prompt=request.prompt,
            # Without stop tokens: exactly the planned number of tokens.
            sampling=SamplingParams(max_tokens=request.num_output, temperature=0.0),
            tenant=request.tenant,
            cache_salt=request.tenant,  # as the server does: prefixes are a tenant's own
        )
        try:
            await self._thread.submit([engine_request], reply)
            await reply.done
        except HeadraceError as error:  # refused, or the engine has died
            reply.fail(error)
        finally:
            self._thread.release([engine_request])

    def results(self) -> list[RequestResult]:
        return [reply.result() for reply in sorted(self._replies, key=lambda reply: reply.request.index)]

    def describe(self) -> dict[str, Any]:
        assert self._deployment is not None, "open() comes first"
        return {"kind": "in process", "model": self._deployment.name, **self._settings}

    async def close(self) -> None:
        if self._thread is not None:
            self._thread.stop()
        self._thread = self._deployment = None


class _Reply:
    """An `EventSink` that keeps what comes."""

    def __init__(self, request: PlannedRequest) -> None:
        self.request = request
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._start_s = time.monotonic()
        self._events: list[TokenEvent] = []
        self._error: Exception | None = None

    def push(self, event: TokenEvent) -> None:
        self._events.append(event)
        if event.finish_reason is not None and not self.done.done():
            self.done.set_result(None)

    def fail(self, error: Exception) -> None:
        self._error = error
        if not self.done.done():
            self.done.set_result(None)

    def result(self) -> RequestResult:
        request = self.request
        if self._error is not None:
            kind = self._error.code if isinstance(self._error, RequestError) else type(self._error).__name__
            return RequestResult(
                request.index, self._start_s, tenant=request.tenant, error=kind, detail=str(self._error)
            )
        times = tuple(event.time_s for event in self._events for _ in event.tokens)
        return RequestResult(
            index=request.index,
            start_s=self._start_s,
            token_times_s=times,
            num_prompt=len(request.prompt),
            num_output=len(times),
            num_cached=max((event.num_cached for event in self._events), default=0),
            tenant=request.tenant,
        )
