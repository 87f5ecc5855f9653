"""What replies have to follow: compiled by the real library, in the real process, over a vocabulary of bytes."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from headrace.core.errors import InvalidRequest
from headrace.core.grammar import Grammar, Matcher
from headrace.text.grammar import compiled
from headrace.text.grammar import compiler as compiling
from headrace.text.grammar import constraint as constraints
from headrace.text.grammar.bound import longest_json, longest_match
from headrace.text.grammar.compiler import GrammarCompiler
from headrace.text.grammar.constraint import Constraint
from headrace.text.grammar.finite import finite
from headrace.text.grammar.reasoned import ReasonedGrammar
from headrace.text.tools.base import ToolParser, parse
from headrace.text.tools.events import collect
from headrace.text.tools.hermes import HERMES
from headrace.text.tools.llama3 import LLAMA3
from headrace.text.tools.mistral import MISTRAL, MISTRAL_V3
from headrace.text.tools.qwen import QWEN
from headrace.text.tools.schema import force, parse_choice, parse_tools
from tests.server.fakes import EOS, TURN, TURN_END, make_tokenizer

VOCAB = len(make_tokenizer().pieces)


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(make_tokenizer(), VOCAB)
    yield compiler
    compiler.close()


def test_a_prepared_compiler_does_not_hold_the_interpreter_for_its_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first constraint that a server saw stopped every stream, for half a second on a busy machine: the library
    was given the vocabulary only then, and holds the interpreter's lock meanwhile."""
    compiler = GrammarCompiler(make_tokenizer(), VOCAB)
    compiler.prepare()
    monkeypatch.setattr(compiled, "wrap", None)
    try:
        assert compiler.compile(Constraint("regex", "a+", "regex")).start().allowed()
    finally:
        compiler.close()


def allowed_by(matcher: Matcher) -> list[int]:
    mask = matcher.allowed()
    return [token for token in range(VOCAB) if mask[token // 8] >> token % 8 & 1]


def walk(grammar: Grammar, rng: random.Random, most: int = 400) -> bytes | None:
    """A random reply of what may come; None if it came to no end. What is forced must be the only thing allowed."""
    matcher, reply = grammar.start(), bytearray()
    forced: list[int] = []
    for _ in range(most):
        choices = allowed_by(matcher)
        assert matcher.error is None, matcher.error
        if forced:
            assert choices == [forced.pop(0)]
        if EOS in choices and (len(choices) == 1 or rng.random() < 0.3):
            return bytes(reply)
        # Half of the time what ends things, so that replies do.
        ends = [token for token in choices if token in tuple(b'"}]')]
        token = rng.choice(ends if ends and rng.random() < 0.5 else choices)
        if token == EOS:
            return bytes(reply)
        reply.append(token)
        matcher.read((token,))
        if not forced:
            forced = list(matcher.forced())
    return None


SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 130}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "optional": {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "boolean"}}, "required": ["b"]},
    "nested": {
        "type": "object",
        "properties": {"items": {"type": "array", "items": {"$ref": "#/$defs/item"}, "maxItems": 3}},
        "required": ["items"],
        "$defs": {"item": {"type": "object", "properties": {"kind": {"enum": ["x", 1, None]}}, "required": ["kind"]}},
    },
    "either": {"anyOf": [{"type": "integer"}, {"type": "object", "properties": {"t": {"const": 'é"\\'}}}]},
    "pattern": {"type": "string", "pattern": "^[a-f]{2}-[0-9]+$"},
    "number": {"type": "number", "minimum": -2, "maximum": 3.5},
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "boolean"}, {"type": "string", "maxLength": 3}],
        "items": False,
    },
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_random_replies_fit_their_schema(name: str, compiler: GrammarCompiler) -> None:
    schema = SCHEMAS[name]
    grammar = compiler.compile(constraints.json_schema(schema, "response_format"))
    rng = random.Random(name)
    replies = [walk(grammar, rng) for _ in range(40)]
    ended = [json.loads(reply) for reply in replies if reply is not None]
    assert len(ended) >= 20
    for value in ended:
        jsonschema.validate(value, schema)


@pytest.mark.parametrize("pattern", [r"\d{3}-\d{4}", r"(ab|c)*d?", r"[^a-z\n]{1,5}", r"\w+@x\.(org|net)"])
def test_random_replies_match_their_regex(pattern: str, compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(constraints.regex(pattern, "regex"))
    rng = random.Random(pattern)
    ended = [reply.decode() for _ in range(40) if (reply := walk(grammar, rng)) is not None]
    assert len(ended) >= 10
    assert [reply for reply in ended if not re.fullmatch(pattern, reply, re.ASCII)] == []


def test_choices_are_met_exactly(compiler: GrammarCompiler) -> None:
    texts = ["yes", "yes!", 'a "quoted"\\ one', "zwei\nZeilen", "é\x01"]
    grammar = compiler.compile(constraints.choice(texts, "choice"))
    rng = random.Random(0)
    replies = {reply.decode() for _ in range(300) if (reply := walk(grammar, rng)) is not None}
    assert replies == set(texts)


@pytest.mark.parametrize("text", ['start: "a" b*\nb: "b" | "c"', 'root ::= "a" b*\nb ::= "b" | "c"'])
def test_grammars_in_both_languages(text: str, compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(constraints.grammar(text, "grammar"))
    rng = random.Random(0)
    replies = [walk(grammar, rng) for _ in range(40)]
    assert all(reply is None or re.fullmatch(b"a[bc]*", reply) for reply in replies)
    assert len(set(replies)) >= 5


TOOLS = parse_tools(
    [
        {
            "type": "function",
            "function": {
                "name": "weather",
                "parameters": {
                    "type": "object",
                    "properties": {"city": {"type": "string", "maxLength": 8}},
                    "required": ["city"],
                    "additionalProperties": False,
                },
            },
        },
        {"type": "function", "function": {"name": "now"}},
    ]
)


@pytest.mark.parametrize("format", [HERMES, QWEN, LLAMA3, MISTRAL, MISTRAL_V3], ids=lambda format: format.name)
def test_forced_calls_are_read_back(format, compiler: GrammarCompiler) -> None:
    forced = force(parse_choice("required", TOOLS), format.layout)
    assert forced is not None
    grammar = compiler.compile(constraints.calls(forced, {}))
    rng = random.Random(format.name)
    ended = [reply.decode() for _ in range(60) if (reply := walk(grammar, rng)) is not None]
    assert len(ended) >= 10
    numbers = set()
    for text in ended:
        reply = collect(parse(ToolParser(format, TOOLS), text))
        assert reply.calls and not reply.content.strip()
        numbers.add(len(reply.calls))
        for call in reply.calls:
            tool = next(tool for tool in TOOLS if tool.name == call.name)
            jsonschema.validate(json.loads(call.arguments), tool.parameters)
    assert {1, 2} <= numbers


def test_a_named_function_is_called_once_and_marks_are_tokens(compiler: GrammarCompiler) -> None:
    choice = parse_choice({"type": "function", "function": {"name": "weather"}}, TOOLS)
    forced = force(choice, HERMES.layout)
    assert forced is not None
    constraint = constraints.calls(forced, {"<tool_call>": TURN, "</tool_call>": TURN_END})
    grammar = compiler.compile(constraint)
    matcher = grammar.start()
    assert allowed_by(matcher) == [TURN]
    call = b'\n{"name": "weather", "arguments": {"city": "Rome"}}\n'
    matcher.read((TURN, *call))
    assert allowed_by(matcher) == [TURN_END]
    matcher.read((TURN_END,))
    assert allowed_by(matcher) == [EOS]
    assert grammar.max_tokens is not None and grammar.max_tokens >= len(call) + 3


def test_a_reply_is_calls_or_the_answer(compiler: GrammarCompiler) -> None:
    forced = force(parse_choice("required", TOOLS), HERMES.layout)
    assert forced is not None
    answer = constraints.json_schema(SCHEMAS["flat"], "response_format")
    grammar = compiler.compile(constraints.calls(forced, {}, answer))
    for text in (b'{"name": "a", "age": 3}', b'<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'):
        matcher = grammar.start()
        matcher.read(text)
        assert matcher.error is None and EOS in allowed_by(matcher)


# Reasoning.


def read(matcher: Matcher, tokens: bytes | tuple[int, ...]) -> None:
    for token in tokens:
        assert token in allowed_by(matcher)
        matcher.read((token,))


def test_reasoning_comes_first_and_ends_by_itself(compiler: GrammarCompiler) -> None:
    answer = compiler.compile(constraints.choice(["yes", "no"], "choice"))
    grammar = ReasonedGrammar(answer, close=tuple(b"</think>"), vocabulary=compiler.vocabulary, open=None)
    matcher = grammar.start()
    assert EOS not in allowed_by(matcher)
    read(matcher, b"anything </thin at all </think>")
    assert allowed_by(matcher) == sorted(b"yn")
    assert matcher.forced() == ()
    read(matcher, b"n")
    assert matcher.forced() == tuple(b"o")
    read(matcher, b"o")
    assert allowed_by(matcher) == [EOS]
    assert grammar.max_tokens is None


def test_a_budget_ends_reasoning(compiler: GrammarCompiler) -> None:
    answer = compiler.compile(constraints.choice(["yes"], "choice"))
    grammar = ReasonedGrammar(answer, close=(TURN_END,), vocabulary=compiler.vocabulary, open=TURN, budget=3)
    matcher = grammar.start()
    assert {TURN, ord("y")} == set(allowed_by(matcher))  # reasoning or the answer
    read(matcher, (TURN, *b"abc"))
    assert allowed_by(matcher) == [TURN_END]
    assert matcher.forced() == (TURN_END,)
    read(matcher, (TURN_END, *b"yes", EOS))
    assert grammar.max_tokens == 3 + 1 + 1 + 4


def test_a_budget_alone_leaves_the_answer_free(compiler: GrammarCompiler) -> None:
    grammar = ReasonedGrammar(None, close=(TURN_END,), vocabulary=compiler.vocabulary, open=None, budget=2)
    matcher = grammar.start()
    read(matcher, (*b"ab", TURN_END))
    assert len(allowed_by(matcher)) == VOCAB
    assert matcher.forced() == ()
    matcher.read(b"free")
    assert matcher.num_read == 7


# Bounds.


@pytest.mark.parametrize(
    ("schema", "bound"),
    [
        ({"enum": ["a", "long one", 12]}, 10),
        ({"const": {"a": [1, 2]}}, 13),
        ({"type": "boolean"}, 5),
        ({"type": "integer", "minimum": -5, "maximum": 100}, 4),
        ({"type": "string", "maxLength": 2}, 14),
        ({"type": ["null", "boolean"]}, 5),
        ({"type": "array", "items": {"type": "null"}, "maxItems": 2}, 14),
        ({"type": "string"}, None),
        ({"type": "integer"}, None),
        ({"type": "object"}, None),
        ({"type": "object", "properties": {"a": {"type": "null"}}}, None),
        ({"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": False}, 13),
        ({"$ref": "#/x"}, None),
        ({}, None),
    ],
)
def test_bounds_of_schemas(schema: dict, bound: int | None) -> None:
    assert longest_json(schema) == bound


def test_schemas_are_made_finite_and_only_narrower() -> None:
    schema = {
        "type": "object",
        "properties": {
            "n": {"type": "integer"},
            "m": {"type": ["integer", "null"], "minimum": 3},
            "far": {"type": "integer", "minimum": 2**60},
            "f": {"type": "number"},
            "mail": {"type": "string", "format": "email"},
            "short": {"type": "string", "format": "email", "maxLength": 9},
            "type": {"const": {"type": "integer"}},
        },
    }
    most = 2**53 - 1
    narrowed = finite(schema)
    assert narrowed["additionalProperties"] is False
    assert narrowed["properties"] == {
        "n": {"type": "integer", "minimum": -most, "maximum": most},
        "m": {"type": ["integer", "null"], "minimum": 3, "maximum": most},
        "far": {"type": "integer", "minimum": 2**60},
        "f": {"type": "number"},
        "mail": {"type": "string", "format": "email", "maxLength": 254},
        "short": {"type": "string", "format": "email", "maxLength": 9},
        "type": {"const": {"type": "integer"}},
    }


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {}}, "additionalProperties": True},
        {"type": "object", "properties": {"a": {}}, "patternProperties": {"^x": {}}},
        {"type": "object"},
        {"allOf": [{"type": "object", "properties": {"a": {}}}, {"type": "object", "properties": {"b": {}}}]},
        {"type": "object", "properties": {"a": {}}, "anyOf": [{"type": "object", "properties": {"b": {}}}]},
        {"$ref": "#/$defs/x", "properties": {"b": {}}, "$defs": {"x": {"type": "object", "properties": {"a": {}}}}},
    ],
)
def test_objects_that_speak_of_more_stay_open(schema: dict) -> None:
    assert finite(schema) == schema


def test_bounds_hold(compiler: GrammarCompiler) -> None:
    schema = {
        "type": "object",
        "properties": {"s": {"type": "string", "maxLength": 3}, "n": {"type": "integer", "minimum": -50, "maximum": 9}},
        "required": ["s"],
        "additionalProperties": False,
    }
    grammar = compiler.compile(constraints.json_schema(schema, "response_format"))
    assert grammar.max_tokens == 2 + (3 + 2 + 20 + 2) + (3 + 2 + 4 + 2) + 1
    rng = random.Random(2)
    lengths = [len(reply) + 1 for _ in range(200) if (reply := walk(grammar, rng)) is not None]
    assert len(lengths) == 200  # a bounded reply ends
    assert max(lengths) <= grammar.max_tokens
    assert longest_match("a{3}|bc") == 12
    assert longest_match("a*") is None
    assert longest_match("(") is None


# What is refused.


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        (lambda: constraints.regex("(?=a)b", "regex"), "look-ahead"),
        (lambda: constraints.regex("[", "regex"), "unclosed"),
        (lambda: constraints.regex("a" * 20_000, "regex"), "at most 16384"),
        (lambda: constraints.json_schema({"if": {}, "then": {}}, "f"), "Unimplemented"),
        (lambda: constraints.json_schema({"type": "strange"}, "f"), "strange"),
        (lambda: constraints.json_schema({"$ref": "#/nowhere"}, "f"), "nowhere"),
        (lambda: constraints.json_schema({"type": "integer", "minimum": 2, "maximum": 1}, "f"), "nsatisfiable"),
        (lambda: constraints.json_schema({"x-guidance": {"lenient": True}, "not": {}}, "f"), "Unimplemented"),
        (lambda: constraints.json_schema({"enum": ["x" * 70_000]}, "f"), "at most 65536"),
        (lambda: constraints.json_schema([1], "f"), "JSON schema"),
        (lambda: constraints.grammar("start: nothing", "grammar"), "nothing"),
        (lambda: constraints.grammar("foo(", "grammar"), "GBNF"),
        (lambda: constraints.grammar("start: " + "(" * 3000 + '"a"' + ")" * 3000, "grammar"), "nested"),
        (lambda: constraints.grammar("", "grammar"), "cannot be followed"),
        (lambda: constraints.choice([], "choice"), "1 to 1024"),
        (lambda: constraints.choice(["a", ""], "choice"), "empty"),
        (lambda: constraints.choice(["\ud800"], "choice"), "surrogate"),
    ],
)
def test_what_cannot_be_followed_is_refused(constraint, words: str, compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequest, match=words) as error:
        compiler.compile(constraint())
    assert error.value.param in ("regex", "f", "grammar", "choice")
    assert len(error.value.message) < 500


def test_deep_schemas_are_refused(compiler: GrammarCompiler) -> None:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(900):
        schema = {"type": "object", "properties": {"a": schema}}
    with pytest.raises(InvalidRequest):
        compiler.compile(constraints.json_schema(schema, "f"))


def test_compiling_is_cut_short_and_goes_on(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Constraint("sleep", "", "grammar")  # type: ignore[arg-type]  # known to no compiler: see below
    monkeypatch.setattr(compiling, "COMPILE_S", 0.5)
    compiler.compile(constraints.choice(["a"], "choice"))
    worker = compiler._worker
    assert worker is not None
    monkeypatch.setattr(worker, "ask", lambda request, timeout_s: _stopped(worker, request, timeout_s))
    start_s = time.monotonic()
    with pytest.raises(InvalidRequest, match=r"takes more than 0\.5 s"):
        compiler.compile(slow)
    assert time.monotonic() - start_s < 5
    assert worker._process.poll() is not None, "the process is gone"
    assert compiler.compile(constraints.choice(["b"], "choice")).max_tokens == 2  # by a new one


def _stopped(worker: Any, request: Any, timeout_s: float) -> Any:
    """The process stands still, as one would that compiles something hard."""
    os.kill(worker._process.pid, signal.SIGSTOP)
    return type(worker).ask(worker, request, timeout_s)


def test_a_crash_of_the_compiler_is_a_refusal(compiler: GrammarCompiler) -> None:
    compiler.compile(constraints.choice(["a"], "choice"))
    assert compiler._worker is not None
    compiler._worker._process.kill()
    compiler._worker._process.wait()
    with pytest.raises(InvalidRequest, match="too much memory"):
        compiler.compile(constraints.choice(["crash"], "choice"))
    assert compiler.compile(constraints.choice(["crash"], "choice")).max_tokens == 6


def test_the_same_constraint_is_compiled_once(compiler: GrammarCompiler) -> None:
    first = compiler.compile(constraints.choice(["x", "y"], "choice"))
    assert compiler.compile(constraints.choice(["x", "y"], "choice")) is first


def test_a_token_that_does_not_fit_is_an_error_for_good(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(constraints.choice(["yes"], "choice")).start()
    matcher.read(b"n")
    assert matcher.error
    matcher.read(b"yes")
    assert matcher.error
    assert "yes" not in matcher.error  # errors go to logs, what was asked for does not


def test_a_step_that_takes_too_much_fuel_is_an_error(compiler: GrammarCompiler) -> None:
    """Found at some mask after the first, where only the fuel stands between a request and everybody's time."""
    grammar = compiler.compile(constraints.regex(r"(.{0,300}a.{0,300}b){3}", "regex"))
    matcher, rng = grammar.start(), random.Random(0)
    slowest_s = 0.0
    for _ in range(3000):
        start_s = time.perf_counter()
        matcher.allowed()
        slowest_s = max(slowest_s, time.perf_counter() - start_s)
        if matcher.error is not None:
            break
        matcher.read((rng.choice(b"abcd"),))
    assert matcher.error is not None
    print(f"slowest mask: {slowest_s * 1e3:.1f} ms; {matcher.error}")
