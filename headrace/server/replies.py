"""How a call is answered: the same generation, streamed or folded, given up as soon as its client has gone."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.core.errors import RequestError
from headrace.server.admission import Job
from headrace.server.errors import ApiError, as_api_error, in_words_of
from headrace.server.generation import Delta
from headrace.server.responses import DONE, Writer, event
from headrace.server.service import Generation, Service

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect chunks otherwise
]


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """The body of a call. Raises `ApiError` (413) once it is larger than `limit_bytes`, not after reading all of it."""
    declared = request.headers.get("content-length", "")
    body = bytearray()
    num_bytes = 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes <= limit_bytes:
            body += chunk
        elif num_bytes > 4 * limit_bytes:
            break  # a client that is still writing reads our answer only if we take its bytes; not without end
    if num_bytes > limit_bytes:
        raise ApiError(
            413,
            "body_too_large",
            f"The body has {declared or f'at least {num_bytes}'} bytes; at most {limit_bytes} are read.",
            headers={"Connection": "close"},
        )
    return bytes(body)


@dataclass(frozen=True, slots=True)
class Plan:
    """A parsed call, ready to be prepared and answered."""

    call_id: str
    num_requests: int
    prepare: Callable[[], Job]
    """Runs in the text pool."""
    names: Mapping[str, str]
    """The engine's names of parameters -> the client's, where they differ."""
    writer: Writer
    stream: bool
    arrival_s: float


class GenerationReply(Response):
    """An ASGI response that is the whole life of a call, from its admission to its last byte.

    Its client leaving cancels it wherever it stands: queued for a text thread, waiting for the engine, streaming.
    """

    def __init__(self, service: Service, plan: Plan) -> None:
        super().__init__()
        self._service = service
        self._plan = plan
        self._client_left = False
        self._is_complete = False
        """Nothing but the last bytes remains: a server reports the end of a response as a disconnect, too."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None, "an ASGI call runs in a task"
        watcher = asyncio.create_task(self._watch(receive, task))
        try:
            with self._service.call():
                await self._answer(send)
        except asyncio.CancelledError:
            if not self._client_left:
                raise
            task.uncancel()
        finally:
            watcher.cancel()

    async def _watch(self, receive: Receive, task: asyncio.Task[object]) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        if not self._is_complete:
            self._client_left = True
            task.cancel()

    async def _answer(self, send: Send) -> None:
        plan = self._plan
        with self._service.entering(plan.num_requests):
            try:
                job = await self._service.compile(await self._service.in_text_pool(plan.prepare))
                generation = await self._service.generate(plan.call_id, job, plan.arrival_s)
            except RequestError as error:
                raise in_words_of(error, plan.names) from error
        try:
            await (self._stream if plan.stream else self._whole)(generation, send)
        except BaseException as error:
            generation.close(error)
            raise
        generation.close()

    async def _stream(self, generation: Generation, send: Send) -> None:
        writer = self._plan.writer
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        try:
            while deltas := await generation.next():
                if data := writer.chunks(deltas):  # one write, however many choices got a token in this step
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            tail = writer.tail(generation.outcome)
            self._is_complete = True
            await send({"type": "http.response.body", "body": tail + DONE})
        except Exception as error:  # the status has been sent: all that is left is to say so in the stream
            generation.close(error)
            self._is_complete = True
            with contextlib.suppress(Exception):
                await send({"type": "http.response.body", "body": event(as_api_error(error).body())})

    async def _whole(self, generation: Generation, send: Send) -> None:
        deltas: list[Delta] = []
        while new := await generation.next():
            deltas += new
        outcome = generation.outcome
        if outcome.scored_prompts or outcome.pooled:  # megabytes of numbers, of a long prompt or many inputs
            body = await self._service.in_text_pool(self._plan.writer.whole, deltas, outcome)
        else:
            body = self._plan.writer.whole(deltas, outcome)
        self._is_complete = True
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def arrival() -> float:
    """Now, on the clock of all latencies (the engine's own in a server): `time.monotonic`."""
    return time.monotonic()
