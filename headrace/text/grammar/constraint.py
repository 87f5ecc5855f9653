"""What a request wants its replies to be, before it is compiled."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from headrace.core.errors import InvalidRequest
from headrace.text.grammar.bound import longest_json, longest_match
from headrace.text.grammar.finite import finite
from headrace.text.tools.schema import Forced

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_BYTES = 64 << 10
"""Of a schema, a grammar or all choices."""
MAX_REGEX_BYTES = 16 << 10
MAX_CHOICES = 1024

JSON_OPTIONS: JsonCompileOptions = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "lenient": False,
}
"""White space is fixed, as models write it on one line: where it is free, a small model at a high temperature never
comes to an end. A keyword that is not enforced is an error, never ignored."""


@dataclass(frozen=True, slots=True)
class Constraint:
    kind: Literal["json_schema", "regex", "lark", "grammar"]
    """`grammar` is Lark or GBNF; `lark` is ours."""
    text: str
    param: str
    """The field of the request that asked for it."""
    max_bytes: int | None = None
    """No reply is longer; None: not known."""


def json_schema(schema: object, param: str) -> Constraint:
    """Raises `InvalidRequest` for what is no JSON schema at first sight; the rest is seen when it is compiled."""
    if not isinstance(schema, dict):
        raise InvalidRequest("invalid_value", f"{param} must be an object, a JSON schema.", param=param)
    narrowed, text = _narrowed(schema, param)
    return Constraint("json_schema", text, param, longest_json(narrowed))


def json_object(param: str) -> Constraint:
    return Constraint("json_schema", '{"type": "object"}', param)


def regex(pattern: str, param: str) -> Constraint:
    _check_size(pattern, param, MAX_REGEX_BYTES)
    return Constraint("regex", pattern, param, longest_match(pattern))


def grammar(text: str, param: str) -> Constraint:
    _check_size(text, param, MAX_BYTES)
    return Constraint("grammar", text, param)


def choice(texts: Sequence[str], param: str) -> Constraint:
    """One of the texts, exactly."""
    if not 1 <= len(texts) <= MAX_CHOICES:
        raise InvalidRequest(
            "invalid_value", f"{param} has {len(texts)} texts; 1 to {MAX_CHOICES} are allowed.", param=param
        )
    if not all(texts):
        raise InvalidRequest("invalid_value", f"{param} has an empty text; a reply is never empty.", param=param)
    lark = "start: " + " | ".join(map(_literal, dict.fromkeys(texts)))
    _check_size(lark, param, MAX_BYTES)
    return Constraint("lark", lark, param, max(len(text.encode()) for text in texts))


def calls(forced: Forced, special: Mapping[str, int], answer: Constraint | None = None) -> Constraint:
    """Tool calls as their format writes them; or `answer`, a JSON schema, where one is given.

    `special`: texts that are tokens of their own in the vocabulary -> their ids.
    """
    rules = [f"call_{i}" for i in range(len(forced.calls))]
    lines = [
        "start: calls" + (" | answer" if answer else ""),
        "calls: " + _join(_literals(forced.start, special), _repeated(forced, special), _literals(forced.end, special)),
        "call: " + " | ".join(rules),
    ]
    schemas = [_narrowed(call.schema, "tools")[0] for call in forced.calls]
    for rule, call, schema in zip(rules, forced.calls, schemas, strict=True):
        body = _inline_json(schema)
        lines.append(f"{rule}: " + _join(_literals(call.prefix, special), body, _literals(call.suffix, special)))
    if answer:
        lines.append("answer: " + _inline_json(json.loads(answer.text)))
    lark = "\n".join(lines)
    _check_size(lark, "tools", MAX_BYTES)
    return Constraint("lark", lark, "tools", None if answer else _longest_call(forced, schemas))


def _repeated(forced: Forced, special: Mapping[str, int]) -> str:
    if forced.max_calls == 1:
        return "call"
    times = "*" if forced.max_calls is None else f"{{0,{forced.max_calls - 1}}}"
    return f"call ({_join(_literals(forced.separator, special), 'call')}){times}"


def _longest_call(forced: Forced, schemas: Sequence[Mapping[str, Any]]) -> int | None:
    if forced.max_calls != 1:
        return None
    longest = 0
    for call, schema in zip(forced.calls, schemas, strict=True):
        arguments = longest_json(schema)
        if arguments is None:
            return None
        longest = max(longest, len((call.prefix + call.suffix).encode()) + arguments)
    return longest + len((forced.start + forced.end).encode())


def _inline_json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": JSON_OPTIONS}, ensure_ascii=False)


def _literals(text: str, special: Mapping[str, int]) -> str:
    """`text` as Lark writes it, with the special tokens in it by their ids."""
    if not text:
        return ""
    found = [(at, -len(mark)) for mark in special if (at := text.find(mark)) >= 0]
    if not found:
        return _literal(text)
    at, length = min(found)[0], -min(found)[1]
    mark = text[at : at + length]
    return _join(_literals(text[:at], special), f"<[{special[mark]}]>", _literals(text[at + length :], special))


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _join(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def _narrowed(schema: Mapping[str, Any], param: str) -> tuple[Mapping[str, Any], str]:
    """(what is compiled, its text)."""
    try:
        narrowed = finite(schema)
        text = json.dumps(narrowed, ensure_ascii=False)
    except RecursionError as error:
        raise InvalidRequest("invalid_value", f"{param} is nested too deeply; simplify it.", param=param) from error
    _check_size(text, param, MAX_BYTES)
    return narrowed, text


def _check_size(text: str, param: str, most: int) -> None:
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > most:
        raise InvalidRequest("invalid_value", f"{param} has {size} bytes; at most {most} are compiled.", param=param)
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest("invalid_value", f"{param} has a lone surrogate; send UTF-8.", param=param) from error
