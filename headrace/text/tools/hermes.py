"""Hermes and ChatML models; also Qwen 2.5 and Qwen 3, whose templates ask for the same.

    <tool_call>
    {"name": "f", "arguments": {...}}
    </tool_call>

Source: Nous Research, Hermes-Function-Calling (its README, "Prompt Format for Function Calling"); Qwen documentation,
"Function Calling" (Hermes-style).
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.text.tools.base import Format
from headrace.text.tools.calls import CallReader
from headrace.text.tools.reader import Steps
from headrace.text.tools.schema import Layout, Tool

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def read(reader: CallReader, tools: Sequence[Tool]) -> Steps[None]:
    while (yield from reader.content_until(OPEN)):
        if (yield from reader.json_call()):
            yield from reader.skip(CLOSE)


LAYOUT = Layout(
    before_name=OPEN + '\n{"name": "', after_name='", "arguments": ', after_arguments="}\n" + CLOSE, separator="\n"
)
HERMES = Format("hermes", (OPEN, CLOSE), read, LAYOUT)
