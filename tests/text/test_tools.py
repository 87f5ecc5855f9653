"""Tool calls and reasoning in replies: what is found, whatever way the text was cut."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.errors import ConfigurationError
from headrace.text.tools.base import ReplyParser, ToolParser, parse
from headrace.text.tools.events import Arguments, CallBegin, CallEnd, Content, Event, Reasoning, collect, merge
from headrace.text.tools.json_scanner import JsonScanner, is_json
from headrace.text.tools.reasoning import MISTRAL_THINK, THINK, ReasoningParser
from headrace.text.tools.registry import FORMATS, format_named, format_of, thinking_of
from headrace.text.tools.schema import Tool, ToolChoice, force

TOOLS = (
    Tool(
        "weather",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "tags": {"type": "array"},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
        },
    ),
    Tool("f", {"type": "object", "properties": {}}),
)

CALL = '{"name": "weather", "arguments": {"city": "Paris"}}'
ARGUMENTS = '{"city": "Par\\u00eds \\"}{[<tool_call>", "tags": [{"a": {}}, -1.5e+3, true, null, "ü🌶"]}'
MIXED = f'{{"id": 7, "arguments": {ARGUMENTS}, "name": "f", "more": [{{}}]}}'

REPLIES: dict[str, tuple[str, ...]] = {
    "hermes": (
        "Just text, 1 < 2 and <tool_calls> and </tool_call>.",
        f"<tool_call>{CALL}</tool_call>",
        f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{MIXED}\n</tool_call>\n",
        f"\n\n<tool_call>{CALL}</tool_call> and <tool_call>{CALL}</tool_call> that is all ",
        f"<tool_call>{CALL[:-1]}</tool_call> a bracket is missing",
        f"<tool_call>{CALL}}}</tool_call> one too many",
        f"<tool_call>{CALL}<tool_call>{CALL}",
        '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "f", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": tru}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 01}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1,, "b": 2}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": [1}}</tool_call>',
        '<tool_call>{"name": "no such name!", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": "never end',
        '<tool_call>{"name": "f", "argum',
        f"<tool_call><tool_call>{CALL}</tool_call></tool_call>",
        f'<tool_call>{{"x": <tool_call>{CALL}</tool_call>',
        "<tool_call>not JSON</tool_call> text <tool_ca",
        f"<tool_call> {MIXED} </tool_call> \n ",
        '<tool_call>{"arguments": {"a": 1}, "name": "f"</tool_call>',
        " \n ",
        "",
    ),
    "llama3": (
        '{"name": "weather", "parameters": {"city": "Paris"}}',
        f'  {CALL}; {{"name": "f", "parameters": {{}}}}',
        f"<|python_tag|>{CALL};{MIXED}",
        f"Text first. {CALL}",
        f"Text, then <|python_tag|>{CALL} and text",
        '{"name": "Paris", "parameters": {"inhabitants": 2}}',
        '{"answer": 42}',
        '{"name": "f", "parameters": {"a": {"b": "}"}',
        '<|python_tag|>brave_search.call(query="tools") <|python_',
    ),
    "mistral": (
        f"[TOOL_CALLS] [{CALL}, {MIXED}]",
        f"Text[TOOL_CALLS]{CALL}",
        '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{}',
        '[TOOL_CALLS]f{"a": [1, 2]} and more [TOOL_CALLS',
        "[TOOL_CALLS][]",
        f"[TOOL_CALLS][{CALL}, nothing]",
        "[TOOL_CALLS]f[ARGS] text",
        '[TOOL_CALLS]f[ARGS]{"a": ',
        "see [1] and [TOOL] and [TOOL_CALLS] [ARGS]",
    ),
    "qwen": (
        f"<tool_call>\n{CALL}\n</tool_call>",
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=f>\n</function>\n</tool_call>",
        '<function=weather><parameter=city>two\nlines "\\ <b></parameter><parameter=tags>\n["a", {}]\n</parameter>'
        "<parameter=note>null</parameter><parameter=unknown>12</parameter></function> done",
        "<tool_call><function=weather><parameter=days>True</parameter><parameter=note>\n\nx\n\n</parameter></tool_call>",
        "<tool_call><function=weather><parameter=days>many</parameter></function></tool_call>",
        "<tool_call><function=weather><parameter=city>Par",
        "<tool_call><function=weather><parameter=days>12",
        "<tool_call><function=weather> what <parameter=days>12</parameter></function></tool_call>",
        "<tool_call><function=no way></function></tool_call>",
        "<tool_call>f></tool_call>",
        "<function=f><parameter=größe [m²]>2</parameter></function>",
        "<function=f><parameter=a<b>2</parameter></function>",
        "<tool_call><function=weather><parameter=days>",
        "<function=",
    ),
}
REPLIES["mistral-v3"] = REPLIES["mistral"]
THOUGHTS = (
    "<think>\nLet me think. <b> </thin\n</think>\n\nThe answer.",
    " <think></think>  Nothing to think.",
    "<think>\n\n</think>\n\n<tool_call>\n" + CALL + "\n</tool_call>",
    "No thought. <think>this is text</think>",
    "still open </think> answer </think> <think>",
    "never closed  \n",
    "\n <thin",
    "",
)


def tool_parser(name: str) -> Callable[[], ReplyParser]:
    return lambda: ToolParser(FORMATS[name], TOOLS)


def thinker(is_open: bool) -> Callable[[], ReplyParser]:
    return lambda: ReasoningParser(THINK, ToolParser(FORMATS["hermes"], TOOLS), is_open=is_open)


CASES = [
    *(
        pytest.param(tool_parser(name), text, id=f"{name}-{i}")
        for name in REPLIES
        for i, text in enumerate(REPLIES[name])
    ),
    *(pytest.param(thinker(o), text, id=f"think-{o}-{i}") for o in (False, True) for i, text in enumerate(THOUGHTS)),
]


def in_pieces(parser: ReplyParser, pieces: Iterable[str]) -> list[Event]:
    events = [event for piece in pieces for event in parser.push(piece)]
    return merge([*events, *parser.finish()])


def assert_sound(events: list[Event]) -> None:
    """Calls are numbered in order and never interleaved; whole ones parse; nothing empty is sent."""
    open_call, num_calls = None, 0
    for event in events:
        match event:
            case CallBegin(index, name):
                assert (open_call, index) == (None, num_calls)
                assert name
                open_call, num_calls = index, num_calls + 1
            case Arguments(index, text):
                assert index == open_call
                assert text
            case CallEnd(index, _):
                assert index == open_call
                open_call = None
            case Content(text) | Reasoning(text):
                assert open_call is None
                assert text
    assert open_call is None
    for call in collect(events).calls:
        if call.is_whole:
            assert isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize(("make", "text"), CASES)
def test_any_split(make: Callable[[], ReplyParser], text: str):
    """Found elsewhere: names and arguments were lost when several tokens came in one delta."""
    whole = parse(make(), text)
    assert_sound(whole)
    assert in_pieces(make(), text) == whole, "one character at a time"
    for i in range(len(text) + 1):
        assert in_pieces(make(), (text[:i], text[i:])) == whole, f"cut at {i}: {text[:i]!r}"


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_random_splits(data: st.DataObject):
    make, text = data.draw(st.sampled_from([case.values for case in CASES]))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12).map(sorted))
    pieces = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
    assert in_pieces(make(), pieces) == parse(make(), text)


FRAGMENTS = (
    *("<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>", "<think>", "</think>"),
    *("<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", '"name": "f"', '"arguments": ', '"parameters": ', "f>"),
    *(
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        '"',
        "\\",
        ";",
        " ",
        "\n",
        "a",
        "0",
        "-1.5",
        "true",
        "{}",
        '"k": 1',
        "\\u00e9",
        "é",
    ),
)


@settings(max_examples=600, deadline=None)
@given(
    name=st.sampled_from([*FORMATS, "think"]),
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=24),
    data=st.data(),
)
def test_anything_in_any_split(name: str, fragments: list[str], data: st.DataObject):
    """Nonsense made of markers raises nothing either."""
    make = thinker(is_open=False) if name == "think" else tool_parser(name)
    text = "".join(fragments)
    whole = parse(make(), text)
    assert_sound(whole)
    reply = collect(whole)
    if name != "think" and not reply.calls:
        assert reply.content == text, "what is no call is content, to the character"
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8).map(sorted))
    assert in_pieces(make(), [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]) == whole


# What is found.

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.text(max_size=5), VALUES, max_size=4)


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from([*FORMATS]),
    calls=st.lists(st.tuples(st.sampled_from(TOOLS), OBJECTS, st.booleans()), min_size=1, max_size=4),
    content=st.sampled_from(["", "Let me see. "]),
)
def test_what_a_grammar_forces_is_found(name: str, calls: list[tuple[Tool, dict[str, Any], bool]], content: str):
    """`force` and the parsers agree, and the arguments are what was written, to the character."""
    format = FORMATS[name]
    forced = force(ToolChoice("required", TOOLS), format.layout)
    assert forced is not None
    texts = [json.dumps(arguments, ensure_ascii=ascii) for _, arguments, ascii in calls]
    written = [
        f"{call.prefix}{text}{call.suffix}"
        for (tool, _, _), text in zip(calls, texts, strict=True)
        for call in forced.calls
        if f'"{tool.name}"' in call.prefix or call.prefix in (f"[TOOL_CALLS]{tool.name}[ARGS]",)
    ]
    assert len(written) == len(calls)
    if name == "llama3":
        content = ""  # a bare call behind text is text
    text = content + forced.start + forced.separator.join(written) + forced.end
    reply = collect(in_pieces(ToolParser(format, TOOLS), text))
    assert reply.content == content
    assert [(call.name, call.arguments) for call in reply.calls] == [
        (tool.name, text) for (tool, _, _), text in zip(calls, texts, strict=True)
    ]
    assert all(call.is_whole for call in reply.calls)


def found(name: str, text: str) -> tuple[str, list[tuple[str, str, bool]]]:
    reply = collect(parse(ToolParser(FORMATS[name], TOOLS), text))
    return reply.content, [(call.name, call.arguments, call.is_whole) for call in reply.calls]


PARIS = ("weather", '{"city": "Paris"}', True)


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", REPLIES["hermes"][0], REPLIES["hermes"][0], []),
        (
            "hermes",
            f"Hm.\n<tool_call>{CALL}</tool_call>\n<tool_call>{MIXED}</tool_call>\n",
            "Hm.\n",
            [PARIS, ("f", ARGUMENTS, True)],
        ),
        ("hermes", f"\n<tool_call>{CALL}</tool_call>\nDone.", "\nDone.", [PARIS]),
        ("hermes", f"<tool_call>{CALL[:-1]}</tool_call>", "", [PARIS]),
        ("hermes", f"<tool_call>{CALL}}}</tool_call>", "}</tool_call>", [PARIS]),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}", True)]),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": 1,, "b": 2}}',
            ', "b": 2}}',
            [("f", '{"a": 1,', False)],
        ),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b', "", [("f", '{"a": "b', False)]),
        ("hermes", '<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu', []),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
            '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
            [],
        ),
        ("hermes", f'<tool_call>{{"x": <tool_call>{CALL}</tool_call>', '<tool_call>{"x": ', [PARIS]),
        ("hermes", " \n ", " \n ", []),
        ("llama3", '{"name": "weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
        ("llama3", f"<|python_tag|>{CALL}; {CALL}", "", [PARIS, PARIS]),
        ("llama3", f"So: {CALL}", f"So: {CALL}", []),
        ("llama3", '{"name": "Paris", "parameters": {}}', '{"name": "Paris", "parameters": {}}', []),
        ("llama3", '<|python_tag|>search.call(query="a")', '<|python_tag|>search.call(query="a")', []),
        ("mistral", f"[TOOL_CALLS] [{CALL}, {MIXED}]", "", [PARIS, ("f", ARGUMENTS, True)]),
        (
            "mistral",
            'A[TOOL_CALLS]weather[CALL_ID]a1[ARGS]{"city": "Paris"}[TOOL_CALLS]f[ARGS]{}',
            "A",
            [PARIS, ("f", "{}", True)],
        ),
        ("mistral", 'A[TOOL_CALLS]weather{"city": "Paris"}', "A", [PARIS]),
        ("mistral", "[TOOL_CALLS]f[ARGS] text", "[TOOL_CALLS]f[ARGS] text", []),
        ("qwen", REPLIES["qwen"][1], "", [("weather", '{"city": "Paris", "days": 3}', True), ("f", "{}", True)]),
        (
            "qwen",
            REPLIES["qwen"][2],
            " done",
            [
                (
                    "weather",
                    '{"city": "two\\nlines \\"\\\\ <b>", "tags": ["a", {}], "note": null, "unknown": "12"}',
                    True,
                )
            ],
        ),
        ("qwen", REPLIES["qwen"][3], "", [("weather", '{"days": true, "note": "\\nx\\n"}', True)]),
        ("qwen", REPLIES["qwen"][4], "", [("weather", '{"days": "many"}', True)]),
        ("qwen", REPLIES["qwen"][5], "", [("weather", '{"city": "Par', False)]),
        ("qwen", REPLIES["qwen"][6], "", [("weather", '{"days": 12', False)]),
        ("qwen", "<tool_call><function=no way>", "<tool_call><function=no way>", []),
        (
            "qwen",
            "<function=f><parameter=größe [m²]>2</parameter></function>",
            "",
            [("f", '{"größe [m²]": "2"}', True)],
        ),
        ("qwen", "<function=f><parameter=a<b>2</parameter>", "<parameter=a<b>2</parameter>", [("f", "{", False)]),
        ("qwen", "<tool_call>f></tool_call>", "<tool_call>f></tool_call>", []),
    ],
)
def test_what_is_found(name: str, text: str, content: str, calls: list[tuple[str, str, bool]]):
    assert found(name, text) == (content, calls)


@pytest.mark.parametrize(
    ("is_open", "text", "reasoning", "content"),
    [
        (False, THOUGHTS[0], "Let me think. <b> </thin", "The answer."),
        (False, THOUGHTS[1], "", "Nothing to think."),
        (False, THOUGHTS[3], "", THOUGHTS[3]),
        (True, THOUGHTS[4], "still open", "answer </think> <think>"),
        (True, "<think>opened twice</think>x", "opened twice", "x"),
        (True, THOUGHTS[5], "never closed", ""),
    ],
)
def test_reasoning(is_open: bool, text: str, reasoning: str, content: str):
    reply = collect(parse(ReasoningParser(THINK, is_open=is_open), text))
    assert (reply.reasoning, reply.content) == (reasoning, content)


def test_reasoning_ahead_of_a_call():
    assert parse(thinker(is_open=True)(), f"Hm. </think>\n<tool_call>{CALL}</tool_call>") == [
        Reasoning("Hm."),
        CallBegin(0, "weather"),
        Arguments(0, '{"city": "Paris"}'),
        CallEnd(0, True),
    ]


# When it is found.


def test_content_waits_for_nothing_but_a_marker():
    parser = tool_parser("hermes")()
    pushes = [parser.push(piece) for piece in ("1 <", " 2 <tool", "s> <tool_call", "s>")]
    assert pushes == [[Content("1 ")], [Content("< 2 ")], [Content("<tools> ")], [Content("<tool_calls>")]]


def test_arguments_wait_for_nothing():
    parser = tool_parser("hermes")()
    assert parser.push('<tool_call>{"name": "f", "arguments": ') == []
    assert parser.push("{") == [CallBegin(0, "f"), Arguments(0, "{")]
    for char in '"a": "<tool_call> \\u00e9", "b": -1.0e5':
        assert parser.push(char) == [Arguments(0, char)]
    assert parser.push("}") == [Arguments(0, "}"), CallEnd(0, True)]


def test_json_of_its_own_does_not_wait():
    """A reply of Llama that is JSON, but no call."""
    parser = tool_parser("llama3")()
    assert parser.push('{"name": "weat') == []
    assert parser.push('er"') == [Content('{"name": "weater"')]
    parser = tool_parser("llama3")()
    assert merge(parser.push('{"answer": ') + parser.push('"4')) == [Content('{"answer": "4')]


def test_text_parameters_are_streamed():
    parser = tool_parser("qwen")()
    parser.push("<tool_call><function=weather><parameter=city>\n")
    assert [parser.push(piece) for piece in ("New", " York", "\n", "</param", 'x"')] == [
        [Arguments(0, "New")],
        [Arguments(0, " York")],
        [],
        [],
        [Arguments(0, '\\n</paramx\\"')],
    ]


@pytest.mark.parametrize(
    "text", ["<" * 100_000, '{"name": ' * 10_000, "[" * 100_000, "<tool_call>{" * 10_000, '{"' + "a" * 100_000]
)
@pytest.mark.parametrize("name", ["hermes", "llama3", "qwen", "mistral"])
def test_cost_is_linear(name: str, text: str):
    gc.disable()  # a full collection goes through what all tests before this one have left: seconds
    try:
        start = time.process_time()
        for step in (len(text), 16):
            in_pieces(tool_parser(name)(), (text[i : i + step] for i in range(0, len(text), step)))
        assert time.process_time() - start < 2.0
    finally:
        gc.enable()


# JSON.


@settings(max_examples=300, deadline=None)
@given(value=VALUES, indent=st.sampled_from([None, 1]), ascii=st.booleans())
def test_json_is_json(value: Any, indent: int | None, ascii: bool):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii)
    assert is_json(text)
    scanner = JsonScanner()
    assert scanner.push(text + ", 1") == len(text), "the value ends where it ends"


@settings(max_examples=800, deadline=None)
@given(
    st.lists(st.sampled_from([*'{}[],:"\\ -+.0123eEtrufalsn\n', '"a"', "true", "null", "\\u12aF"]), max_size=10).map(
        "".join
    )
)
def test_json_as_python_has_it(text: str):
    try:
        json.loads(text)
        expected = True
    except ValueError:
        expected = False
    assert is_json(text) == expected


# Which format.


def test_formats_by_their_marks():
    assert format_of("{{ messages }}") is None
    assert format_of("<tool_call>{{ name }}<arg_key>") is None
    for template, name in [
        ("<tool_call>{{ x | tojson }}</tool_call>", "hermes"),
        ("<tool_call>\\n<function={{ name }}>", "qwen"),
        ("[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}", "mistral"),
        ("[TOOL_CALLS][{{ calls }}]", "mistral-v3"),
        ("{{ '<|python_tag|>' }}", "llama3"),
        ("<|start_header_id|>{{ '\"parameters\": ' }}", "llama3"),
    ]:
        format = format_of(template)
        assert format is not None
        assert format.name == name
    assert format_named("qwen") is FORMATS["qwen"]
    with pytest.raises(ConfigurationError, match="'gpt' is not a format of tool calls; choose one of hermes"):
        format_named("gpt")


def test_thinking_by_its_marks():
    assert thinking_of("{{ content.split('</think>')[-1] }}") is THINK
    assert thinking_of("[THINK]{{ x }}[/THINK]") is MISTRAL_THINK
    assert thinking_of("{{ messages }}") is None
    assert THINK.is_open_after("<|im_start|>assistant\n<think>\n")
    assert not THINK.is_open_after("<|im_start|>assistant\n<think>\n\n</think>\n\n")
