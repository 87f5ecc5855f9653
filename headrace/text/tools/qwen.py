"""Qwen3-Coder and Qwen3.5: parameters between tags, as plain text. The JSON of `hermes.py` is read, too.

    <tool_call>
    <function=f>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

The arguments are made here, as JSON: text for parameters whose schema wants text (and for unknown ones), given out
while it comes; for any other the value as written where it is JSON (or Python's True, False, None), else text. The
outer tags may be missing. Source: Qwen3-Coder's chat template and qwen3coder_tool_parser.py on its model page.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.text.tools.base import Format
from headrace.text.tools.calls import CallReader
from headrace.text.tools.hermes import CLOSE, LAYOUT, OPEN
from headrace.text.tools.json_scanner import is_json
from headrace.text.tools.reader import Steps
from headrace.text.tools.schema import Tool

FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"

_MAX_KEY_CHARS = 256
_PYTHON = {"True": "true", "False": "false", "None": "null"}


def read(reader: CallReader, tools: Sequence[Tool]) -> Steps[None]:
    while marker := (yield from reader.content_until(OPEN, FUNCTION)):
        if marker == FUNCTION or (yield from reader.accept(FUNCTION)):
            is_call = yield from _function(reader, tools)
        else:
            is_call = yield from reader.json_call()
        if is_call:
            yield from reader.skip(CLOSE)


def _function(reader: CallReader, tools: Sequence[Tool]) -> Steps[bool]:
    name = yield from reader.name()
    if not (name and (yield from reader.literal(">"))):
        return False
    properties = next((tool.properties for tool in tools if tool.name == name), {})
    reader.begin_call(name)
    reader.arguments("{")
    separator = ""
    while (yield from reader.accept(PARAMETER)):
        key = yield from reader.run(lambda char: char not in "<>\n", _MAX_KEY_CHARS)
        if not (key and (yield from reader.literal(">"))):
            break
        reader.arguments(f"{separator}{_quoted(key)}: ")
        separator = ", "
        yield from reader.literal("\n")
        reader.drop()
        if not (yield from _value(reader, _types(properties.get(key, {"type": "string"})))):
            break
        reader.drop()
    is_whole = (yield from reader.accept(END_FUNCTION)) or (yield from reader.accept(CLOSE))
    if is_whole:
        reader.drop()
        reader.arguments("}")
    reader.end_call(is_whole)
    return True


def _value(reader: CallReader, types: frozenset[str]) -> Steps[bool]:
    ends = ("\n" + END_PARAMETER, END_PARAMETER)
    if types == {"string"}:
        reader.arguments('"')
        is_ended = yield from reader.until(ends, lambda text: reader.arguments(_quoted(text)[1:-1]))
        if is_ended:
            reader.arguments('"')
        return bool(is_ended)
    pieces: list[str] = []
    is_ended = yield from reader.until(ends, pieces.append)
    text = "".join(pieces)
    reader.arguments(_as_json(text, types) if is_ended else text)
    return bool(is_ended)


def _as_json(text: str, types: frozenset[str]) -> str:
    written = _PYTHON.get(text.strip(), text.strip())
    wants_text = "string" in types and not (written == "null" and "null" in types)
    return written if is_json(written) and not wants_text else _quoted(text)


def _types(schema: Any) -> frozenset[str]:
    """The types that a schema names; none where it does not say."""
    if not isinstance(schema, Mapping):
        return frozenset()
    named = schema.get("type")
    types = {named} if isinstance(named, str) else set(_strings(named))
    for ways in (schema.get("anyOf"), schema.get("oneOf")):
        if isinstance(ways, list):
            types.update(_strings([way.get("type") for way in ways if isinstance(way, Mapping)]))
    return frozenset(types)


def _strings(value: Any) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


QWEN = Format("qwen", (OPEN, CLOSE), read, LAYOUT)
"""Forced calls are written as JSON, whose grammar is the schema itself."""
