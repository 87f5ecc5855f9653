"""Tools for a chat template that knows none: they are told in words, and calls are written as Hermes models do.

A model that was not trained on tools calls them badly on its own; with a grammar that forces the call it does well
enough to be useful.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.text.tools.hermes import HERMES
from headrace.text.tools.schema import Tool

_INTRODUCTION = """You can call functions. Each line between the tools tags describes one of them:
<tools>
{tools}
</tools>
To call a function, write its name and its arguments as one JSON object between tool_call tags, and nothing else:
{example}"""


def with_tools_told(messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The same chat in roles and contents that any template can write. Content is text or a list of text parts."""
    told = [_in_words(message) for message in messages]
    if not tools:
        return told
    lines = "\n".join(json.dumps(tool.definition()["function"], ensure_ascii=False) for tool in tools)
    introduction = _INTRODUCTION.format(tools=lines, example=_call("function-name", {"argument-name": "value"}))
    if told and told[0]["role"] == "system":
        told[0]["content"] = f"{told[0]['content']}\n\n{introduction}"
    else:
        told.insert(0, {"role": "system", "content": introduction})
    return told


def _in_words(message: Mapping[str, Any]) -> dict[str, Any]:
    text = _text_of(message["content"])
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"}
    calls = [call["function"] for call in message.get("tool_calls", ())]
    parts = [text] if text or not calls else []
    parts += [_call(function["name"], function["arguments"]) for function in calls]
    named = {"name": message["name"]} if "name" in message else {}
    return {"role": message["role"], "content": "\n".join(parts), **named}


def _call(name: str, arguments: Mapping[str, Any]) -> str:
    layout = HERMES.layout
    text = json.dumps(arguments, ensure_ascii=False)
    return layout.start + layout.before_name + name + layout.after_name + text + layout.after_arguments + layout.end


def _text_of(content: str | Sequence[Mapping[str, str]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
