"""Server-sent events of OpenAI's two streaming endpoints, read after the run from what was recorded during it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Struct

Pieces = Sequence[tuple[float, bytes]]
"""(arrival, bytes) of a body, in order, cut wherever the network cut it."""


class _Message(Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(Struct):
    text: str | None = None
    delta: _Message | None = None
    finish_reason: str | None = None


class _Details(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Timings(Struct):
    """llama.cpp's own."""

    cache_n: int | None = None


class _Chunk(Struct):
    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: _Usage | None = None
    timings: _Timings | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


@dataclass(frozen=True, slots=True)
class StreamedReply:
    """What a stream said."""

    token_times_s: tuple[float, ...]
    """Arrivals of the events with text."""
    text: str
    num_prompt: int | None
    num_output: int | None
    num_cached: int | None
    is_complete: bool
    """It came to an end of its own: a finish reason or [DONE]."""
    error: str | None
    """An error event, in full."""


def events(pieces: Pieces) -> Iterator[tuple[float, bytes]]:
    """(arrival of its last byte, data) of each event. A `data:` line stands alone in an event of these endpoints."""
    rest = b""
    for time_s, piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield time_s, line[5:].strip()
    if rest.startswith(b"data:"):
        yield pieces[-1][0], rest[5:].strip()


def read_stream(pieces: Pieces) -> StreamedReply:
    """Raises `ValueError` for an event that is not JSON of the expected shape."""
    return fold(events(pieces))


def fold(stream: Iterable[tuple[float, bytes]]) -> StreamedReply:
    times: list[float] = []
    texts: list[str] = []
    usage = _Usage()
    num_cached: int | None = None
    is_complete = False
    error = None
    for time_s, data in stream:
        if data == b"[DONE]":
            is_complete = True
            continue
        try:
            chunk = _decode(data)
        except msgspec.MsgspecError as problem:
            raise ValueError(f"an event cannot be read ({problem}): {data[:200]!r}") from problem
        if chunk.error is not None:
            error = msgspec.json.encode(chunk.error).decode()
        for choice in chunk.choices:
            text = choice.text or ""
            if choice.delta is not None:
                text += (choice.delta.reasoning_content or "") + (choice.delta.content or "")
            if text:
                times.append(time_s)
                texts.append(text)
            is_complete = is_complete or choice.finish_reason is not None
        usage = chunk.usage or usage
        if chunk.timings is not None and chunk.timings.cache_n is not None:
            num_cached = chunk.timings.cache_n
    if usage.prompt_tokens_details is not None and usage.prompt_tokens_details.cached_tokens is not None:
        num_cached = usage.prompt_tokens_details.cached_tokens
    return StreamedReply(
        tuple(times), "".join(texts), usage.prompt_tokens, usage.completion_tokens, num_cached, is_complete, error
    )
