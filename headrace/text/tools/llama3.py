"""Llama 3.1 to 3.3: the whole reply is a call, or calls follow a tag.

    {"name": "f", "parameters": {...}}
    <|python_tag|>{"name": "f", "parameters": {...}}; {"name": "g", "parameters": {...}}

A bare object is a call only at the start of a reply (or behind another call), and only if it names a function of the
request: a reply may be JSON of its own. Code and built-in tools behind the tag (`brave_search.call(...)`) are content.

Source: Meta, "Llama 3.1 Model Cards & Prompt formats", JSON based tool calling; the semicolon: vLLM's examples.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.text.tools.base import Format
from headrace.text.tools.calls import CallReader
from headrace.text.tools.reader import Steps
from headrace.text.tools.schema import Layout, Tool

TAG = "<|python_tag|>"


def read(reader: CallReader, tools: Sequence[Tool]) -> Steps[None]:
    names = frozenset(tool.name for tool in tools) or None
    may_call = True
    while may_call or (yield from reader.content_until(TAG)):
        may_call = yield from reader.json_call(names)
        if may_call:
            yield from reader.accept(";")


LAYOUT = Layout(before_name='{"name": "', after_name='", "parameters": ', after_arguments="}", separator="; ")
LLAMA3 = Format("llama3", (TAG,), read, LAYOUT)
