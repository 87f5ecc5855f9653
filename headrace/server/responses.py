"""What goes out: OpenAI's response shapes, and the writers that fill them from deltas."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET, Struct, UnsetType
from numpy.typing import NDArray

from headrace.core.result import TokenLogprob
from headrace.server.generation import Delta, ScoredToken
from headrace.server.ranking import Ranking
from headrace.text.tokenizer import Tokenizer
from headrace.text.tools import events as tools

_encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"


def event(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + data + b"\n\n"


class PromptTokensDetails(Struct):
    cached_tokens: int


class CompletionTokensDetails(Struct):
    """Drafts of a server that speculates: right ones are among the completion's tokens, wrong ones are nowhere."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    """Where drafts were verified."""


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[ContentLogprob]
    refusal: None = None


class CalledFunction(Struct):
    arguments: str
    """The text of a JSON object; in a chunk, what is added to it."""
    name: str | UnsetType = UNSET


class ToolCall(Struct):
    """A call, or in a chunk what is added to one."""

    function: CalledFunction
    index: int | UnsetType = UNSET
    """In chunks only."""
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatMessage(Struct):
    """A message, or in a chunk what is added to one."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct):
    """`message` in a whole reply, `delta` in a chunk."""

    index: int
    message: ChatMessage | UnsetType = UNSET
    delta: ChatMessage | UnsetType = UNSET
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class TextLogprobs(Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class TextChoice(Struct):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    """In the first choice of each prompt."""


class Timings(Struct):
    """Of a whole call, by the engine's clock: queued until its first prompt began, and so on to its last token."""

    queue_ms: float
    prefill_ms: float
    """To the first token."""
    decode_ms: float
    """From there to the last one."""
    cached_tokens: int
    tokens_per_second: float | None
    """Of all choices together, while decoding; None where that took no time."""


class PromptLogprob(Struct):
    logprob: float
    rank: int
    """1: the most probable token."""
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""Per prompt token: its id and those of the most probable ones. None for the first: nothing precedes it."""


C = TypeVar("C", ChatChoice, TextChoice)


class Reply(Struct, Generic[C]):
    id: str
    object: Literal["chat.completion", "chat.completion.chunk", "text_completion"]
    created: int
    """Unix time, seconds."""
    model: str
    choices: Sequence[C]
    usage: Usage | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    """Of a chat."""
    timings: Timings | UnsetType = UNSET


class Model(Struct):
    id: str
    created: int
    max_model_len: int
    """Tokens of prompt and reply together."""
    object: str = "model"
    owned_by: str = "headrace"


@dataclass(slots=True)
class Folded:
    """The deltas of one choice, put together."""

    text: str
    scored: list[ScoredToken]
    finish_reason: str | None
    reply: tools.Reply | None
    """What the text says, where a parser has read it."""


def fold(deltas: Iterable[Delta]) -> dict[int, Folded]:
    """Choice -> its whole reply: a non-streamed reply is this over the same deltas."""
    parts: dict[int, list[Delta]] = {}
    for delta in deltas:
        parts.setdefault(delta.choice, []).append(delta)
    return {choice: _folded(of_choice) for choice, of_choice in sorted(parts.items())}


def _folded(deltas: Sequence[Delta]) -> Folded:
    text, scored = "".join(d.text for d in deltas), [s for d in deltas for s in d.scored]
    is_parsed = any(d.events is not None for d in deltas)
    reply = tools.collect(event for d in deltas for event in d.events or ()) if is_parsed else None
    return Folded(text, scored, deltas[-1].finish_reason, reply)


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    tokens: Sequence[int]
    logprobs: Sequence[TokenLogprob]
    """Of tokens 1, 2, ..."""
    num_top: int

    def format(self, tokenizer: Tokenizer) -> PromptLogprobs:
        formatted: PromptLogprobs = [None]
        for scored in self.logprobs:
            own = PromptLogprob(_finite(scored.logprob), scored.rank + 1, tokenizer.text_of(scored.token))
            entry = {scored.token: own}
            for rank, (token, logprob) in enumerate(scored.top[: self.num_top], 1):
                entry.setdefault(token, PromptLogprob(_finite(logprob), rank, tokenizer.text_of(token)))
            formatted.append(entry)
        return formatted


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is known at the end of a call besides its deltas."""

    usage: Usage
    mean_logprobs: Mapping[int, float] = field(default_factory=dict)
    """Choice -> per token, where choices are ranked by it."""
    scored_prompts: Sequence[ScoredPrompt] = ()
    """One per prompt, where `prompt_logprobs` was asked for."""
    timings: Timings | UnsetType = UNSET
    pooled: Sequence[NDArray[np.float64]] = ()
    """Per prompt the sum of its hidden states, where these were asked for."""


class Writer(Protocol):
    """Turns the deltas of one call into bytes."""

    def chunks(self, deltas: Sequence[Delta]) -> bytes:
        """Server-sent events; empty when the deltas show nothing."""
        ...

    def tail(self, outcome: Outcome) -> bytes:
        """The last event before the end, where the client asked for one."""
        ...

    def whole(self, deltas: Iterable[Delta], outcome: Outcome) -> bytes:
        """The body of a reply that is not streamed."""
        ...


@dataclass(frozen=True, slots=True)
class Header:
    """What every chunk of a call repeats."""

    id: str
    created: int
    model: str
    include_usage: bool
    """Chunks say `usage: null` and a last one has the numbers."""

    def reply(
        self, object: Literal["chat.completion.chunk", "text_completion"], choice: ChatChoice | TextChoice
    ) -> bytes:
        usage = None if self.include_usage else UNSET
        return event(_encode(Reply(self.id, object, self.created, self.model, (choice,), usage)))

    def tail(self, object: Literal["chat.completion.chunk", "text_completion"], outcome: Outcome) -> bytes:
        """A chunk without choices; empty where neither usage nor timings are wanted."""
        if not self.include_usage and outcome.timings is UNSET:
            return b""
        usage = outcome.usage if self.include_usage else UNSET
        last = Reply(self.id, object, self.created, self.model, (), usage, timings=outcome.timings)
        return event(_encode(last))


class ChatWriter:
    def __init__(self, header: Header, tokenizer: Tokenizer, logprobs: bool) -> None:
        self._header = header
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._started: set[int] = set()
        self._called: set[int] = set()
        """Choices with tool calls."""

    def chunks(self, deltas: Sequence[Delta]) -> bytes:
        chunks = []
        for delta in deltas:
            if delta.choice not in self._started:
                self._started.add(delta.choice)
                chunks.append(self._chunk(delta.choice, ChatMessage(role="assistant", content="")))
            logprobs = self._format(delta.scored)
            for message in self._pieces(delta):
                chunks.append(self._chunk(delta.choice, message, logprobs))
                logprobs = None
            if delta.finish_reason is not None:
                reason = _reason(delta.finish_reason, delta.choice in self._called)
                chunks.append(self._chunk(delta.choice, ChatMessage(), finish_reason=reason))
        return b"".join(chunks)

    def _pieces(self, delta: Delta) -> list[ChatMessage]:
        """What a delta adds to its message. Logprobs go with the first piece."""
        if delta.events is None:
            return [ChatMessage(content=delta.text)] if delta.text or delta.scored else []
        pieces = []
        for each in delta.events:
            match each:
                case tools.Content(text):
                    pieces.append(ChatMessage(content=text))
                case tools.Reasoning(text):
                    pieces.append(ChatMessage(reasoning_content=text))
                case tools.CallBegin(index, name):
                    self._called.add(delta.choice)
                    call = ToolCall(CalledFunction("", name), index, _call_id(), "function")
                    pieces.append(ChatMessage(tool_calls=[call]))
                case tools.Arguments(index, text):
                    pieces.append(ChatMessage(tool_calls=[ToolCall(CalledFunction(text), index)]))
        return pieces or ([ChatMessage()] if delta.scored else [])

    def tail(self, outcome: Outcome) -> bytes:
        return self._header.tail("chat.completion.chunk", outcome)

    def whole(self, deltas: Iterable[Delta], outcome: Outcome) -> bytes:
        choices = [
            ChatChoice(
                index,
                message=_message(folded),
                logprobs=self._format(folded.scored),
                finish_reason=_reason(folded.finish_reason, bool(folded.reply and folded.reply.calls)),
            )
            for index, folded in fold(deltas).items()
        ]
        head = self._header
        reply = Reply(
            head.id, "chat.completion", head.created, head.model, choices, outcome.usage, timings=outcome.timings
        )
        for prompt in outcome.scored_prompts:
            reply.prompt_logprobs = prompt.format(self._tokenizer)
        return _encode(reply)

    def _chunk(
        self, choice: int, delta: ChatMessage, logprobs: ChatLogprobs | None = None, finish_reason: str | None = None
    ) -> bytes:
        return self._header.reply(
            "chat.completion.chunk",
            ChatChoice(choice, delta=delta, logprobs=logprobs, finish_reason=finish_reason),
        )

    def _format(self, scored: Sequence[ScoredToken]) -> ChatLogprobs | None:
        if not self._logprobs:
            return None
        content = []
        for s in scored:
            assert s.logprob is not None, "only a prompt's first token has none, and chats do not echo"
            raw = self._tokenizer.token_bytes(s.token)
            top = []
            for token, logprob in s.logprob.top:
                data = self._tokenizer.token_bytes(token)
                top.append(TopLogprob(_text(data), _finite(logprob), list(data)))
            content.append(ContentLogprob(_text(raw), _finite(s.logprob.logprob), list(raw), top))
        return ChatLogprobs(content)


def _message(folded: Folded) -> ChatMessage:
    reply = folded.reply
    if reply is None:
        return ChatMessage(role="assistant", content=folded.text)
    message = ChatMessage(role="assistant", content=reply.content)
    if reply.reasoning:
        message.reasoning_content = reply.reasoning
    if reply.calls:
        message.content = reply.content or None
        message.tool_calls = [
            ToolCall(CalledFunction(call.arguments, call.name), id=_call_id(), type="function") for call in reply.calls
        ]
    return message


def _reason(reason: str | None, has_calls: bool) -> str | None:
    return "tool_calls" if has_calls and reason == "stop" else reason


def _call_id() -> str:
    """Nine letters and digits: the form that Mistral's templates insist on, and nobody else minds."""
    return uuid.uuid4().hex[:9]


class CompletionWriter:
    def __init__(
        self, header: Header, tokenizer: Tokenizer, num_logprobs: int | None, ranking: Ranking | None = None
    ) -> None:
        self._header = header
        self._tokenizer = tokenizer
        self._num_logprobs = num_logprobs
        self._ranking = ranking

    def chunks(self, deltas: Sequence[Delta]) -> bytes:
        return b"".join(
            self._header.reply(
                "text_completion",
                TextChoice(delta.choice, delta.text, self._format(delta.scored), delta.finish_reason),
            )
            for delta in deltas
            if delta.text or delta.scored or delta.finish_reason is not None
        )

    def tail(self, outcome: Outcome) -> bytes:
        return self._header.tail("text_completion", outcome)

    def whole(self, deltas: Iterable[Delta], outcome: Outcome) -> bytes:
        replies = fold(deltas)
        if self._ranking is not None:
            replies = self._ranking.best(replies, outcome.mean_logprobs)
        choices = [
            TextChoice(index, folded.text, self._format(folded.scored), folded.finish_reason)
            for index, folded in replies.items()
        ]
        for i, prompt in enumerate(outcome.scored_prompts):
            choices[i * len(choices) // len(outcome.scored_prompts)].prompt_logprobs = prompt.format(self._tokenizer)
        head = self._header
        return _encode(
            Reply(head.id, "text_completion", head.created, head.model, choices, outcome.usage, timings=outcome.timings)
        )

    def _format(self, scored: Sequence[ScoredToken]) -> TextLogprobs | None:
        if self._num_logprobs is None:
            return None
        top: list[dict[str, float] | None] | None = None
        if self._num_logprobs > 0:
            top = [
                {self._name(token): _finite(value) for token, value in s.logprob.top} if s.logprob else None
                for s in scored
            ]
        return TextLogprobs(
            tokens=[self._name(s.token) for s in scored],
            token_logprobs=[_finite(s.logprob.logprob) if s.logprob else None for s in scored],
            top_logprobs=top,
            text_offset=[s.offset for s in scored],
        )

    def _name(self, token: int) -> str:
        """The token's text; part of a character is written as bytes, so that two tokens never share a name."""
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    """JSON has no infinities; -9999 is what OpenAI sends for a token that cannot come."""
    return max(logprob, -9999.0)


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")
