"""A workload on an engine with a virtual clock: a discrete-event simulation whose decisions are the engine's own.

Two kinds of events: a request is sent, and a step ends. Requests enter between steps, as they do in a real engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Protocol

from headrace.core.clock import Clock
from headrace.core.errors import Overloaded, RequestError
from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.core.sequence import FinishReason
from headrace.engine.engine import Engine
from headrace.sim.workload import Chain, PlannedRequest, Workload


class SkippingClock(Clock, Protocol):
    def advance_to(self, time_s: float) -> None:
        """Pass over a time in which nothing happens."""
        ...


class Timed(Protocol):
    """The clock of an engine, and until when nothing will come: a `SimExecutor`, or what measures a real one."""

    until_s: float

    @property
    def clock(self) -> SkippingClock: ...


@dataclass(slots=True)
class Reply:
    """What became of a planned request. Times on the virtual clock."""

    request: PlannedRequest
    sent_s: float
    token_times_s: list[float] = field(default_factory=list, repr=False)
    num_cached: int = 0
    queued_s: float = 0.0
    error: RequestError | None = None
    """It was refused, or dropped."""


def replay(
    engine: Engine,
    executor: Timed,
    workload: Workload,
    each_step: Callable[[], None] = lambda: None,
    *,
    lengths: dict[str, int] | None = None,
    max_tokens: int = 0,
    stop_token: int = -1,
) -> list[Reply]:
    """Send the workload's requests at their times, or as places become free, until all have ended.

    `engine` runs on `executor` and its clock. `each_step` is called after every step. Each request asks for exactly as
    many tokens as its reply will have; or, with `lengths` (the mapping that the `SimExecutor` was given, filled here),
    for `max_tokens`, and the engine learns its end when `stop_token` comes. Returns the replies in the order of
    sending; the same arguments give the same ones.
    """
    open_ended = SamplingParams(max_tokens=max_tokens, temperature=0.0, stop_token_ids=frozenset({stop_token}))
    return _Replay(engine, executor, workload, lengths, open_ended).run(each_step)


class _Replay:
    def __init__(
        self,
        engine: Engine,
        executor: Timed,
        workload: Workload,
        lengths: dict[str, int] | None,
        open_ended: SamplingParams,
    ) -> None:
        self._lengths = lengths
        self._open_ended = open_ended
        self._engine = engine
        self._executor = executor
        self._clock = executor.clock
        self._due: list[tuple[float, int, Chain, int]] = []  # (time, order, chain, turn)
        self._order = count()
        self._sampling: dict[int, SamplingParams] = {}  # output tokens -> greedy, of that length: made once
        self._waiting: Iterator[Chain] = iter(())
        self._open: dict[str, tuple[Reply, Chain, int]] = {}
        self._replies: list[Reply] = []
        start_s = self._clock.now()
        if workload.concurrency is None:
            for chain in workload.chains:
                self._plan(start_s + (chain[0].arrival_s or 0.0), chain, 0)
        else:  # closed loop: each place takes the next chain when its own has ended
            self._waiting = iter(workload.chains)
            for _ in range(min(workload.concurrency, len(workload.chains))):
                self._plan(start_s, next(self._waiting), 0)

    def run(self, each_step: Callable[[], None]) -> list[Reply]:
        engine, clock, due, is_open = self._engine, self._clock, self._due, self._open
        while due or engine.has_work:
            now = clock.now()
            while due and due[0][0] <= now:
                self._send(*heappop(due))
            next_s = due[0][0] if due else math.inf
            if not engine.has_work:
                if due:
                    clock.advance_to(next_s)
                continue
            self._executor.until_s = next_s
            events = engine.step()
            if not events and engine.wake_s is not None:  # a gate waits for the time to come
                clock.advance_to(min(engine.wake_s, next_s))
            for event in events:
                reply, chain, turn = is_open[event.request_id]
                if event.tokens:
                    reply.token_times_s.append(event.time_s)
                if event.finish_reason is not None:
                    if event.finish_reason is FinishReason.LATE:
                        reply.error = Overloaded("deadline_missed", event.error or "")
                    reply.num_cached, reply.queued_s = event.num_cached, event.queued_s
                    del is_open[event.request_id]
                    self._ended(chain, turn)
            each_step()
        return self._replies

    def _plan(self, time_s: float, chain: Chain, turn: int) -> None:
        heappush(self._due, (time_s, next(self._order), chain, turn))

    def _send(self, due_s: float, order: int, chain: Chain, turn: int) -> None:
        planned = chain[turn]
        reply = Reply(planned, due_s)
        self._replies.append(reply)
        id, sampling = f"{order}", self._sampling_of(planned.num_output)
        if self._lengths is not None:
            self._lengths[id], sampling = planned.num_output, self._open_ended
        request = Request(
            id=id,
            prompt=planned.prompt,
            sampling=sampling,
            tenant=planned.tenant,
            cache_salt=planned.tenant,  # as the server does: prefixes are a tenant's own
        )
        try:
            self._engine.submit(request)
        except RequestError as error:
            reply.error = error
            self._ended(chain, turn)
        else:
            self._open[request.id] = (reply, chain, turn)

    def _ended(self, chain: Chain, turn: int) -> None:
        """What was to come after this turn."""
        now = self._clock.now()
        if turn + 1 < len(chain):
            self._plan(now + chain[turn + 1].think_s, chain, turn + 1)
        elif (following := next(self._waiting, None)) is not None:
            self._plan(now, following, 0)

    def _sampling_of(self, num_output: int) -> SamplingParams:
        found = self._sampling.get(num_output)
        if found is None:
            found = self._sampling[num_output] = SamplingParams(max_tokens=num_output, temperature=0.0)
        return found
