"""Fields beyond OpenAI's: what they become for the engine, and what they add to a reply."""

from __future__ import annotations

import time

import pytest

from headrace.core.events import TokenEvent
from headrace.core.request import Request
from headrace.core.result import TokenLogprob
from tests.server.conftest import RunningServer
from tests.server.fakes import EOS, TURN, TURN_END, FakeEngine

PATHS = {
    "/v1/completions": {"prompt": "say:x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "say:x"}]},
}


def error_of(server: RunningServer, path: str, body: dict) -> dict:
    response = server.post(path, json=body)
    assert response.status_code == 400, response.text
    return response.json()["error"]


@pytest.mark.parametrize("path", PATHS)
def test_priority_and_deadline_reach_the_engine(start, path: str):
    server = start()
    before = time.monotonic()
    assert server.post(path, json=PATHS[path] | {"priority": -3, "deadline_ms": 2500}).status_code == 200
    after = time.monotonic()
    assert server.post(path, json=PATHS[path]).status_code == 200
    urgent, plain = server.engine.requests
    assert (urgent.priority, plain.priority) == (-3, 0)
    assert before + 2.5 <= urgent.deadline_s <= after + 2.5, "from the call's arrival, on the engine's clock"
    assert plain.deadline_s is None


@pytest.mark.parametrize("path", PATHS)
def test_flex_is_batch_class_and_no_other_tier_is(start, path: str):
    server = start()
    tiers = (None, "auto", "default", "flex", "priority", "scale")
    for tier in tiers:
        assert server.post(path, json=PATHS[path] | {"service_tier": tier}).status_code == 200
    assert [request.is_batch for request in server.engine.requests] == [tier == "flex" for tier in tiers]


def test_what_was_dropped_for_being_late_is_told_so(start):
    server = start(FakeEngine(drops_late=True))
    response = server.post("/v1/completions", json={"prompt": "say:x", "deadline_ms": 1000})
    assert response.status_code == 429
    assert response.json()["error"]["code"] == "deadline"
    assert "its deadline cannot be met" in response.json()["error"]["message"]
    assert int(response.headers["retry-after"]) >= 1
    assert server.post("/v1/completions", json={"prompt": "say:x"}).status_code == 200


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("priority", 2**31),
        ("priority", 1.5),
        ("priority", "high"),
        ("deadline_ms", 0),
        ("deadline_ms", -5),
        ("deadline_ms", 24 * 3600 * 1000 + 1),
        ("cache_salt", ""),
        ("cache_salt", "x" * 257),
        ("cache_salt", 5),
        ("service_tier", "cheap"),
        ("service_tier", 1),
    ],
)
def test_wrong_values_are_refused(shared: RunningServer, path: str, field: str, value: object):
    error = error_of(shared, path, PATHS[path] | {field: value})
    assert (error["code"], error["param"]) == ("invalid_value", field)
    assert error["message"].startswith(f"{field} is ")


def test_a_salt_parts_a_tenants_prefixes_and_joins_no_two_tenants(start):
    server = start(FakeEngine(), api_keys=("first-key", "second-key"))
    for key, salt in (
        ("first-key", "a"),
        ("first-key", "a"),
        ("first-key", "b"),
        ("second-key", "a"),
        ("first-key", None),
    ):
        body = {"prompt": "say:x"} | ({} if salt is None else {"cache_salt": salt})
        headers = {"authorization": f"Bearer {key}"}
        assert server.post("/v1/completions", json=body, headers=headers).status_code == 200
    salts = [request.cache_salt for request in server.engine.requests]
    assert salts[0] == salts[1]
    assert len(set(salts)) == 4
    # A tenant cannot write its way into another's prefixes, nor into its own unsalted ones.
    other = server.engine.requests[3].tenant
    body = {"prompt": "say:x", "cache_salt": f"{other}/a"}
    server.post("/v1/completions", json=body, headers={"authorization": "Bearer first-key"})
    assert server.engine.requests[-1].cache_salt not in salts


def test_samplers_reach_the_engine(start):
    server = start()
    fields = {
        "typical_p": 0.9,
        "xtc_probability": 0.5,
        "xtc_threshold": 0.2,
        "dry_multiplier": 0.8,
        "dry_base": 2,
        "dry_allowed_length": 3,
        "dry_range": 50,
    }
    breakers = {"dry_sequence_breakers": ["e", "rn>", "é"]}
    assert server.post("/v1/completions", json={"prompt": "x"} | fields | breakers).status_code == 200
    assert server.post("/v1/completions", json={"prompt": "x", "dry_multiplier": 1}).status_code == 200
    assert server.post("/v1/completions", json={"prompt": "x"} | breakers).status_code == 200
    given, default, unused = (request.sampling for request in server.engine.requests)
    assert {name: getattr(given, name) for name in fields} == fields
    # Tokens are bytes; "<turn>" ends in "rn>", "<eos>" has an "e", and no token holds both bytes of "é".
    assert given.dry_breakers == {ord("e"), TURN, TURN_END, EOS}
    assert default.dry_breakers == {ord(char) for char in '\n:"*'}
    assert (default.dry_base, default.dry_allowed_length, default.dry_range) == (1.75, 2, 0)
    assert unused.dry_breakers == frozenset(), "nothing is looked up for nothing"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("typical_p", 0),
        ("xtc_probability", 1.5),
        ("xtc_threshold", 0),
        ("dry_multiplier", -1),
        ("dry_base", 0.9),
        ("dry_allowed_length", 0),
        ("dry_range", -1),
        ("dry_sequence_breakers", "x"),
        ("dry_sequence_breakers", [""]),
        ("dry_sequence_breakers", ["x"] * 17),
        ("dry_sequence_breakers", [5]),
    ],
)
def test_wrong_samplers_are_refused(shared: RunningServer, field: str, value: object):
    error = error_of(shared, "/v1/completions", {"prompt": "x", field: value})
    assert (error["code"], error["param"]) == ("invalid_value", field)


def test_logprobs_of_a_completions_prompts(start):
    server = start()
    body = {"prompt": ["say:hé", "ab"], "n": 2, "prompt_logprobs": 1, "max_tokens": 1}
    choices = server.post("/v1/completions", json=body).json()["choices"]
    assert ["prompt_logprobs" in choice for choice in choices] == [True, False, True, False]
    first, *scored = choices[2]["prompt_logprobs"]
    assert first is None
    assert scored == [
        {"97": {"logprob": -0.25, "rank": 1, "decoded_token": "a"}},
        {"98": {"logprob": -0.25, "rank": 1, "decoded_token": "b"}},
    ]
    assert choices[0]["prompt_logprobs"][-1]["169"]["decoded_token"] == "\ufffd", "half a character"
    assert server.engine.requests[0].sampling.num_logprobs is None
    assert all(choice["logprobs"] is None for choice in choices)


def test_a_chats_prompt_logprobs_are_a_field_of_the_reply(start):
    server = start(LessSure())
    reply = server.post("/v1/chat/completions", json=PATHS["/v1/chat/completions"] | {"prompt_logprobs": 2}).json()
    (request,) = server.engine.requests
    assert len(reply["prompt_logprobs"]) == len(request.prompt)
    # The prompt's own token first, though it is not among the most probable.
    assert reply["prompt_logprobs"][1] == {
        "117": {"logprob": -9999.0, "rank": 8, "decoded_token": "u"},
        "65": {"logprob": -0.5, "rank": 1, "decoded_token": "A"},
        "66": {"logprob": -1.5, "rank": 2, "decoded_token": "B"},
    }


class LessSure(FakeEngine):
    """What it finds in a prompt it would never have said."""

    def _admit(self, request: Request) -> list[TokenEvent]:
        top = ((65, -0.5), (66, -1.5))
        return [
            event._replace(
                prompt_logprobs=tuple(TokenLogprob(s.token, float("-inf"), 7, top) for s in event.prompt_logprobs)
            )
            for event in super()._admit(request)
        ]


def test_echo_keeps_its_own_number_of_logprobs(start):
    server = start()
    body = {"prompt": "ab", "echo": True, "logprobs": 1, "prompt_logprobs": 3, "max_tokens": 0}
    (choice,) = server.post("/v1/completions", json=body).json()["choices"]
    assert [None if top is None else len(top) for top in choice["logprobs"]["top_logprobs"]] == [None, 1, 1]
    assert [None if top is None else len(top) for top in choice["prompt_logprobs"]] == [None, 3, 3]
    body["logprobs"], body["prompt_logprobs"] = 3, 1
    (choice,) = server.post("/v1/completions", json=body).json()["choices"]
    assert [None if top is None else len(top) for top in choice["logprobs"]["top_logprobs"]] == [None, 3, 3]
    assert [None if top is None else len(top) for top in choice["prompt_logprobs"]] == [None, 1, 1]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "extra", [{"prompt_logprobs": 21}, {"prompt_logprobs": -1}, {"prompt_logprobs": 1, "stream": True}]
)
def test_prompt_logprobs_are_refused_where_they_cannot_be(shared: RunningServer, path: str, extra: dict):
    assert error_of(shared, path, PATHS[path] | extra)["param"] == "prompt_logprobs"


def test_a_chats_prompt_alone_may_be_scored(start):
    server = start()
    body = PATHS["/v1/chat/completions"] | {"prompt_logprobs": 0, "max_tokens": 0}
    reply = server.post("/v1/chat/completions", json=body).json()
    assert (reply["choices"][0]["message"]["content"], reply["choices"][0]["finish_reason"]) == ("", "length")
    assert len(reply["prompt_logprobs"]) == reply["usage"]["prompt_tokens"]
    assert reply["usage"]["completion_tokens"] == 0
    error = error_of(server, "/v1/chat/completions", PATHS["/v1/chat/completions"] | {"max_tokens": 0})
    assert (error["param"], "prompt_logprobs" in error["message"]) == ("max_tokens", True)
