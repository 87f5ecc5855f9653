"""GET /openapi.json says what the server does: its routes, its fields, its ranges, its replies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from headrace.server.openapi import ENDPOINTS
from headrace.server.protocol import HARMLESS
from tests.server.conftest import RunningServer
from tests.server.fakes import FakeEngine

CHAT = {"messages": [{"role": "user", "content": "say:x"}]}
BODIES: dict[str, dict] = {
    "/v1/chat/completions": CHAT | {"logprobs": True},
    "/v1/completions": {"prompt": "say:x"},
    "/v1/embeddings": {"input": "x"},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [97]},
    "/render": CHAT,
}
OF_THE_MODEL = {"max_tokens", "min_tokens", "max_completion_tokens", "dimensions", "reasoning_budget"}
"""Fields with a tighter limit than their type's, which depends on the model."""


@pytest.fixture(scope="module")
def described(shared: RunningServer) -> dict[str, Any]:
    return shared.get("/openapi.json").json()


def follow(schema: dict, described: dict) -> dict:
    return described["components"]["schemas"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def body_of(path: str, described: dict) -> dict:
    return follow(described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"], described)


def problems(value: Any, schema: dict, described: dict, where: str = "") -> Iterator[str]:
    """What of JSON Schema the answers' schemas use."""
    schema = follow(schema, described)
    if "anyOf" in schema:
        each = [list(problems(value, branch, described, where)) for branch in schema["anyOf"]]
        if all(each):
            yield f"{where}: {value!r} is none of the {len(each)}: {each}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where}: {value!r} is not one of {schema['enum']}"
    if "const" in schema and value != schema["const"]:
        yield f"{where}: {value!r} is not {schema['const']!r}"
    types = {
        "string": str,
        "number": (int, float),
        "integer": int,
        "boolean": bool,
        "array": list,
        "object": dict,
        "null": type(None),
    }
    wanted = schema.get("type", [])
    wanted = [wanted] if isinstance(wanted, str) else wanted
    if wanted and not any(isinstance(value, types[name]) for name in wanted):
        yield f"{where}: {value!r} is not of type {wanted}"
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from problems(item, schema.get("items", {}), described, f"{where}[{i}]")
    elif isinstance(value, dict):
        for name in schema.get("required", ()):
            if name not in value:
                yield f"{where}.{name} is missing"
        for name, item in value.items():
            rest = schema.get("additionalProperties", {} if "properties" not in schema else None)
            known = schema.get("properties", {}).get(name, rest)
            if known is None:
                yield f"{where}.{name} is not described"
            else:
                yield from problems(item, known, described, f"{where}.{name}")


def test_every_route_and_no_other(shared: RunningServer, described: dict):
    routes = {
        (method.lower(), route.path.replace(":path", ""))
        for route in shared.app.routes
        for method in route.methods - {"HEAD"}
    }
    assert {(method, path) for path, methods in described["paths"].items() for method in methods} == routes
    assert described["openapi"].startswith("3.1")


def test_every_reference_leads_somewhere(described: dict):
    def references(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            yield from (v for k, v in value.items() if k == "$ref")
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from references(item)

    found = set(references(described))
    assert len(found) > 20
    for reference in found:
        assert reference.rpartition("/")[2] in described["components"]["schemas"], reference


@pytest.mark.parametrize("endpoint", [e for e in ENDPOINTS if e.body], ids=lambda e: e.name)
def test_the_fields_are_those_that_are_read(shared: RunningServer, described: dict, endpoint):
    body = body_of(endpoint.path, described)
    assert set(body["properties"]) == {*endpoint.body.model_fields, *HARMLESS}
    assert body["additionalProperties"] is False
    error = shared.post(endpoint.path, json=BODIES[endpoint.path] | {"unheard_of": 1}).json()["error"]
    assert (error["code"], error["param"]) == ("unknown_parameter", "unheard_of")


def test_fields_are_described_by_the_text_below_them(described: dict):
    schemas = described["components"]["schemas"]
    assert schemas["ChatRequest"]["properties"]["top_k"]["description"] == "-1 and 0: all tokens."
    assert schemas["CompletionRequest"]["properties"]["top_k"]["description"] == "-1 and 0: all tokens."
    assert schemas["EmbeddingRequest"]["properties"]["pooling"]["description"].startswith("Of the tokens")
    assert "description" not in schemas["ChatRequest"]["properties"]["temperature"]
    assert schemas["CompletionRequest"]["properties"]["logprobs"] != schemas["ChatRequest"]["properties"]["logprobs"]


@pytest.mark.parametrize("path", BODIES)
def test_ranges_end_where_the_server_says_no(shared: RunningServer, described: dict, path: str):
    """Each bound of each number: at it the call is answered, beyond it is refused by name."""
    num_bounds = 0
    for name, schema in body_of(path, described)["properties"].items():
        for branch in schema.get("anyOf", (schema,)):
            if branch.get("type") not in ("number", "integer") or name in OF_THE_MODEL:
                continue
            step = 1 if branch["type"] == "integer" else 1e-6
            for bound, sign in (("minimum", -1), ("maximum", 1), ("exclusiveMinimum", -1)):
                if bound not in branch:
                    continue
                num_bounds += 1
                edge, is_inside = branch[bound], "exclusive" not in bound
                beyond = shared.post(path, json=BODIES[path] | {name: edge + sign * step * is_inside})
                assert beyond.status_code == 400, (name, bound, beyond.text)
                assert beyond.json()["error"]["param"] == name
                inside = shared.post(path, json=BODIES[path] | {name: edge if is_inside else edge + step})
                assert inside.status_code == 200, (name, bound, inside.text)
    assert num_bounds >= {"/v1/chat/completions": 30, "/v1/completions": 30, "/v1/embeddings": 4}.get(path, 0)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        *(("POST", path, body) for path, body in BODIES.items()),
        ("POST", "/v1/completions", {"prompt": ["a", "b"], "logprobs": 2, "prompt_logprobs": 1, "timings": True}),
        ("POST", "/v1/chat/completions", CHAT | {"prompt_logprobs": 1, "timings": True}),
        ("POST", "/v1/embeddings", {"input": ["a", "b"], "encoding_format": "base64"}),
        ("POST", "/v1/completions", {"prompt": 5}),
        ("POST", "/v1/completions", {"prompt": "x", "model": "other"}),
        ("POST", "/render", {}),
        ("GET", "/v1/models", None),
        ("GET", "/v1/models/fake-model", None),
        ("GET", "/health", None),
        ("GET", "/ready", None),
        ("GET", "/version", None),
    ],
)
def test_answers_are_as_described(shared: RunningServer, described: dict, method: str, path: str, body: dict | None):
    response = shared.request(method, path, json=body)
    name = "/v1/models/{name}" if path.startswith("/v1/models/") else path
    answers = described["paths"][name][method.lower()]["responses"]
    schema = answers[str(response.status_code)]["content"]["application/json"]["schema"]
    assert list(problems(response.json(), schema, described)) == []


def test_the_checker_sees_what_is_wrong(shared: RunningServer, described: dict):
    schema = described["paths"]["/v1/completions"]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    reply = shared.post("/v1/completions", json={"prompt": "x", "logprobs": 1}).json()
    for change in ({"created": "now"}, {"object": "reply"}, {"choices": [{}]}, {"more": 1}, {"usage": {}}):
        assert list(problems(reply | change, schema, described)), change
    assert list(problems({k: v for k, v in reply.items() if k != "id"}, schema, described))


def test_keys_are_part_of_it_where_they_are_needed(start, described: dict):
    assert "securitySchemes" not in described["components"]
    server = start(FakeEngine(), api_keys=("secret",))
    assert server.get("/openapi.json").status_code == 401
    guarded = server.get("/openapi.json", headers={"authorization": "Bearer secret"}).json()
    for path, methods in guarded["paths"].items():
        for method, operation in methods.items():
            open_to_all = path == "/health"
            assert ("401" in operation["responses"]) == ("security" in operation) == (not open_to_all), (method, path)
