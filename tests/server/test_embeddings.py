"""/v1/embeddings through the official client, against an engine without a model."""

from __future__ import annotations

import base64
import struct

import openai
import pytest

from headrace.core.request import Pooling
from tests.server.conftest import RunningServer, eventually
from tests.server.fakes import BOS, CONTEXT_LENGTH, TURN, FakeEngine, hidden_sum
from tests.server.test_extras import error_of


def unit(numbers: tuple[float, ...]) -> list[float]:
    length = sum(x * x for x in numbers) ** 0.5
    return [x / length for x in numbers]


def embed(server: RunningServer, given: object, **options: object):
    return server.client().embeddings.create(model="fake-model", input=given, **options)


def test_a_text(shared: RunningServer):
    """The client asks for base64 unless told otherwise, and decodes it."""
    reply = embed(shared, "hé")
    prompt = (BOS, *"hé".encode())
    assert reply.data[0].embedding == pytest.approx(unit(hidden_sum(prompt)), abs=1e-6)
    assert (reply.object, reply.data[0].object, reply.data[0].index) == ("list", "embedding", 0)
    assert (reply.usage.prompt_tokens, reply.usage.total_tokens, reply.model) == (4, 4, "fake-model")
    plain = embed(shared, "hé", encoding_format="float")
    assert plain.data[0].embedding == pytest.approx(reply.data[0].embedding, abs=1e-6)


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        (["ab", "<turn>c"], [(BOS, *b"ab"), (BOS, TURN, *b"c")]),
        (list(b"ab"), [tuple(b"ab")]),
        ([list(b"ab"), [5]], [tuple(b"ab"), (5,)]),
    ],
)
def test_inputs_of_every_shape(start, given: list, prompts: list[tuple[int, ...]]):
    server = start()
    reply = embed(server, given)
    assert [request.prompt for request in server.engine.requests] == prompts
    assert [data.index for data in reply.data] == list(range(len(prompts)))
    for data, prompt in zip(reply.data, prompts, strict=True):
        assert data.embedding == pytest.approx(unit(hidden_sum(prompt)), abs=1e-6)
    assert reply.usage.prompt_tokens == sum(map(len, prompts))


def test_extras(start):
    server = start()
    body = {"pooling": "last", "add_special_tokens": False, "priority": 3, "deadline_ms": 1000}
    reply = embed(server, "ab", extra_body=body)
    (request,) = server.engine.requests
    assert (request.pooling, request.priority, request.prompt) == (Pooling.LAST, 3, tuple(b"ab"))
    assert request.deadline_s is not None
    assert reply.data[0].embedding == pytest.approx(unit(hidden_sum(b"b")), abs=1e-6)


def test_fewer_dimensions_are_normalised_again(shared: RunningServer):
    full = hidden_sum((BOS, *b"ab"))
    assert embed(shared, "ab", dimensions=2).data[0].embedding == pytest.approx(unit(full[:2]), abs=1e-6)


def test_base64_is_of_little_endian_floats(shared: RunningServer):
    body = {"input": "ab", "encoding_format": "base64"}
    data = shared.post("/v1/embeddings", json=body).json()["data"][0]["embedding"]
    assert struct.unpack("<3f", base64.b64decode(data)) == pytest.approx(unit(hidden_sum((BOS, *b"ab"))), abs=1e-6)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [260]}, "input"),
        ({"input": ["x"] * 257}, "input"),
        ({"input": "", "add_special_tokens": False}, "input"),
        ({"input": "x" * 5000}, "input"),
        ({"input": "x" * CONTEXT_LENGTH}, "input"),
        ({"input": "x", "dimensions": 4}, "dimensions"),
        ({"input": "x", "dimensions": 0}, "dimensions"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "x", "pooling": "max"}, "pooling"),
        ({"input": "x", "temperature": 1}, "temperature"),
    ],
)
def test_refusals(shared: RunningServer, body: dict, param: str):
    assert error_of(shared, "/v1/embeddings", body)["param"] == param


def test_one_text_too_long_refuses_all(start):
    server = start()
    with pytest.raises(openai.BadRequestError) as caught:
        embed(server, ["ok", "x" * CONTEXT_LENGTH])
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
    assert not server.engine.has_work


def test_more_texts_than_places_wait_for_nobody(start):
    server = start(FakeEngine(max_queue=4, max_running=2))
    with pytest.raises(openai.RateLimitError):
        embed(server, ["x"] * 7)
    assert len(embed(server, ["x"] * 6).data) == 6
    eventually(lambda: server.service.num_calls == 0)
