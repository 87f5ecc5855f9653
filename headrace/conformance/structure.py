"""Chapter 5: tool calls, structured output, templates."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.conformance.check import Chapter
from headrace.conformance.client import CHAT, COMPLETIONS, Refused, Server, after_events, begins
from headrace.conformance.outcome import Failed, NotApplicable, require
from headrace.conformance.replies import Generation, read_whole, show

CHAPTER = Chapter(5, "Tool calls, structured output, templates")

WEATHER: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def response_format(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}}


@CHAPTER.check(
    "Tool calls of a stream are those of the whole reply",
    part="with the cuts that the server makes",
)
async def streamed_calls(server: Server) -> str:
    question = "What is the weather in Paris? Call get_weather."
    fields: dict[str, Any] = {"tools": [WEATHER], "temperature": 0, "max_tokens": 60, "tool_choice": "required"}
    try:
        whole = await server.chat(question, **fields)
    except Refused:
        fields["tool_choice"] = "auto"
        whole = await server.chat(question, **fields)
    stream = await server.stream_chat(question, **fields)
    for name, part in (("content", _content), ("tool calls", _calls), ("finish_reason", _reason)):
        require(part(stream) == part(whole), f"{name} {show(part(whole))} in the stream", show(part(stream)))
    if not whole.choice.calls:
        raise NotApplicable(f"the model made no call, and could not be made to; it said {show(whole.text)!r}")
    return f"{show(_calls(whole))} both times"


@CHAPTER.check("A schema that cannot be compiled is refused, not ignored")
async def bad_schema(server: Server) -> str:
    await _valid(server)
    bad = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^([a-$"}}, "required": ["a"]}
    body = {"messages": [{"role": "user", "content": "Give me an object."}], "max_tokens": 16}
    reply = await server.post(CHAT, body | response_format(bad))
    require(reply.status == 400, "status 400 for a pattern that is no regular expression", reply)
    return f"refused: {reply}"


@CHAPTER.check("A wrong regular expression is refused, and the server lives")
async def bad_regex(server: Server) -> str:
    body: dict[str, Any] = {"prompt": "A number: ", "max_tokens": 8, "temperature": 0}
    good, wrap = await first_obeyed(server, body, "regex", "[0-9]{3}", _is_number)
    bad = await server.post(COMPLETIONS, body | wrap("foo[("))
    require(bad.status in (400, 422), "status 400 for the regular expression 'foo[('", bad)
    doubtful = await server.post(COMPLETIONS, body | wrap("foo**"))  # valid in some syntaxes
    require(doubtful.status in (200, 400, 422), "status 200 or 400 for the regular expression 'foo**'", doubtful)
    await server.complete("Hello", max_tokens=1)
    return f"{good!r} for a good one; refused: {bad}"


@CHAPTER.check("Compiling a hard grammar has limits and holds up nobody")
async def hard_schema(server: Server) -> str:
    await _valid(server)
    schema: dict[str, Any] = {"type": "string"}
    for i in range(12):
        schema = {"oneOf": [{"type": "object", "properties": {f"p{i}{side}": schema}} for side in "ab"]}
    body = {"messages": [{"role": "user", "content": "Give me an object."}], "max_tokens": 4}
    pattern = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^((a|a)*)*b{1,200}$"}}}
    begun = asyncio.Event()
    stream = asyncio.create_task(
        server.stream(server.words(8), until=after_events(1, begun.set), **server.exactly(150))
    )
    try:
        await begins(begun, stream)
        replies = [await server.post(CHAT, body | response_format(hard), timeout_s=15) for hard in (schema, pattern)]
        gaps = (await stream).gaps_s
    finally:
        stream.cancel()
    for reply in replies:
        require(reply.seconds <= 5, "an answer within 5 s", f"one after {reply.seconds:.1f} s")
        require(reply.status in (200, 400, 413, 422), "status 200, 400 or 413", reply)
    require(gaps and max(gaps) <= 1.0, "no gap of more than 1 s in another stream", f"{max(gaps, default=0):.2f} s")
    slowest = max(reply.seconds for reply in replies)
    return f"statuses {[reply.status for reply in replies]} within {slowest:.2f} s; longest gap {max(gaps):.2f} s"


@CHAPTER.check("Constrained output comes at half the speed of free output or better")
async def constrained_speed(server: Server) -> str:
    schema = {"type": "array", "items": {"type": "string", "enum": ["red", "green", "blue"]}, "minItems": 40}
    free, constrained = 0.0, 0.0
    for _ in range(2):
        ask = "Write a long list of colours."
        free = max(free, _speed(await server.stream_chat(ask, **server.exactly(60))))
        fields = server.exactly(60) | response_format(schema)
        constrained = max(constrained, _speed(await server.stream_chat(ask, **fields)))
    require(constrained >= 0.5 * free, f"at least half of {free:.0f} tokens/s with a schema", f"{constrained:.0f}")
    return f"{constrained:.0f} tokens/s with a schema, {free:.0f} without"


@CHAPTER.check(
    "What a template refuses is the client's error, with the template's words",
    part="with the model's own template, which may refuse nothing: no answer may be a failure of the server",
)
async def template_errors(server: Server) -> str:
    user, reply = {"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}
    conversations = {
        "two users in a row": [user, user],
        "an assistant first": [reply, user],
        "a system message last": [user, {"role": "system", "content": "Be brief."}],
        "an unknown role": [{"role": "wizard", "content": "Hi."}],
        "no messages": [],
        "content that is a number": [{"role": "user", "content": 7}],
    }
    statuses = {}
    for name, conversation in conversations.items():
        got = await server.post(CHAT, {"messages": conversation, "max_tokens": 2})
        require(got.status in (200, 400, 422), f"status 200 or 400 for {name}", got)
        if got.status != 200:
            require(got.error().get("message"), f"a message with the refusal of {name}", got)
        statuses[name] = got.status
    for name in ("no messages", "content that is a number"):
        require(statuses[name] != 200, f"{name} to be refused", "status 200")
    return f"statuses {', '.join(f'{status} ({name})' for name, status in statuses.items())}"


async def _valid(server: Server) -> None:
    """Whether schemas are obeyed at all. Raises `Failed`."""
    schema = {"type": "string", "enum": ["zanzibar"]}
    reply = await server.chat("Say hello.", temperature=0, max_tokens=24, **response_format(schema))
    require(reply.text.strip() == '"zanzibar"', 'the only text of the schema, "zanzibar"', show(reply.text))


Wrap = Callable[[object], dict[str, Any]]
"""A constraint -> the fields that ask for it."""


def constraint_fields(kind: str) -> Sequence[Wrap]:
    """The spellings of `regex`, `grammar` and `choice`: Headrace's, and those of vLLM."""
    return (
        lambda value: {kind: value},
        lambda value: {f"guided_{kind}": value},
        lambda value: {"structured_outputs": {kind: value}},
    )


async def first_obeyed(
    server: Server, body: dict[str, Any], kind: str, value: object, obeys: Callable[[str], bool]
) -> tuple[str, Wrap]:
    """(text, spelling) of the first spelling that the server obeys. Raises `Failed` that tells what came of ours."""
    came = ""
    for wrap in constraint_fields(kind):
        reply = await server.post(COMPLETIONS, body | wrap(value))
        text = read_whole(reply).text if reply.status == 200 else None
        if text is not None and obeys(text):
            return text, wrap
        came = came or (str(reply) if text is None else f"status 200 and the text {show(text)!r}")
    raise Failed(
        f"expected the field {kind} {show(value)} (or guided_{kind}, structured_outputs) to be obeyed; came {came}"
    )


def _speed(stream: Generation) -> float:
    """Tokens per second after the first one."""
    if len(stream.times_s) < 2:
        raise Failed(f"expected a stream of many chunks; came {len(stream.times_s)}: {show(stream.text)!r}")
    return (stream.num_output - 1) / (stream.times_s[-1] - stream.times_s[0])


def _content(reply: Generation) -> str:
    return reply.text


def _calls(reply: Generation) -> list[list[str]]:
    return [[call.name, json.dumps(json.loads(call.arguments))] for call in reply.choice.calls]


def _reason(reply: Generation) -> str | None:
    return reply.choice.finish_reason


def _is_number(text: str) -> bool:
    return re.fullmatch("[0-9]{3}", text) is not None
