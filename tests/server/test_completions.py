"""/v1/completions, /v1/models, /tokenize and the rest, against an engine without a model."""

from __future__ import annotations

import json

import openai
import pytest
from openai.types import Completion

from headrace.server.limits import CallLimits
from tests.server.conftest import RunningServer, eventually
from tests.server.fakes import BOS, CONTEXT_LENGTH, TURN, FakeEngine


def complete(server: RunningServer, prompt: object, **options: object) -> Completion:
    return server.client().completions.create(model="fake-model", prompt=prompt, **options)


def test_a_whole_reply_and_its_stream(shared: RunningServer):
    reply = complete(shared, "say:some words")
    Completion.model_validate(reply.model_dump())
    assert reply.id.startswith("cmpl-")
    assert (reply.object, reply.choices[0].text, reply.choices[0].finish_reason) == (
        "text_completion",
        "some words",
        "stop",
    )
    chunks = list(complete(shared, "say:some words", stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks[:-1]) == "some words"
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len("some words") + 1


def test_batches_of_prompts_with_several_choices(shared: RunningServer):
    reply = complete(shared, ["say:a", "say:b", list(b"say:c")][:2], n=2)
    assert [(c.index, c.text) for c in reply.choices] == [(0, "a"), (1, "a"), (2, "b"), (3, "b")]
    assert reply.usage.prompt_tokens == 2 * len(b".say:a")
    chunks = list(complete(shared, ["say:a", "say:b"], stream=True))
    assert {c.choices[0].index: c.choices[0].text for c in chunks if c.choices[0].text} == {0: "a", 1: "b"}


def test_token_prompts_are_taken_as_they_are(start):
    server = start()
    assert complete(server, list(b"say:x")).choices[0].text == "x"
    assert [c.text for c in complete(server, [list(b"say:y"), list(b"say:z")]).choices] == ["y", "z"]
    assert server.engine.requests[0].prompt == tuple(b"say:x")


def test_text_prompts_get_bos_and_their_control_tokens_are_parsed(start):
    server = start()
    complete(server, "<turn>x")
    complete(server, "<turn>x", extra_body={"add_special_tokens": False})
    assert [r.prompt for r in server.engine.requests] == [(BOS, TURN, 120), (TURN, 120)]


def test_the_same_seed_is_every_prompts_and_drawn_ones_differ(start):
    server = start()
    complete(server, ["a", "b"], seed=5)
    complete(server, ["a", "b"])
    seeds = [r.sampling.seed for r in server.engine.requests]
    assert seeds[:2] == [5, 5]
    assert len(set(seeds[2:])) == 2


def test_logprobs_in_the_older_shape(shared: RunningServer):
    logprobs = complete(shared, "say:hé", logprobs=2).choices[0].logprobs
    assert logprobs.tokens == ["h", "bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs.token_logprobs == [-0.25] * 3
    assert logprobs.top_logprobs[0] == {"h": -0.25, "i": -1.25}
    assert logprobs.text_offset == [0, 1, 1]
    assert complete(shared, "say:x", logprobs=0).choices[0].logprobs.top_logprobs is None


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_the_prompts_logprobs(shared: RunningServer, stream: bool):
    reply = complete(shared, "say:hi", echo=True, logprobs=1, stream=stream)
    choices = [chunk.choices[0] for chunk in reply] if stream else reply.choices
    assert "".join(c.text for c in choices) == "say:hihi"
    tokens = [t for c in choices if c.logprobs for t in c.logprobs.tokens]
    assert tokens == ["<bos>", *"say:hihi"]
    assert [o for c in choices if c.logprobs for o in c.logprobs.text_offset] == [0, *range(8)]
    values = [v for c in choices if c.logprobs for v in c.logprobs.token_logprobs]
    assert values == [None] + [-0.25] * 8


def test_scoring_a_text_without_a_reply(shared: RunningServer):
    """What evaluation harnesses do: echo, logprobs and max_tokens=0."""
    reply = complete(shared, list(b"score me"), echo=True, logprobs=1, max_tokens=0)
    assert reply.choices[0].text == "score me"
    assert reply.choices[0].finish_reason == "length"
    assert len(reply.choices[0].logprobs.tokens) == 8
    assert reply.usage.completion_tokens == 0


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_and_nothing_else(start, stream: bool):
    """max_tokens=0 without logprobs was refused, though OpenAI answers it with the prompt."""
    server = start()
    reply = complete(server, ["<turn>hé", "ids"], echo=True, max_tokens=0, stream=stream)
    choices = [c for chunk in reply for c in chunk.choices] if stream else reply.choices
    assert [(c.index, c.text, c.finish_reason) for c in choices] == [(0, "<turn>hé", "length"), (1, "ids", "length")]
    if not stream:
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (5 + 4, 0)
    assert server.engine.requests == [], "nothing is computed"
    eventually(lambda: server.service.num_calls == 0)


@pytest.mark.parametrize("logprobs", [None, 1])
def test_an_echo_has_no_choices(shared: RunningServer, logprobs: int | None):
    body = {"prompt": "x", "echo": True, "max_tokens": 0, "n": 2, "logprobs": logprobs}
    response = shared.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "n"
    assert "n is 2" in response.json()["error"]["message"]


def test_a_vocabulary_larger_than_the_embedding(start):
    """Gemma's tokenizer.json has an image token, one more than its text model's embedding: reading that row would end
    the engine, for everybody. Ids that both know keep working."""
    server = start(vocab_size=TURN)
    assert complete(server, list(b"say:x")).choices[0].text == "x"
    for body in ({"prompt": "a<turn>b"}, {"prompt": [97, TURN]}):
        error = server.post("/v1/completions", json=body).json()["error"]
        assert (error["code"], error["param"]) == ("invalid_value", "prompt")
        assert str(TURN) in error["message"]
    error = server.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]}).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_value", "messages")
    assert "'<turn>'" in error["message"]
    for name, value in (("logit_bias", {str(TURN): 1}), ("stop_token_ids", [TURN])):
        assert server.post("/v1/completions", json={"prompt": "x", name: value}).json()["error"]["param"] == name
    assert len(server.engine.requests) == 1


def test_echo_for_every_choice(shared: RunningServer):
    assert [c.text for c in complete(shared, "say:x", echo=True, n=2).choices] == ["say:xx", "say:xx"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ["x"] * 65}, "prompt"),
        ({"prompt": [0, 260]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "", "add_special_tokens": False}, "prompt"),
        ({}, "prompt"),
    ],
)
def test_refusals(shared: RunningServer, body: dict, param: str):
    response = shared.post("/v1/completions", json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_one_prompt_too_long_refuses_the_whole_batch(start):
    server = start()
    with pytest.raises(openai.BadRequestError) as caught:
        complete(server, ["say:ok", "x" * CONTEXT_LENGTH])
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    assert [abort[0] for abort in server.engine.aborted] == [server.engine.requests[0].id], "all or none"
    assert not server.engine.has_work


# The other paths.


def test_models(shared: RunningServer):
    (model,) = shared.client().models.list()
    assert (model.id, model.object, model.owned_by) == ("fake-model", "model", "headrace")
    assert shared.client().models.retrieve("fake-model").id == "fake-model"
    with pytest.raises(openai.NotFoundError) as caught:
        shared.client().models.retrieve("org/other")
    assert caught.value.code == "model_not_found"


def test_tokenize_and_back(shared: RunningServer):
    reply = shared.post("/tokenize", json={"prompt": "hé"}).json()
    assert reply == {"tokens": [BOS, 104, 195, 169], "count": 4, "max_model_len": CONTEXT_LENGTH}
    assert shared.post("/detokenize", json={"tokens": reply["tokens"][1:]}).json() == {"prompt": "hé"}
    plain = shared.post("/tokenize", json={"prompt": "h", "add_special_tokens": False}).json()
    assert plain["tokens"] == [104]
    chat = shared.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]}).json()
    assert chat["count"] == len("?user\nx??assistant\n")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "x", "messages": []}),
        ("/tokenize", {"prompt": 5}),
        ("/tokenize", {"messages": []}),
        ("/detokenize", {"tokens": [260]}),
        ("/detokenize", {"tokens": "x"}),
        ("/detokenize", {}),
    ],
)
def test_tokenize_refusals(shared: RunningServer, path: str, body: dict):
    response = shared.post(path, json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"]


def test_probes_may_ask_for_the_head_only(shared: RunningServer):
    """Load balancers do; it was 405."""
    for path in ("/health", "/ready", "/v1/models"):
        response = shared.request("HEAD", path)
        assert (response.status_code, response.content) == (200, b"")


def test_version_health_ready(shared: RunningServer):
    assert shared.get("/version").json()["version"]
    assert shared.get("/health").json() == {"status": "ok"}
    assert shared.get("/ready").status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("GET", "/docs", 404),
    ],
)
def test_framework_errors_have_the_same_shape(shared: RunningServer, method: str, path: str, status: int):
    response = shared.request(method, path)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    if status == 405:
        assert response.headers["allow"]


def test_bodies_are_bounded_while_they_are_read(start):
    server = start(limits=CallLimits(max_body_bytes=1000))
    big = json.dumps({"prompt": "x" * 1000}).encode()
    response = server.post("/v1/completions", content=big)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"
    response = server.post("/v1/completions", content=iter([big[:600], big[600:]]))  # chunked: no length is declared
    assert response.status_code == 413
    assert server.post("/v1/completions", json={"prompt": "say:x"}).status_code == 200
    assert len(server.engine.requests) == 1


def test_the_engine_is_not_asked_by_what_can_be_answered_without_it(start):
    server = start(FakeEngine())
    for path in ("/health", "/ready", "/metrics", "/version", "/v1/models"):
        assert server.get(path).status_code == 200
    assert server.engine.num_steps == 0
