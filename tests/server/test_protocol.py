"""Parsing alone: what bodies are accepted, and what is said about the others."""

from __future__ import annotations

import json

import pytest

from headrace.server.errors import ApiError
from headrace.server.protocol import HARMLESS, UNSUPPORTED, ChatRequest, CompletionRequest, parse

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def refusal(kind: type, data: bytes | dict) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(kind, data if isinstance(data, bytes) else json.dumps(data).encode())
    error = caught.value
    assert error.status == 400
    assert len(error.message) < 500, "a client cannot make us repeat its body"
    return error


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"\xff\xfe", b"[1" * 20000, b'{"messages": "\\ud800"}', b'{"max_tokens": 1' + b"0" * 5000 + b"}"],
    ids=["empty", "cut", "not utf-8", "deep", "lone surrogate", "5000 digits"],
)
def test_what_is_not_json(data: bytes):
    assert refusal(ChatRequest, data).code == "invalid_json"


@pytest.mark.parametrize("data", [b"[]", b"null", b'"x"', b"7"])
def test_what_is_not_an_object(data: bytes):
    assert "JSON object" in refusal(ChatRequest, data).message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"),
        ("temperature", True),
        ("max_tokens", 10**400),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("n", True),
        ("n", "2"),
        ("seed", 2**64),
        ("stop", [1]),
        ("stop", {"a": 1}),
        ("stop_token_ids", ["a"]),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"5": 10**400}),
        ("logit_bias", [1]),
        ("stream", "yes"),
        ("messages", "hi"),
        ("logprobs", 1),
    ],
)
def test_wrong_types_and_ranges_name_the_field(field: str, value: object):
    assert refusal(ChatRequest, CHAT | {field: value}).param == field


def test_unknown_fields_are_refused_with_the_nearest_name():
    error = refusal(ChatRequest, CHAT | {"temprature": 1})
    assert error.code == "unknown_parameter"
    assert "'temperature'" in error.message


@pytest.mark.parametrize("name", sorted(HARMLESS))
def test_harmless_fields_are_accepted(name: str):
    parse(ChatRequest, json.dumps(CHAT | {name: {"any": "thing"}}).encode())


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_fields_that_would_change_the_reply_are_refused_unless_they_ask_for_nothing(name: str):
    assert refusal(ChatRequest, CHAT | {name: {"some": "thing"}}).code == "unsupported_parameter"
    for value in (None, *UNSUPPORTED[name]):
        parse(ChatRequest, json.dumps(CHAT | {name: value}).encode())


@pytest.mark.parametrize(
    ("value", "prompts"),
    [
        ("x", ("x",)),
        ("", ("",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
        ([], None),
        ([[]], None),
        ([1, "a"], None),
        ([True], None),
        ([1.5], None),
        (None, None),
        (5, None),
    ],
)
def test_prompts_in_all_their_shapes(value: object, prompts: tuple | None):
    body = {"prompt": value}
    if prompts is None:
        assert refusal(CompletionRequest, body).param == "prompt"
    else:
        assert parse(CompletionRequest, json.dumps(body).encode()).prompt == prompts


def test_a_million_wrong_messages_are_one_error():
    assert refusal(ChatRequest, b'{"messages": [' + b"5," * 1_000_000 + b"5]}").param == "messages[0]"


def test_old_function_calls_of_a_message_are_refused_and_empty_ones_are_not():
    message = {"role": "assistant", "content": "x", "function_call": None, "refusal": None, "annotations": []}
    parse(ChatRequest, json.dumps({"messages": [message]}).encode())
    error = refusal(ChatRequest, {"messages": [message | {"function_call": {"name": "f"}}]})
    assert error.param == "messages[0].function_call"


def test_stream_options_only_with_stream():
    assert refusal(ChatRequest, CHAT | {"stream_options": {"include_usage": True}}).param == "stream_options"
    assert refusal(ChatRequest, CHAT | {"stream": True, "stream_options": {"use": 1}}).param == "stream_options.use"


def test_null_is_the_default_everywhere():
    optional = set(ChatRequest.model_fields) - {"messages"}
    call = parse(ChatRequest, json.dumps(CHAT | dict.fromkeys(optional)).encode())
    assert call == parse(ChatRequest, json.dumps(CHAT).encode())
