"""What a server answered, whole or streamed, in one form. Nothing is taken for granted: a shape that is not OpenAI's is
a `Failed` that shows it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.bench.http_stream import Exchange
from headrace.bench.sse import events
from headrace.conformance.outcome import Failed

_SHOWN = 220
"""Characters of a body in a reason."""


def show(value: object) -> str:
    """For a reason: one line, never long."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=repr)
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP response."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    content: bytes
    seconds: float

    @property
    def text(self) -> str:
        return self.content.decode("utf-8", "replace")

    def json(self) -> Any:
        try:
            return json.loads(self.content)
        except ValueError:
            raise Failed(f"expected JSON; came status {self.status} with {show(self.text)!r}") from None

    def error(self) -> Mapping[str, Any]:
        """The `error` object of a refusal; empty where there is none."""
        try:
            body = json.loads(self.content)
        except ValueError:
            return {}
        if isinstance(body, dict) and "error" not in body and "message" in body:
            return body
        error = body.get("error") if isinstance(body, dict) else None
        return error if isinstance(error, dict) else {"message": error} if isinstance(error, str) else {}

    @property
    def is_missing(self) -> bool:
        """The server says that it does not have what was asked for."""
        if self.status in (404, 405, 501):
            return True
        return self.status == 400 and self.error().get("code") in ("unsupported_parameter", "unknown_parameter")

    def __str__(self) -> str:
        if self.status == 200:
            return "status 200"
        message = self.error().get("message")
        return f"status {self.status}, {show(message if isinstance(message, str) else self.text)!r}"


@dataclass(slots=True)
class Call:
    """A tool call."""

    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class Choice:
    text: str = ""
    finish_reason: str | None = None
    calls: list[Call] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    """With `logprobs`: texts of the tokens."""
    logprobs: list[float | None] = field(default_factory=list)
    top: list[dict[str, float]] = field(default_factory=list)
    """With `logprobs`: token -> logprob of the most probable ones, per token."""


@dataclass(slots=True)
class Generation:
    """A reply of one of the two generation endpoints."""

    choices: dict[int, Choice]
    usage: Mapping[str, Any]
    body: Any
    """The whole body, or the last chunk that was no mere usage."""
    seconds: float
    chunks: list[Any] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    """Of a stream: when each chunk with something in it came, since the request was sent."""
    is_done: bool = False
    """A stream that ended with [DONE]."""

    @property
    def choice(self) -> Choice:
        if 0 not in self.choices:
            raise Failed(f"expected a choice 0; came {show(self.body)}")
        return self.choices[0]

    @property
    def text(self) -> str:
        return self.choice.text

    @property
    def num_prompt(self) -> int:
        return self._count("prompt_tokens")

    @property
    def num_output(self) -> int:
        return self._count("completion_tokens")

    @property
    def num_cached(self) -> int:
        details = self.usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        if not isinstance(cached, int):
            raise Failed(f"expected usage.prompt_tokens_details.cached_tokens; came usage {show(self.usage)}")
        return cached

    @property
    def gaps_s(self) -> list[float]:
        """Of a stream: between chunks with something in them."""
        return [after - before for before, after in zip(self.times_s, self.times_s[1:], strict=False)]

    @property
    def ttft_s(self) -> float:
        if not self.times_s:
            raise Failed("expected a stream with at least one token; came none")
        return self.times_s[0]

    def _count(self, name: str) -> int:
        value = self.usage.get(name)
        if not isinstance(value, int):
            raise Failed(f"expected usage.{name}; came usage {show(self.usage)}")
        return value


def read_whole(reply: Reply) -> Generation:
    body = reply.json()
    if not isinstance(body, dict) or not isinstance(body.get("choices"), list):
        raise Failed(f"expected a reply with choices; came {show(reply.text)}")
    choices: dict[int, Choice] = {}
    for each in body["choices"]:
        _add(choices, each, "message")
    return Generation(choices, body.get("usage") or {}, body, reply.seconds)


def read_stream(exchange: Exchange, seconds: float) -> Generation:
    """Of an exchange that may have been ended early by the client."""
    generation = Generation({}, {}, None, seconds)
    for time_s, data in events(exchange.body) if exchange.body else ():
        if data == b"[DONE]":
            generation.is_done = True
            continue
        try:
            chunk = json.loads(data)
        except ValueError:
            raise Failed(f"expected JSON in each event; came {show(data.decode('utf-8', 'replace'))!r}") from None
        if not isinstance(chunk, dict):
            raise Failed(f"expected an object in each event; came {show(chunk)}")
        if chunk.get("error"):
            raise Failed(f"expected a stream without errors; came the event {show(chunk)}")
        generation.chunks.append(chunk)
        generation.usage = chunk.get("usage") or generation.usage
        if chunk.get("choices"):
            generation.body = chunk
        shown = [_add(generation.choices, each, "delta") for each in chunk.get("choices") or ()]
        if any(shown):
            generation.times_s.append(time_s - exchange.start_s)
    return generation


def _add(choices: dict[int, Choice], raw: Any, part: str) -> bool:
    """Adds what a choice says; True if it is anything that a reader would see."""
    if not isinstance(raw, dict):
        raise Failed(f"expected an object as choice; came {show(raw)}")
    choice = choices.setdefault(raw.get("index") or 0, Choice())
    message = raw.get(part) or {}
    text = (raw.get("text") or "") + (message.get("content") or "")
    choice.text += text
    choice.finish_reason = raw.get("finish_reason") or choice.finish_reason
    for i, call in enumerate(message.get("tool_calls") or ()):
        index = call.get("index", i)
        while len(choice.calls) <= index:
            choice.calls.append(Call())
        function = call.get("function") or {}
        choice.calls[index].name += function.get("name") or ""
        choice.calls[index].arguments += function.get("arguments") or ""
    _add_logprobs(choice, raw.get("logprobs") or {})
    return bool(text or message.get("reasoning_content") or message.get("tool_calls"))


def _add_logprobs(choice: Choice, raw: Mapping[str, Any]) -> None:
    for token in raw.get("content") or ():  # chat's form, which some servers use for completions too
        choice.tokens.append(token["token"])
        choice.logprobs.append(token["logprob"])
        choice.top.append({top["token"]: top["logprob"] for top in token.get("top_logprobs") or ()})
    if raw.get("tokens"):
        choice.tokens += raw["tokens"]
        choice.logprobs += raw.get("token_logprobs") or []
        choice.top += [top or {} for top in raw.get("top_logprobs") or ()]
