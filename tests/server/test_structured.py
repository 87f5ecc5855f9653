"""Structured output and forced tool calls over HTTP: a real server, SmolLM2, the official client."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from pathlib import Path

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel

from tests.server.processes import get, served, value_of

MODEL = "smollm2-135m-instruct"
PERSON = [{"role": "user", "content": "Describe a person as JSON."}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"enum": ["Paris", "Rome"]},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": False,
            },
        },
    }
    for name, properties in (
        ("get_weather", {"city": {"type": "string", "maxLength": 20}}),
        ("add", {"a": {"type": "integer"}, "b": {"type": "integer"}}),
    )
]
THINKING_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n<think>\n{# ends with </think> #}"
)


@pytest.fixture(scope="module")
def url(smollm2_path: Path) -> Iterator[str]:
    with served("-m", "headrace.cli", "serve", MODEL, "--port", "0", "--kv-memory", "400MiB") as (_, url):
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)


def chat(client: openai.OpenAI, messages=PERSON, **options):
    return client.chat.completions.create(model=MODEL, messages=messages, **{"max_tokens": 80, **options})


def test_a_schema_is_followed_at_any_temperature(client: openai.OpenAI):
    reply = chat(client, response_format=FORMAT, n=4, temperature=1.3, seed=3)
    people = [json.loads(choice.message.content) for choice in reply.choices]
    for person in people:
        jsonschema.validate(person, SCHEMA)
    assert len({json.dumps(person) for person in people}) > 1
    assert {choice.finish_reason for choice in reply.choices} == {"stop"}


def test_forced_tokens_change_nothing(client: openai.OpenAI):
    """With logprobs each token takes a step of its own, without them forced ones go together."""
    fast = chat(client, response_format=FORMAT, temperature=0.8, seed=1)
    slow = chat(client, response_format=FORMAT, temperature=0.8, seed=1, logprobs=True)
    assert slow.choices[0].message.content == fast.choices[0].message.content
    assert slow.usage.completion_tokens == fast.usage.completion_tokens
    assert len(slow.choices[0].logprobs.content) == slow.usage.completion_tokens - 1  # the end is not shown
    stream = chat(client, response_format=FORMAT, temperature=0.8, seed=1, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == fast.choices[0].message.content


def test_a_parsed_model(client: openai.OpenAI):
    class Mood(Enum):
        happy = "happy"
        sad = "sad"

    class Answer(BaseModel):
        mood: Mood
        is_sure: bool

    messages = [{"role": "user", "content": "How are you?"}]
    reply = client.chat.completions.parse(model=MODEL, messages=messages, response_format=Answer, max_tokens=40)
    assert isinstance(reply.choices[0].message.parsed, Answer)


def test_any_object(client: openai.OpenAI):
    reply = chat(client, response_format={"type": "json_object"}, temperature=0, max_tokens=200)
    assert reply.choices[0].finish_reason == "length" or isinstance(json.loads(reply.choices[0].message.content), dict)
    assert reply.choices[0].message.content.startswith("{")


def test_regex_grammar_and_choice(client: openai.OpenAI):
    ask = [{"role": "user", "content": "Is the sky blue?"}]
    texts = [
        chat(client, ask, extra_body=way, temperature=1.0, seed=seed).choices[0].message.content
        for seed in range(3)
        for way in ({"regex": r"\d{3}-\d{4}"}, {"grammar": 'root ::= "a" [bc] "d"'}, {"choice": ["yes", "no"]})
    ]
    assert all(re.fullmatch(r"[0-9]{3}-[0-9]{4}|a[bc]d|yes|no", text) for text in texts), texts
    completion = client.completions.create(
        model=MODEL, prompt=["One and two is", "Two and two is"], extra_body={"choice": [" three", " four"]}
    )
    assert {choice.text for choice in completion.choices} <= {" three", " four"}
    assert {choice.finish_reason for choice in completion.choices} == {"stop"}


def test_a_stop_string_and_a_limit_still_count(client: openai.OpenAI):
    reply = chat(client, response_format=FORMAT, temperature=0, stop=['", "age'])
    assert reply.choices[0].message.content.startswith('{"name": "')
    assert "age" not in reply.choices[0].message.content
    reply = chat(client, response_format=FORMAT, temperature=0, max_tokens=2)
    assert (reply.choices[0].finish_reason, reply.usage.completion_tokens) == ("length", 2)


def test_required_calls_always_parse(client: openai.OpenAI):
    ask = [{"role": "user", "content": "What is the weather in Paris, and what is 3 + 4?"}]
    parameters = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    for seed in range(4):
        reply = chat(client, ask, tools=TOOLS, tool_choice="required", temperature=1.0, seed=seed, max_tokens=300)
        choice = reply.choices[0]
        assert choice.message.content is None
        calls = choice.message.tool_calls
        assert calls
        if choice.finish_reason == "tool_calls":
            for call in calls:
                jsonschema.validate(json.loads(call.function.arguments), parameters[call.function.name])


def test_a_named_call(client: openai.OpenAI):
    named = {"type": "function", "function": {"name": "add"}}
    stream = chat(client, tools=TOOLS, tool_choice=named, temperature=0, stream=True)
    chunks = [chunk.choices[0] for chunk in stream]
    pieces = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    assert [piece.function.name for piece in pieces if piece.function.name] == ["add"]
    assert set(json.loads("".join(piece.function.arguments or "" for piece in pieces))) == {"a", "b"}


def test_tools_beside_a_schema(client: openai.OpenAI):
    reply = chat(client, tools=TOOLS, response_format=FORMAT, temperature=0)
    message = reply.choices[0].message
    if message.tool_calls:
        json.loads(message.tool_calls[0].function.arguments)
    else:
        jsonschema.validate(json.loads(message.content), SCHEMA)


def test_a_grammar_that_becomes_too_expensive_ends_its_request_only(client: openai.OpenAI):
    costly = {"regex": "(.{0,300}a.{0,300}b){3}"}
    with ThreadPoolExecutor(2) as pool:
        healthy = pool.submit(chat, client, temperature=0, max_tokens=60)
        with pytest.raises(openai.BadRequestError) as caught:
            chat(client, extra_body=costly, temperature=1.0, seed=1)
        assert caught.value.code == "reply_failed"
        assert healthy.result().usage.completion_tokens > 10
        with pytest.raises(openai.APIError, match="cannot go on"):
            list(chat(client, extra_body=costly, temperature=1.0, seed=1, stream=True))


def test_hostile_constraints_hold_nobody_up(client: openai.OpenAI, url: str):
    schema: dict = {"type": "null"}
    for _ in range(60):
        schema = {"type": "object", "properties": {"a": schema, "b": {"type": "array", "items": {}}}}
    hostile: list[dict] = [
        {"regex": "(" * 5000 + ")" * 5000},
        {"regex": "((a{1,1000}){1,1000}){1,1000}"},
        {"regex": "a" * 16_000},
        {"grammar": "start: " + " | ".join(f'"{i}" start' for i in range(2000))},
        {"grammar": "start: start start"},
        {"choice": [chr(65 + i % 26) * 60 for i in range(1000)]},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "x",
                    "schema": {
                        "allOf": [
                            {"anyOf": [{"properties": {f"x{i}{j}": {"type": "integer"}}} for j in range(5)]}
                            for i in range(9)
                        ]
                    },
                },
            }
        },
    ]
    for body in hostile:
        answer = httpx.post(
            f"{url}/chat/completions", json={"messages": PERSON, "max_tokens": 5, **body}, timeout=30, trust_env=False
        )
        assert answer.status_code in (200, 400), (body, answer.text)
    assert chat(client, temperature=0, max_tokens=3).usage.completion_tokens == 3
    assert value_of("headrace_requests_running", get(url, "/metrics").text) == 0


def test_reasoning_is_ended_by_its_budget(smollm2_path: Path, tmp_path: Path):
    template = tmp_path / "thinking.jinja"
    template.write_text(THINKING_TEMPLATE)
    options = ("--port", "0", "--kv-memory", "200MiB", "--chat-template", str(template))
    with served("-m", "headrace.cli", "serve", MODEL, *options) as (_, url):
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)
        reply = chat(client, response_format=FORMAT, extra_body={"reasoning_budget": 12}, temperature=0)
        message = reply.choices[0].message
        assert message.reasoning_content
        jsonschema.validate(json.loads(message.content), SCHEMA)
        free = chat(client, extra_body={"reasoning_budget": 6}, temperature=0, max_tokens=40)
        assert free.choices[0].message.reasoning_content
        assert free.choices[0].message.content
