"""The Python face: a model in this process, without a server.

with LLM() as llm:
    for piece in llm.stream("Once upon a time"):
        print(piece, end="")
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, overload

from headrace.core.errors import HeadraceError, InternalError, InvalidRequest, RequestError
from headrace.core.events import TokenEvent
from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.models.catalogue import DEFAULT_MODEL
from headrace.models.progress import Progress
from headrace.server.build import ServeConfig, build
from headrace.server.engine_thread import EngineFailure
from headrace.server.generation import Delta, ScoredToken, TextOptions, TextStage
from headrace.text.chat import encode_chat

if TYPE_CHECKING:
    from headrace.engine.engine import Engine

Prompt = str | Sequence[int]
"""Text (its control tokens are parsed, the model's BOS is added) or token ids as they are."""
Messages = Sequence[Mapping[str, str]]
"""`{"role": ..., "content": ...}`, the last one usually the user's."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole reply."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    """"stop" or "length"."""
    prompt_tokens: tuple[int, ...]
    num_cached: int
    """Prompt tokens that were found in the prefix cache."""
    scored: tuple[ScoredToken, ...] = ()
    """The tokens with their logprobs, where `num_logprobs` is set."""


class Piece(str):
    """A piece of a reply: a `str`, with the delta it came from."""

    delta: Delta
    __slots__ = ("delta",)

    def __new__(cls, delta: Delta) -> Piece:
        piece = super().__new__(cls, delta.text)
        piece.delta = delta
        return piece


class LLM:
    """A loaded model. Several threads may call it: whoever waits for tokens runs the next step for all.

    `model` is a catalogue name, a path or a hub id; `options` are the fields of `ServeConfig`. Without a `seed` of
    their own, `SamplingParams` have seed 0: the same call gives the same reply. `stop`, a string or several, ends a
    reply before any of them; the model's end-of-sequence tokens end it too unless `ignore_eos`.

    A bug that ends the engine fails every open call, and all further ones, with `EngineFailure`.
    """

    def __init__(self, model: str | Path = DEFAULT_MODEL, *, progress: Progress | None = None, **options: Any) -> None:
        self._deployment = build(ServeConfig(model=str(model), **options), progress)
        self._lock = threading.Lock()  # guards the engine, the inboxes and the failure
        self._inboxes: dict[str, list[TokenEvent]] = {}
        self._ids = itertools.count()
        self._is_closed = False
        self._failure: BaseException | None = None
        """The bug that ended the engine."""

    @property
    def name(self) -> str:
        return self._deployment.name

    @property
    def context_length(self) -> int:
        """Tokens of prompt and reply together."""
        return self._deployment.context_length

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Abort what is running. Further calls raise `HeadraceError`."""
        with self._lock:
            self._is_closed = True
            for request_id in self._inboxes if self._failure is None else ():
                self._deployment.engine.abort(request_id)
            self._inboxes.clear()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
    ) -> list[Completion]:
        """Continue each prompt, all in one batch. `params`: for all, or one per prompt.

        Raises `RequestError` for a prompt that cannot be served; nothing of the batch goes on then.
        """
        batch = _as_batch(prompts)
        return self._complete([self._encode(prompt) for prompt in batch], params, stop, ignore_eos)

    @overload
    def chat(
        self, messages: Messages, params: SamplingParams | None = None, *, stop: str | Sequence[str] = ...
    ) -> Completion: ...

    @overload
    def chat(
        self,
        messages: Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: str | Sequence[str] = ...,
    ) -> list[Completion]: ...

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: str | Sequence[str] = (),
    ) -> Completion | list[Completion]:
        """The reply to a conversation, or to each of several. Raises as `generate`, and `TemplateError`."""
        if messages and isinstance(messages[0], Mapping):
            return self._complete([self._encode_chat(messages)], params, stop, False)[0]  # type: ignore[arg-type]
        conversations = [self._encode_chat(each) for each in messages]  # type: ignore[arg-type]
        return self._complete(conversations, params, stop, False)

    def stream(
        self,
        prompt: Prompt | Messages,
        params: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
    ) -> Iterator[Piece]:
        """The reply piece by piece. Closing the iterator early aborts the rest."""
        is_chat = not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], Mapping)
        encode: Callable[[Any], tuple[int, ...]] = self._encode_chat if is_chat else self._encode
        run = self._submit([encode(prompt)], [params or SamplingParams()], stop, ignore_eos)
        try:
            for _, delta in self._deltas(run):
                if delta.text or delta.finish_reason or delta.scored:
                    yield Piece(delta)
        finally:
            self._give_up(run)

    # The way of one call.

    def _complete(
        self,
        prompts: list[tuple[int, ...]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        stop: str | Sequence[str],
        ignore_eos: bool,
    ) -> list[Completion]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"there are {len(params)} params for {len(prompts)} prompts; give one, or one for each")
        run = self._submit(prompts, params, stop, ignore_eos)
        deltas: dict[str, list[Delta]] = {request_id: [] for request_id in run}
        try:
            for request_id, delta in self._deltas(run):
                deltas[request_id].append(delta)
        finally:
            self._give_up(run)
        return [
            Completion(
                text="".join(delta.text for delta in deltas[request_id]),
                tokens=tuple(token for delta in deltas[request_id] for token in delta.tokens),
                finish_reason=deltas[request_id][-1].finish_reason or "",
                prompt_tokens=prompt,
                num_cached=stage.num_cached,
                scored=tuple(token for delta in deltas[request_id] for token in delta.scored),
            )
            for prompt, (request_id, stage) in zip(prompts, run.items(), strict=True)
        ]

    def _submit(
        self,
        prompts: list[tuple[int, ...]],
        params: Sequence[SamplingParams],
        stop: str | Sequence[str],
        ignore_eos: bool,
    ) -> dict[str, TextStage]:
        tokenizer = self._deployment.tokenizer
        stops = check_stops(stop)
        run: dict[str, TextStage] = {}
        try:
            for prompt, given in zip(prompts, params, strict=True):
                ends = frozenset() if ignore_eos else self._deployment.eos_ids
                sampling = replace(given, stop_token_ids=given.stop_token_ids | ends)
                options = TextOptions(stops, sampling.min_tokens, sampling.num_logprobs is not None)
                request = Request(f"llm-{next(self._ids)}", prompt, sampling)
                with self._engine() as engine:
                    engine.submit(request)
                    self._inboxes[request.id] = []
                run[request.id] = TextStage(request, tokenizer, options)
        except BaseException:
            self._give_up(run)
            raise
        return run

    def _deltas(self, run: Mapping[str, TextStage]) -> Iterator[tuple[str, Delta]]:
        """(request id, delta) until all of the run's requests are over; steps the engine whenever nothing is here."""
        while any(stage.num_open for stage in run.values()):
            for event in self._wait(run):
                delta = run[event.request_id].push(event)
                if delta is None:
                    continue
                if delta.cut:
                    with self._engine() as engine:
                        engine.abort(event.request_id)
                yield event.request_id, delta

    def _wait(self, run: Mapping[str, TextStage]) -> list[TokenEvent]:
        with self._engine() as engine:
            if not any(self._inboxes[request_id] for request_id in run):  # another thread may have run our step
                new = engine.step()
                if not new and not engine.has_work:
                    raise InternalError("the engine has nothing to do and a request is open")
                for event in new:
                    if event.request_id in self._inboxes:
                        self._inboxes[event.request_id].append(event)
            events = [event for request_id in run for event in self._inboxes[request_id]]
            for request_id in run:
                self._inboxes[request_id] = []
            return events

    def _give_up(self, run: Mapping[str, TextStage]) -> None:
        with _interrupts_after(), self._lock:
            for request_id, stage in run.items():
                is_ours = self._inboxes.pop(request_id, None) is not None
                if is_ours and stage.num_open and self._failure is None:
                    self._deployment.engine.abort(request_id)

    @contextlib.contextmanager
    def _engine(self) -> Iterator[Engine]:
        """The engine, for this thread alone. Raises `HeadraceError` when it is gone; a bug in it ends it for all."""
        with _interrupts_after(), self._lock:
            if self._failure is not None:
                raise EngineFailure(_FAILED.format(self._failure)) from self._failure
            if self._is_closed:
                raise HeadraceError("this LLM is closed; make a new one")
            try:
                yield self._deployment.engine
            except RequestError:  # refused: the engine is as it was
                raise
            except BaseException as error:
                self._failure = error
                raise EngineFailure(_FAILED.format(error)) from error

    def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(self._deployment.tokenizer.encode(prompt, add_special_tokens=True, parse_special=True))
        return tuple(prompt)

    def _encode_chat(self, messages: Messages) -> tuple[int, ...]:
        if self._deployment.template is None:
            raise HeadraceError(f"{self.name} has no chat template; use generate, or pass chat_template=PATH")
        return tuple(encode_chat(self._deployment.tokenizer, self._deployment.template, messages).ids)


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


_FAILED = "the engine failed on a bug ({0!r}) and all calls with it; make a new LLM"


@contextlib.contextmanager
def _interrupts_after() -> Iterator[None]:
    """Ctrl-C waits for the end of the block: half a step would leave an engine that nobody can use."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    caught: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: caught.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if caught:
            handler(*caught[0])


def check_stops(stop: str | Sequence[str]) -> tuple[str, ...]:
    """One stop string or several, as a tuple. Raises `InvalidRequest` for an empty one."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    for text in stops:
        if not isinstance(text, str) or not text:
            raise InvalidRequest(
                "invalid_value", f"stop has {text!r}; a string of at least one character is needed.", param="stop"
            )
    return stops
