"""Tools and tool_choice as requests bring them: what is understood, and what is refused with which words."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.core.errors import InvalidRequest
from headrace.text.tools.registry import FORMATS
from headrace.text.tools.schema import ToolChoice, force, parse_choice, parse_tools, template_calls

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name: object = "f", **fields: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def test_definitions():
    weather, f = parse_tools([tool("weather", description="Now.", parameters=SCHEMA, strict=True), tool()])
    assert (weather.parameters, weather.strict, f.parameters) == (SCHEMA, True, {"type": "object", "properties": {}})
    assert weather.definition() == tool("weather", description="Now.", parameters=SCHEMA)
    assert parse_tools(None) == ()


@pytest.mark.parametrize(
    ("tools", "param", "message"),
    [
        ({}, "tools", "an object; a list of tools is needed"),
        ([tool(f"f{i}") for i in range(129)], "tools", "129 entries; at most 128"),
        ([3], r"tools[0]", "a number; an object with type and function is needed"),
        ([{"type": "web_search"}], "tools[0].type", "'web_search'; this server knows only \"function\""),
        ([{"type": "function"}], "tools[0].function", "missing; an object"),
        ([tool("a b")], "tools[0].function.name", "'a b'; 1 to 64 letters"),
        ([tool("a" * 65)], "tools[0].function.name", "1 to 64 letters"),
        ([tool(), tool()], "tools[1].function.name", "'f', which tools[0] is called already"),
        ([tool(description=1)], "tools[0].function.description", "a number; a string"),
        ([tool(strict="yes")], "tools[0].function.strict", "'yes'; true or false"),
        ([tool(parameters="{}")], "tools[0].function.parameters", "'{}'; a JSON schema"),
        ([tool(parameters={"type": "array"})], "tools[0].function.parameters.type", "'array'; \"object\" is needed"),
        ([tool(parameters={"type": "object", "properties": []})], "tools[0].function.parameters.properties", "a list"),
        ([tool(paramters={})], "tools[0].function", "the field 'paramters', which is not known here; known are name"),
    ],
)
def test_wrong_tools(tools: object, param: str, message: str):
    with pytest.raises(InvalidRequest) as caught:
        parse_tools(tools)
    assert caught.value.param == param
    assert caught.value.message.startswith(param)
    assert message in caught.value.message


def test_choices():
    tools = parse_tools([tool("f"), tool("g")])
    assert parse_choice(None, tools) == parse_choice("auto", tools) == ToolChoice("auto", tools)
    assert parse_choice(None, ()) == parse_choice("auto", ()) == parse_choice("none", tools) == ToolChoice("none", ())
    assert parse_choice("required", tools) == ToolChoice("required", tools)
    assert parse_choice(tool("g"), tools) == ToolChoice("required", tools[1:], is_named=True)


@pytest.mark.parametrize(
    ("choice", "num_tools", "param", "message"),
    [
        ("required", 0, "tool_choice", "'required', but the request has no tools"),
        ("any", 1, "tool_choice", "'any'; it must be"),
        (1, 1, "tool_choice", "a number"),
        ({"type": "allowed_tools"}, 1, "tool_choice.type", "'allowed_tools'; this server knows only"),
        (tool("h"), 1, "tool_choice.function.name", "'h', which is none of the tools: 'f'"),
        (tool({}), 1, "tool_choice.function.name", "an object, which is none"),
    ],
)
def test_wrong_choices(choice: object, num_tools: int, param: str, message: str):
    with pytest.raises(InvalidRequest) as caught:
        parse_choice(choice, parse_tools([tool()] * num_tools))
    assert caught.value.param == param
    assert message in caught.value.message


def test_what_is_forced():
    tools = parse_tools([tool("f", parameters=SCHEMA), tool("g")])
    hermes = force(parse_choice("required", tools), FORMATS["hermes"].layout)
    assert hermes is not None
    assert (hermes.start, hermes.separator, hermes.end, hermes.max_calls) == ("", "\n", "", None)
    assert [call.prefix for call in hermes.calls] == [
        f'<tool_call>\n{{"name": "{name}", "arguments": ' for name in ("f", "g")
    ]
    assert (hermes.calls[0].schema, hermes.calls[0].suffix) == (SCHEMA, "}\n</tool_call>")
    named = force(parse_choice(tool("g"), tools), FORMATS["mistral"].layout)
    assert named is not None
    assert ([call.prefix for call in named.calls], named.max_calls) == (["[TOOL_CALLS]g[ARGS]"], 1)
    assert force(parse_choice("auto", tools), FORMATS["hermes"].layout) is None


def test_calls_of_earlier_turns():
    """Templates write arguments as JSON; given as text they would come out quoted twice."""
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    function = {"name": "f", "arguments": {"a": 1}}
    assert template_calls([call], "messages[1].tool_calls") == [{**call, "function": function}]
    with pytest.raises(InvalidRequest, match=r"messages\[1\].tool_calls\[0\].function.arguments is '\[\]'"):
        template_calls([{**call, "function": {"name": "f", "arguments": "[]"}}], "messages[1].tool_calls")
