"""What comes in: OpenAI's request shapes, parsed once.

Three kinds of fields besides those declared here, each refused or accepted by name and never by accident:

- `HARMLESS`: accepted and without effect on a reply (bookkeeping of OpenAI's own service);
- `UNSUPPORTED`: would change the reply. Accepted where the value asks for nothing (null, empty, the values listed),
  otherwise a 400 that says so;
- anything else is a typing error or another server's extension: a 400 with the nearest known name.

Values are judged where they mean something: ranges by `SamplingParams`, caps by `CallLimits`, in `admission`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema

from headrace.server.errors import ApiError, bad_request, show

HARMLESS = frozenset(
    {
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "store",
        "user",
    }
)

UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": (),
    "function_call": ("none", "auto"),
    "functions": (),
    "modalities": (["text"],),
    "moderation": (),
    "reasoning_effort": ("none",),
    "suffix": (),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}
"""Field -> the values that ask for nothing, besides null and empty ones."""

_MESSAGE_UNSUPPORTED = frozenset({"annotations", "audio", "function_call", "refusal"})

Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Priority = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
DeadlineMs = Annotated[int, Field(ge=1, le=24 * 3600 * 1000)]
ServiceTier = Literal["auto", "default", "flex", "priority", "scale"]

# What the validators below accept, for the API's own description (`headrace.server.openapi`).
_STRINGS: dict[str, Any] = {"type": "array", "items": {"type": "string"}}
_STOP: dict[str, Any] = {"anyOf": [{"type": "string"}, _STRINGS]}
_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_PROMPT: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        _STRINGS | {"minItems": 1},
        _IDS | {"minItems": 1},
        {"type": "array", "items": _IDS | {"minItems": 1}, "minItems": 1},
    ]
}
_BIAS: dict[str, Any] = {
    "type": "object",
    "patternProperties": {"^[0-9]{1,9}$": {"type": "number", "minimum": -100, "maximum": 100}},
    "additionalProperties": False,
}
_CONTENT: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                "required": ["type", "text"],
            },
        },
        {"type": "null"},
    ]
}


def _stop(value: object) -> object:
    if isinstance(value, str):
        return (value,) if value else ()
    if isinstance(value, list) and all(isinstance(stop, str) for stop in value):
        return tuple(value)
    raise ValueError("a string or a list of strings is needed")


def _strings(value: object) -> object:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise ValueError("a list of strings is needed")


def _prompt(value: object) -> object:
    """str | [str] | [int] | [[int]] -> a tuple of prompts, each a str or a tuple of token ids."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return tuple(value)
        if _is_ids(value):
            return (tuple(value),)
        if all(isinstance(item, list) and _is_ids(item) for item in value):
            return tuple(tuple(item) for item in value)
    raise ValueError("a string, a list of token ids, or a list of either is needed, and none may be an empty list")


def _ids(value: object) -> object:
    if isinstance(value, list) and (not value or _is_ids(value)):
        return tuple(value)
    raise ValueError("a list of token ids is needed")


def _bias(value: object) -> object:
    """{"token id": value} -> ((token id, value), ...)."""
    if not isinstance(value, dict):
        raise ValueError("an object is needed that maps token ids to numbers")
    pairs = []
    for name, bias in value.items():
        if not (name.isascii() and name.isdigit() and len(name) <= 9):
            raise ValueError(f"{show(name)} is not a token id")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise ValueError(f"the value of token {name} is {show(bias)}; it must be a number from -100 to 100")
        pairs.append((int(name), float(bias)))
    return tuple(pairs)


def _is_ids(value: list[Any]) -> bool:
    return bool(value) and all(type(item) is int for item in value)  # bool is an int to isinstance


class _Model(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, arbitrary_types_allowed=True)


class StreamOptions(_Model):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """OpenAI's padding against side channels; accepted, without effect."""


class Message(_Model):
    """One message of a chat. Its content is text, or a list of text parts."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Any, WithJsonSchema(_CONTENT)] = None
    name: str | None = None
    tool_calls: Any = None
    """Of an assistant: those its reply had."""
    tool_call_id: str | None = None
    """Of a tool: the call that this is the result of."""
    reasoning_content: str | None = None
    """Of an assistant: handed to templates that want it back."""


Messages = Annotated[list[Message], Field(fail_fast=True)]  # a million wrong ones are one error


class Sampling(_Model):
    """The fields both generation endpoints share; null means the default."""

    model: str | None = None
    """The served name or an alias; absent: the one model there is."""
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    n: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    """-1 and 0: all tokens."""
    min_p: float | None = None
    typical_p: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: Count | None = None
    dry_range: Count | None = None
    dry_sequence_breakers: Annotated[tuple[str, ...], BeforeValidator(_strings), WithJsonSchema(_STRINGS)] | None = None
    """Texts that no repeat reaches over."""
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    prompt_logprobs: Count | None = None
    """The logprob of every prompt token, and of so many most probable ones at its place."""
    logit_bias: Annotated[tuple[tuple[int, float], ...], BeforeValidator(_bias), WithJsonSchema(_BIAS)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(_stop), WithJsonSchema(_STOP)] | None = None
    stop_token_ids: Annotated[tuple[int, ...], BeforeValidator(_ids), WithJsonSchema(_IDS)] | None = None
    ignore_eos: bool | None = None
    response_format: Any = None
    """{"type": "text" | "json_object" | "json_schema", "json_schema": {"name": ..., "schema": {...}}}."""
    regex: str | None = None
    """Replies match it whole. Of this, `grammar`, `choice` and a JSON `response_format`, one may be given."""
    grammar: str | None = None
    """Lark or GBNF."""
    choice: Annotated[tuple[str, ...], BeforeValidator(_strings), WithJsonSchema(_STRINGS)] | None = None
    """Replies are one of these."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Priority | None = None
    """Smaller is more urgent; default 0."""
    deadline_ms: DeadlineMs | None = None
    """From the call's arrival."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Prefixes are shared only among a tenant's calls with the same salt."""
    service_tier: ServiceTier | None = None
    """"flex": of batch class, served from what the others leave. All other tiers are one."""
    timings: bool | None = None
    """Whether the reply says how long its parts took."""


class ChatRequest(Sampling):
    messages: Messages
    max_completion_tokens: Count | None = None
    """OpenAI's newer name of `max_tokens`; of both, the smaller counts."""
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    """Whether forced calls may be more than one."""
    reasoning_budget: Count | None = None
    """Tokens after which reasoning is ended."""


class CompletionRequest(Sampling):
    prompt: Annotated[tuple[Any, ...], BeforeValidator(_prompt), WithJsonSchema(_PROMPT)]
    suffix: str | None = None
    """What follows the reply; for models with fill-in tokens."""
    best_of: Count | None = None
    """Candidates of which the `n` likeliest are returned."""
    echo: bool | None = None
    logprobs: Count | None = None
    add_special_tokens: bool | None = None
    """Whether text prompts get the model's BOS token; default true."""


class EmbeddingRequest(_Model):
    """What is to be embedded, each text by itself."""

    model: str | None = None
    input: Annotated[tuple[Any, ...], BeforeValidator(_prompt), WithJsonSchema(_PROMPT)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    """The first so many numbers, normalised again."""
    pooling: Literal["mean", "last"] | None = None
    """Of the tokens' hidden states; default mean."""
    add_special_tokens: bool | None = None
    """Whether texts get the model's BOS token; default true."""
    priority: Priority | None = None
    deadline_ms: DeadlineMs | None = None
    service_tier: ServiceTier | None = None


class TokenizeRequest(_Model):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    """For `prompt`: default true. Messages are what the template makes of them."""


class RenderRequest(_Model):
    """What a chat's prompt depends on."""

    model: str | None = None
    messages: Messages
    tools: Any = None


class DetokenizeRequest(_Model):
    model: str | None = None
    tokens: Annotated[tuple[int, ...], BeforeValidator(_ids), WithJsonSchema(_IDS)]


Body = TypeVar("Body", bound=_Model)


def parse(kind: type[Body], data: bytes) -> Body:
    """The body of a call. Raises `ApiError` (400) naming the field, its value and what is wrong with it."""
    try:
        body = kind.model_validate_json(data)
    except ValidationError as error:
        raise _explain(kind, error) from None
    _check_extra(kind, body)
    options = getattr(body, "stream_options", None)
    if options is not None:
        _refuse_unknown(StreamOptions, options.model_extra or {}, "stream_options.")
        if not getattr(body, "stream", None):
            raise bad_request("invalid_value", "stream_options is only allowed with stream: true.", "stream_options")
    for i, message in enumerate(getattr(body, "messages", None) or ()):
        _check_message(message, f"messages[{i}].")
    return body


def message_content(message: Message, where: str) -> str | list[dict[str, str]]:
    """The content of a message: a string, or parts that are all text. Raises `ApiError` (400) for anything else."""
    content = message.content
    if isinstance(content, str):
        return content
    if content is None and message.role == "assistant":
        return ""
    if not isinstance(content, list):
        raise bad_request(
            "invalid_value",
            f"{where}content is {show(content)}; a string or a list of text parts is needed.",
            f"{where}content",
        )
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise bad_request(
                "unsupported_content",
                f"{where}content[{i}] is of type {show(kind)}; this server reads only "
                '{"type": "text", "text": "..."} parts.',
                f"{where}content",
            )
    return [{"type": "text", "text": part["text"]} for part in content]


def _check_extra(kind: type[_Model], body: _Model) -> None:
    unknown = {}
    for name, value in (body.model_extra or {}).items():
        if name in HARMLESS:
            continue
        if name not in UNSUPPORTED:
            unknown[name] = value
            continue
        neutral = UNSUPPORTED[name]
        if value in (None, "", [], {}) or value in neutral:
            continue
        allowed = f" Values without effect are allowed: {', '.join(map(repr, neutral))}." if neutral else ""
        raise bad_request(
            "unsupported_parameter",
            f"{name} is {show(value)}, and this server does not support {name}; leave it out.{allowed}",
            name,
        )
    _refuse_unknown(kind, unknown, "")


def _check_message(message: Message, where: str) -> None:
    extra = message.model_extra or {}
    for name in _MESSAGE_UNSUPPORTED & extra.keys():
        if extra[name] not in (None, "", [], {}):
            raise bad_request(
                "unsupported_parameter",
                f"{where}{name} is set, and this server does not support it; leave it out.",
                f"{where}{name}",
            )
    _refuse_unknown(Message, {k: v for k, v in extra.items() if k not in _MESSAGE_UNSUPPORTED}, where)


def _refuse_unknown(kind: type[_Model], extra: Mapping[str, object], where: str) -> None:
    for name in extra:
        near = difflib.get_close_matches(name[:64], kind.model_fields, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise bad_request(
            "unknown_parameter", f"{where}{show(name)[1:-1]} is not a parameter here.{hint}", where + name[:64]
        )


def _explain(kind: type[_Model], error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False)[0]
    message = first["msg"].removeprefix("Value error, ")
    path = ""
    for part in first["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    path = path[:120]
    if first["type"] == "json_invalid":
        return bad_request("invalid_json", f"The body is not JSON: {message.removeprefix('Invalid JSON: ')}.")
    if not path:
        return bad_request("invalid_type", f"The body is {show(first['input'])}; a JSON object is needed.")
    if first["type"] == "missing":
        return bad_request("missing_parameter", f"{path} is missing; this call needs it.", path)
    message = message[:1].lower() + message[1:]
    return bad_request("invalid_value", f"{path} is {show(first['input'])}: {message}.", path)
