"""Mistral models, whose calls follow a special token, in one of two ways.

    [TOOL_CALLS] [{"name": "f", "arguments": {...}, "id": "123456789"}, ...]        tokenizers v3 to v7
    [TOOL_CALLS]f[CALL_ID]123456789[ARGS]{...}[TOOL_CALLS]...                       from v11; no id from v13

Both are always read; [ARGS] may be missing. Source: mistral-common, `encode_assistant_message` of its instruct
tokenizers.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.text.tools.base import Format
from headrace.text.tools.calls import CallReader
from headrace.text.tools.reader import Steps
from headrace.text.tools.schema import Layout, Tool

OPEN, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
MARKERS = (OPEN, CALL_ID, ARGS)

_MAX_ID_CHARS = 64


def read(reader: CallReader, tools: Sequence[Tool]) -> Steps[None]:
    while (yield from reader.content_until(OPEN)):
        yield from reader.spaces()
        if (yield from reader.peek()) in ("[", "{"):
            yield from _list(reader)
        else:
            yield from _named_call(reader)


def _list(reader: CallReader) -> Steps[None]:
    yield from reader.accept("[")
    while (yield from reader.json_call()):
        if not (yield from reader.accept(",")):
            yield from reader.skip("]")
            return


def _named_call(reader: CallReader) -> Steps[None]:
    name = yield from reader.name()
    if (yield from reader.literal(CALL_ID)):
        yield from reader.run(str.isalnum, _MAX_ID_CHARS)
    yield from reader.literal(ARGS)
    yield from reader.spaces()
    if name and (yield from reader.peek()) == "{":
        yield from reader.call(name)


MISTRAL = Format("mistral", MARKERS, read, Layout(before_name=OPEN, after_name=ARGS))
MISTRAL_V3 = Format(
    "mistral-v3",
    MARKERS,
    read,
    Layout(
        start=OPEN + " [",
        before_name='{"name": "',
        after_name='", "arguments": ',
        after_arguments="}",
        separator=", ",
        end="]",
    ),
)
