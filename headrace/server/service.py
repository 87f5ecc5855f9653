"""What stands between the HTTP handlers and the engine: one `Service` per server, one `Generation` per API call."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from msgspec import UNSET, UnsetType

from headrace.core.events import TokenEvent
from headrace.core.sequence import FinishReason
from headrace.server.admission import Job
from headrace.server.engine_thread import EngineFailure, EngineThread
from headrace.server.errors import ApiError, bad_request
from headrace.server.generation import Delta, TextStage
from headrace.server.limits import CallLimits
from headrace.server.metrics import Metrics
from headrace.server.responses import (
    CompletionTokensDetails,
    Outcome,
    PromptTokensDetails,
    ScoredPrompt,
    Timings,
    Usage,
)

if TYPE_CHECKING:
    from headrace.server.build import Deployment

request_log = logging.getLogger("headrace.requests")

P = ParamSpec("P")
T = TypeVar("T")

TEXT_THREADS = 2
GRAMMAR_THREADS = 1
"""A constraint may take seconds to be refused: such must not hold up prompts."""
MAX_PARSING = 16
"""Large bodies that may wait to be parsed: no call is counted before it is parsed, and each holds its body."""


class Service:
    """A deployment, the thread that runs its engine, and what is open on it. Used from the event loop only."""

    def __init__(self, deployment: Deployment, limits: CallLimits, aliases: tuple[str, ...] = ()) -> None:
        self.deployment = deployment
        self.limits = limits
        self.names = tuple(dict.fromkeys((deployment.name, *aliases)))
        self.engine = EngineThread(deployment.engine)
        self.metrics = Metrics(self.engine, deployment.count_threads)
        self.created = int(time.time())
        self.is_draining = False
        self._pool = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="headrace-text")
        self._grammar_pool = ThreadPoolExecutor(GRAMMAR_THREADS, thread_name_prefix="headrace-grammar")
        self._num_calls = 0
        self._num_entering = 0
        """Requests on their way to the engine's queue, which its snapshot does not count yet."""
        self._num_parsing = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._generations: set[Generation] = set()

    def start(self) -> None:
        self.engine.start(asyncio.get_running_loop())

    def stop(self) -> None:
        self.engine.stop()
        for pool in (self._pool, self._grammar_pool):
            pool.shutdown(wait=False, cancel_futures=True)
        self.deployment.grammars.close()

    @property
    def num_calls(self) -> int:
        """Calls being answered."""
        return self._num_calls

    # One call.

    async def in_text_pool(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """For work that grows with a prompt."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: function(*args, **kwargs))

    async def compile(self, job: Job) -> Job:
        """With the grammar that its replies have to follow. Raises `RequestError` for one that cannot be compiled."""
        if job.rule is None:
            return job
        loop = asyncio.get_running_loop()
        rule, deployment = job.rule, self.deployment
        grammar = await loop.run_in_executor(self._grammar_pool, rule.compile, deployment)
        return replace(job, requests=tuple(rule.of(request, grammar, deployment) for request in job.requests))

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around all a call does; a drain waits for its end. Raises `ApiError` (503) where none can begin."""
        if self.is_draining:
            raise ApiError(503, "shutting_down", "The server is shutting down; try again shortly.", retry_after_s=5)
        if not self.engine.is_alive:
            raise ApiError(503, "engine_failed", "The engine has failed and the server must be restarted.")
        self._num_calls += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_calls -= 1
            if self._num_calls == 0:
                self._idle.set()

    @contextmanager
    def parsing(self) -> Iterator[None]:
        """Around the parsing of a body in the text pool. Raises `ApiError` (429) where too many wait for that."""
        if self._num_parsing >= MAX_PARSING:
            raise ApiError(
                429,
                "too_many_large_bodies",
                f"{self._num_parsing} large requests are being parsed already; try again shortly.",
                retry_after_s=1,
            )
        self._num_parsing += 1
        try:
            yield
        finally:
            self._num_parsing -= 1

    @contextmanager
    def entering(self, num_requests: int) -> Iterator[None]:
        """From the parsed call to the engine's verdict (or to its tokens, where only these are wanted).

        Raises `ApiError` (429) when the queue is full by the last snapshot: refusing must not cost a tokenization.
        The engine has the last word when the request arrives there.
        """
        stats = self.engine.stats
        free = stats.num_places - self._num_entering
        if num_requests > free:
            raise ApiError(
                429,
                "queue_full",
                f"{stats.num_waiting + self._num_entering} requests are waiting, which leaves room for {max(0, free)}; "
                "try again later or send fewer at once.",
                retry_after_s=1,
            )
        self._num_entering += num_requests
        try:
            yield
        finally:
            self._num_entering -= num_requests

    async def generate(self, call_id: str, job: Job, arrival_s: float) -> Generation:
        """Submit a job. The caller closes the generation. Raises `RequestError` where the engine refuses."""
        generation = Generation(self, call_id, job, arrival_s)
        if job.only_echo:
            for request in job.requests:
                generation.push(TokenEvent(request.id, 0, finish_reason=FinishReason.LENGTH))
            return generation
        try:
            generation.submitted_s = await self.engine.submit(job.requests, generation)
        except EngineFailure as error:
            raise _as_server_error(error) from error
        self._generations.add(generation)
        return generation

    def closed(self, generation: Generation) -> None:
        self._generations.discard(generation)

    # The end.

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new calls and wait for the open ones; those that take longer are aborted. True: all finished."""
        self.is_draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
            return True
        except TimeoutError:
            self.abort_all()
            return False

    def abort_all(self) -> None:
        for generation in tuple(self._generations):
            generation.fail(ApiError(503, "shutting_down", "The server shut down before this reply was complete."))


class Generation:
    """The replies to one API call: `next` gives the deltas since the last time, until there are none.

    An `EventSink`. Events wait here while the client is slow to read; the number of tokens asked for bounds them.
    """

    def __init__(self, service: Service, call_id: str, job: Job, arrival_s: float) -> None:
        self._service = service
        self._call_id = call_id
        self._job = job
        self._arrival_s = arrival_s
        tokenizer = service.deployment.tokenizer
        self._stages = {
            request.id: TextStage(request, tokenizer, options, first_choice=i * job.num_choices)
            for i, (request, options) in enumerate(zip(job.requests, job.text, strict=True))
        }
        self._events: list[TokenEvent] = []
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._num_open = len(job.requests) * job.num_choices
        self._token_s: dict[int, float] = {}
        """Choice -> time of its last token."""
        self.submitted_s = arrival_s
        """When the engine took the requests."""
        self._first_token_s: float | None = None
        self._first_event: TokenEvent | None = None
        """With the first token; without any, the end."""
        self._last_s = 0.0
        """Of the last end of a choice, on the engine's clock."""
        self._finish_reasons: list[str] = []
        self._is_closed = False

    def push(self, event: TokenEvent) -> None:
        self._events.append(event)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, error: Exception) -> None:
        self._error = error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> list[Delta]:
        """Deltas in the order of their tokens; empty when all choices are over. Raises when the engine gives up."""
        while self._num_open:
            if self._error is not None:
                raise _as_server_error(self._error)
            if self._events:
                if deltas := self._read():
                    return deltas
            else:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
        return []

    def _read(self) -> list[Delta]:
        events, self._events = self._events, []
        now = time.monotonic()
        deltas = []
        for event in events:
            delta = self._stages[event.request_id].push(event)
            if delta is None:
                continue
            if delta.cut:
                self._service.engine.abort(event.request_id, event.choice)
            if delta.tokens:
                self._note_tokens(delta, event, now)
            if delta.finish_reason is not None:
                if delta.finish_reason == "abort":  # not by us: we would not be reading any more
                    raise ApiError(503, "aborted", "The server aborted this reply.", retry_after_s=1)
                if delta.finish_reason == "late":
                    message = f"The reply was not begun: {event.error}."
                    raise ApiError(429, "deadline", message, param="deadline_ms", retry_after_s=1)
                if delta.finish_reason == "error":
                    raise bad_request("reply_failed", f"The reply cannot go on: {event.error}.")
                self._num_open -= 1
                self._first_event = self._first_event or event
                self._last_s = event.time_s
                self._finish_reasons.append(delta.finish_reason)
            deltas.append(delta)
        return deltas

    def _note_tokens(self, delta: Delta, event: TokenEvent, now: float) -> None:
        metrics = self._service.metrics
        if self._first_token_s is None:
            self._first_token_s = now
            self._first_event = event
            metrics.time_to_first_token.observe(now - self._arrival_s)
            metrics.queue.observe(event.queued_s)
        before = self._token_s.get(delta.choice)
        if before is not None:
            metrics.inter_token.observe((now - before) / len(delta.tokens))
        self._token_s[delta.choice] = now

    @property
    def usage(self) -> Usage:
        num_prompt = self._job.num_prompt_tokens
        num_generated = sum(stage.num_generated for stage in self._stages.values())
        cached = PromptTokensDetails(sum(stage.num_cached for stage in self._stages.values()))
        drafts: CompletionTokensDetails | UnsetType = UNSET
        if num_drafts := sum(stage.num_drafts for stage in self._stages.values()):
            num_accepted = sum(stage.num_accepted for stage in self._stages.values())
            drafts = CompletionTokensDetails(num_accepted, num_drafts - num_accepted)
        return Usage(num_prompt, num_generated, num_prompt + num_generated, cached, drafts)

    @property
    def outcome(self) -> Outcome:
        means = {choice: mean for stage in self._stages.values() for choice, mean in stage.mean_logprobs.items()}
        scored = [
            ScoredPrompt(request.prompt, self._stages[request.id].prompt_logprobs, self._job.num_prompt_top)
            for request in self._job.requests
            if self._job.num_prompt_top is not None
        ]
        pooled = [stage.pooled for stage in self._stages.values() if stage.pooled is not None]
        return Outcome(self.usage, means, scored, self._timings() if self._job.timings else UNSET, pooled)

    def _timings(self) -> Timings:
        first, usage = self._first_event, self.usage
        if first is None or self._job.only_echo:
            return Timings(0.0, 0.0, 0.0, 0, None)
        decode_s = self._last_s - first.time_s
        num_decoded = usage.completion_tokens - self._job.num_choices  # the first token of each choice ends the prefill
        return Timings(
            queue_ms=1e3 * first.queued_s,
            prefill_ms=1e3 * max(0.0, first.time_s - first.queued_s - self.submitted_s),
            decode_ms=1e3 * decode_s,
            cached_tokens=usage.prompt_tokens_details.cached_tokens,
            tokens_per_second=num_decoded / decode_s if decode_s > 0 and num_decoded > 0 else None,
        )

    def close(self, error: BaseException | None = None) -> None:
        """Give up what is unfinished, and account for the call, once. `error`: what ended it early, if anything did."""
        if self._is_closed:
            return
        self._is_closed = True
        service = self._service
        service.engine.release(self._job.requests)
        service.closed(self)
        if self._num_open:
            for request in self._job.requests:
                if self._stages[request.id].num_open:
                    service.engine.abort(request.id)
            cancelled = error is None or isinstance(error, asyncio.CancelledError)
            self._finish_reasons += ["abort" if cancelled else "error"] * self._num_open
        now = time.monotonic()
        for reason in self._finish_reasons:
            service.metrics.requests.labels(finish_reason=reason).inc()
        service.metrics.duration.observe(now - self._arrival_s)
        self._log(now)

    def _log(self, now: float) -> None:
        usage = self.usage
        first = self._first_token_s
        ttft_ms = f"{(first - self._arrival_s) * 1e3:.1f}" if first is not None else "-"
        rate = "-"  # of several choices it would be their sum, over a time that some of them waited
        is_single = len(self._job.requests) * self._job.num_choices == 1
        if is_single and first is not None and usage.completion_tokens > 1 and now > first:
            rate = f"{(usage.completion_tokens - 1) / (now - first):.1f}"
        request_log.info(
            "request id=%s prompt_tokens=%d cached_tokens=%d generated_tokens=%d ttft_ms=%s tokens_per_s=%s "
            "duration_ms=%.1f finish=%s",
            self._call_id,
            usage.prompt_tokens,
            usage.prompt_tokens_details.cached_tokens,
            usage.completion_tokens,
            ttft_ms,
            rate,
            (now - self._arrival_s) * 1e3,
            ",".join(self._finish_reasons) or "none",
        )


def _as_server_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    return ApiError(
        500, "engine_failed", "The engine failed while it worked on this request; the server's log says why."
    )
