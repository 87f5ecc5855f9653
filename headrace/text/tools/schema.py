"""Tools as a request defines them, which of them may be called, and what a grammar has to force.

Source: OpenAI's API reference, "Create chat completion": `tools`, `tool_choice`, and `tool_calls` of messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headrace.core.errors import InvalidRequest

MAX_TOOLS = 128
"""OpenAI's limit."""
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any]
    """A JSON schema of type object."""
    description: str | None = None
    strict: bool = False
    """The client relies on arguments that fit the schema."""

    @property
    def properties(self) -> Mapping[str, Any]:
        """Parameter -> its schema."""
        return self.parameters.get("properties", {})

    def definition(self) -> dict[str, Any]:
        """For a chat template."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": {**function, "parameters": self.parameters}}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    mode: Literal["none", "auto", "required"]
    tools: tuple[Tool, ...]
    """Those that may be called. A named choice is "required" with one tool."""
    is_named: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """How a format writes calls: `start`, the calls with `separator` between, `end`."""

    before_name: str
    after_name: str
    """Then follow the arguments, a JSON object."""
    after_arguments: str = ""
    separator: str = ""
    start: str = ""
    end: str = ""


@dataclass(frozen=True, slots=True)
class ForcedCall:
    """One call: `prefix`, a JSON object that fits `schema` (whose references are relative to itself), `suffix`."""

    prefix: str
    schema: Mapping[str, Any]
    suffix: str


@dataclass(frozen=True, slots=True)
class Forced:
    """What a grammar must force: `start call (separator call)* end`, where a call is any one of `calls`.

    In regular terms with JSON in between. Where the vocabulary has a marker of the format as a special token, that
    token is meant, not its characters. White space is as written here; only the schemas may leave some free.
    """

    start: str
    calls: tuple[ForcedCall, ...]
    separator: str
    end: str
    max_calls: int | None
    """None: as many as the model likes."""


def force(choice: ToolChoice, layout: Layout, *, parallel: bool = True) -> Forced | None:
    """What makes the reply calls whose arguments parse; None where nothing is forced.

    `parallel`: the request's `parallel_tool_calls`. A named function is called once, as OpenAI does.
    """
    if choice.mode != "required":
        return None
    calls = tuple(
        ForcedCall(layout.before_name + tool.name + layout.after_name, tool.parameters, layout.after_arguments)
        for tool in choice.tools
    )
    max_calls = None if parallel and not choice.is_named else 1
    return Forced(layout.start, calls, layout.separator, layout.end, max_calls)


def parse_tools(value: object) -> tuple[Tool, ...]:
    """The field `tools`. Raises `InvalidRequest` naming the entry at fault and the remedy."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise _wrong("tools", f"is {_show(value)}; a list of tools is needed")
    if len(value) > MAX_TOOLS:
        raise _wrong("tools", f"has {len(value)} entries; at most {MAX_TOOLS} are allowed")
    tools = tuple(_tool(entry, f"tools[{i}]") for i, entry in enumerate(value))
    first: dict[str, int] = {}
    for i, tool in enumerate(tools):
        if tool.name in first:
            where = f"tools[{i}].function.name"
            raise _wrong(where, f"is {tool.name!r}, which tools[{first[tool.name]}] is called already; rename one")
        first[tool.name] = i
    return tools


def parse_choice(value: object, tools: Sequence[Tool]) -> ToolChoice:
    """The field `tool_choice`. Absent, it means "auto" with tools, else "none"; so does null.

    Raises `InvalidRequest` for a choice that is none, or that these tools do not allow.
    """
    if value is None:
        value = "auto" if tools else "none"
    if value == "none" or (value == "auto" and not tools):
        return ToolChoice("none", ())
    if value == "auto":
        return ToolChoice("auto", tuple(tools))
    if not tools:
        raise _wrong("tool_choice", f"is {_show(value)}, but the request has no tools; send tools or leave it out")
    if value == "required":
        return ToolChoice("required", tuple(tools))
    if isinstance(value, str):
        raise _wrong("tool_choice", f'is {_show(value)}; it must be "none", "auto", "required" or name a function')
    choice = _object(value, "tool_choice", ("type", "function"))
    _expect_function(choice, "tool_choice")
    function = _object(choice.get("function"), "tool_choice.function", ("name",))
    name = function.get("name")
    chosen = tuple(tool for tool in tools if tool.name == name)
    if not chosen:
        known = ", ".join(repr(tool.name) for tool in tools)
        raise _wrong("tool_choice.function.name", f"is {_show(name)}, which is none of the tools: {_cut(known)}")
    return ToolChoice("required", chosen, is_named=True)


def template_calls(value: object, where: str) -> list[dict[str, Any]]:
    """The `tool_calls` of an assistant's message as chat templates read them: arguments as an object, not as text.

    `where`: the path of the field. Raises `InvalidRequest`.
    """
    if not isinstance(value, list):
        raise _wrong(where, f"is {_show(value)}; a list of calls is needed")
    return [_template_call(entry, f"{where}[{i}]") for i, entry in enumerate(value)]


def _template_call(value: object, where: str) -> dict[str, Any]:
    call = _object(value, where, ("id", "type", "function", "index"))
    _expect_function(call, where)
    if not isinstance(call.get("id"), str):
        raise _wrong(f"{where}.id", f"is {_show(call.get('id'))}; a string is needed, the one the reply had")
    function = _object(call.get("function"), f"{where}.function", ("name", "arguments"))
    name = _name(function.get("name"), f"{where}.function.name")
    text = function.get("arguments")
    try:
        arguments = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise _wrong(f"{where}.function.arguments", f"is {_show(text)}; the text of a JSON object is needed")
    return {"id": call["id"], "type": "function", "function": {"name": name, "arguments": arguments}}


def _tool(value: object, where: str) -> Tool:
    entry = _object(value, where, ("type", "function"))
    _expect_function(entry, where)
    where += ".function"
    function = _object(entry.get("function"), where, ("name", "description", "parameters", "strict"))
    name = _name(function.get("name"), f"{where}.name")
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise _wrong(f"{where}.description", f"is {_show(description)}; a string is needed")
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise _wrong(f"{where}.strict", f"is {_show(strict)}; true or false is needed")
    return Tool(name, _parameters(function.get("parameters"), f"{where}.parameters"), description, bool(strict))


def _parameters(value: object, where: str) -> Mapping[str, Any]:
    if value is None or value == {}:
        return _NO_PARAMETERS
    if not isinstance(value, dict):
        raise _wrong(where, f"is {_show(value)}; a JSON schema of an object is needed")
    if value.get("type") != "object":
        raise _wrong(f"{where}.type", f'is {_show(value.get("type"))}; "object" is needed, arguments have names')
    if not isinstance(value.get("properties", {}), dict):
        raise _wrong(f"{where}.properties", f"is {_show(value['properties'])}; an object is needed")
    return value


def _name(value: object, where: str) -> str:
    if not (isinstance(value, str) and _NAME.fullmatch(value)):
        raise _wrong(where, f"is {_show(value)}; 1 to 64 letters, digits, underscores and dashes are needed")
    return value


def _expect_function(value: Mapping[str, object], where: str) -> None:
    if value.get("type") != "function":
        raise _wrong(f"{where}.type", f'is {_show(value.get("type"))}; this server knows only "function"')


def _object(value: object, where: str, fields: Sequence[str]) -> dict[str, object]:
    if not isinstance(value, dict):
        raise _wrong(where, f"is {_show(value)}; an object with {' and '.join(fields[:2])} is needed")
    for name in value:
        if name not in fields:
            raise _wrong(where, f"has the field {_show(name)}, which is not known here; known are {', '.join(fields)}")
    return value


def _wrong(where: str, what: str) -> InvalidRequest:
    return InvalidRequest("invalid_value", f"{where} {what}.", param=where)


def _show(value: object) -> str:
    """A value for an error message, short whatever a client sent."""
    match value:
        case None:
            return "missing"
        case str():
            return _cut(repr(value[:61]))
        case bool():
            return str(value).lower()
        case dict():
            return "an object"
        case list():
            return "a list"
    return "a number"


def _cut(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else text[:limit] + "..."
