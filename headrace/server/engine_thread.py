"""The engine loop on a thread of its own, and the two bridges between it and asyncio.

    event loop --inbox (submit, abort)--> engine thread --call_soon_threadsafe--> event loop

The engine is touched by its thread only. Messages are read between steps; one wake-up of the event loop per step
carries all events of the step. Nothing on the event loop ever waits for a step: `stats` is a snapshot the thread
replaces, and health is a field.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from headrace.core.errors import HeadraceError, RequestError
from headrace.core.events import TokenEvent
from headrace.core.request import Request

if TYPE_CHECKING:
    from headrace.engine.engine import Engine, EngineStats

log = logging.getLogger("headrace.engine")


class EngineFailure(HeadraceError):
    """The engine died of a bug: what it was computing is lost and the server must be restarted."""


class EventSink(Protocol):
    """Where the events of some requests go. Called on the event loop."""

    def push(self, event: TokenEvent) -> None: ...

    def fail(self, error: Exception) -> None:
        """No further event will come."""
        ...


@dataclass(frozen=True, slots=True)
class _Submit:
    requests: Sequence[Request]
    verdict: asyncio.Future[float]


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str
    choice: int | None


class EngineThread:
    """Runs an engine. `start` and `stop` once each; everything else from the event loop in between."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inbox: deque[_Submit | _Abort] = deque()  # guarded by _wake
        self._wake = threading.Condition()
        self._stopping = False  # guarded by _wake
        self._sinks: dict[str, EventSink] = {}  # request id -> sink; event loop only
        self._undecided: set[asyncio.Future[float]] = set()  # submitted, not yet read by the engine; event loop only
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="headrace-engine", daemon=True)
        self.stats: EngineStats = engine.stats()
        """As of the last step."""
        self.failure: BaseException | None = None
        """The bug that ended the engine; None while it lives."""

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its current step. Requests still open fail."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()
        self._fail_all(EngineFailure("the engine was stopped"))

    @property
    def is_alive(self) -> bool:
        return self.failure is None and self._thread.is_alive()

    async def submit(self, requests: Sequence[Request], sink: EventSink) -> float:
        """Hand over requests, all or none; `sink` gets their events until `release`. Returns when the engine took them.

        Raises the engine's `RequestError` for the first one refused, `EngineFailure` when the engine is gone.
        """
        if not self.is_alive:
            raise EngineFailure("the engine is not running")
        verdict = asyncio.get_running_loop().create_future()
        self._undecided.add(verdict)
        for request in requests:
            self._sinks[request.id] = sink
        self._post(_Submit(requests, verdict))
        try:
            return await verdict
        except BaseException as error:
            self.release(requests)
            if isinstance(error, asyncio.CancelledError):  # the engine may have taken them already
                for request in requests:
                    self.abort(request.id)
            raise
        finally:
            self._undecided.discard(verdict)

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """Stop a choice, or all of a request. Unknown or finished ones are nothing to the engine."""
        self._post(_Abort(request_id, choice))

    def release(self, requests: Sequence[Request]) -> None:
        """Drop whatever else comes for these requests."""
        for request in requests:
            self._sinks.pop(request.id, None)

    def _post(self, message: _Submit | _Abort) -> None:
        with self._wake:
            self._inbox.append(message)
            self._wake.notify()

    def _deliver(self, events: list[TokenEvent]) -> None:
        for event in events:
            sink = self._sinks.get(event.request_id)
            if sink is not None:
                sink.push(event)

    def _fail_all(self, error: Exception) -> None:
        _resolve([(verdict, error) for verdict in self._undecided])
        for sink in dict.fromkeys(self._sinks.values()):
            sink.fail(error)
        self._sinks.clear()

    # On the engine thread.

    def _run(self) -> None:
        assert self._loop is not None, "start() sets it before the thread runs"
        try:
            while (messages := self._take()) is not None:
                if messages:
                    self._read(messages)
                events = self._engine.step()
                self.stats = self._engine.stats()
                if events:
                    self._loop.call_soon_threadsafe(self._deliver, events)
        except BaseException as error:  # a bug, whatever it was: nobody may be left waiting
            self.failure = error
            log.critical("The engine failed on a bug and is stopped; restart the server.", exc_info=error)
            failure = EngineFailure(f"the engine failed: {type(error).__name__}")
            self._loop.call_soon_threadsafe(self._fail_all, failure)

    def _take(self) -> list[_Submit | _Abort] | None:
        """The messages since the last step; sleeps while there is nothing to do. None: the end."""
        with self._wake:
            while not self._inbox and not self._stopping:
                wake_s = self._engine.wake_s
                if self._engine.has_work and wake_s is None:
                    break
                self._wake.wait(None if wake_s is None else max(0.0, wake_s - time.monotonic()))
            if self._stopping:
                return None
            messages = list(self._inbox)
            self._inbox.clear()
            return messages

    def _read(self, messages: list[_Submit | _Abort]) -> None:
        assert self._loop is not None, "start() sets it before the thread runs"
        verdicts: list[tuple[asyncio.Future[float], RequestError | float]] = []
        for message in messages:
            if isinstance(message, _Abort):
                self._engine.abort(message.request_id, message.choice)
            else:
                verdicts.append((message.verdict, self._submit(message.requests)))
        self.stats = self._engine.stats()
        if verdicts:  # now, not after the step: a refusal should not wait for somebody's long prompt
            self._loop.call_soon_threadsafe(_resolve, verdicts)

    def _submit(self, requests: Sequence[Request]) -> RequestError | float:
        now = time.monotonic()
        for i, request in enumerate(requests):
            try:
                self._engine.submit(request)
            except RequestError as error:
                for accepted in requests[:i]:
                    self._engine.abort(accepted.id)
                return error
        return now


def _resolve(verdicts: Iterable[tuple[asyncio.Future[float], Exception | float]]) -> None:
    for future, verdict in verdicts:
        if future.done():  # its caller has gone
            continue
        if isinstance(verdict, Exception):
            future.set_exception(verdict)
        else:
            future.set_result(verdict)
