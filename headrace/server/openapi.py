"""GET /openapi.json: the API's own description, made of the types that parse and write its bodies.

Bodies are parsed by hand (`protocol.parse`), so that nothing of this comes from the framework. What a type alone does
not say is added here: the ranges that `SamplingParams` and `CallLimits` enforce, and that unknown fields are refused.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
from pydantic.json_schema import models_json_schema

from headrace.server import protocol
from headrace.server.embeddings import EmbeddingReply
from headrace.server.limits import CallLimits
from headrace.server.responses import ChatChoice, Model, Reply, TextChoice

Schema = dict[str, Any]

_REF = "#/components/schemas/"
_COUNT = {"type": "integer", "minimum": 0}
_TEXT = {"type": "string"}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One path with one method."""

    method: str
    path: str
    name: str
    summary: str
    answer: Schema
    body: type[protocol._Model] | None = None
    refuses: Sequence[int] = ()
    """Statuses it may have besides 200, 401 and 500."""
    parameters: Sequence[Schema] = ()
    media_type: str = "application/json"
    streams: bool = False


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _of(name: str) -> Schema:
    return {"$ref": _REF + name}


_GENERATES = (400, 404, 413, 429, 503)
_READS = (400, 404, 413, 429, 503)
_NAME = {
    "name": "name",
    "in": "path",
    "required": True,
    "schema": _TEXT,
    "description": "A served name; may have slashes.",
}

_OPTIONAL_TEXT: Schema = {"type": ["string", "null"]}

ENDPOINTS = (
    Endpoint(
        "post",
        "/v1/chat/completions",
        "chat",
        "Reply to a conversation.",
        _of("ChatReply"),
        protocol.ChatRequest,
        _GENERATES,
        streams=True,
    ),
    Endpoint(
        "post",
        "/v1/completions",
        "complete",
        "Continue prompts.",
        _of("TextReply"),
        protocol.CompletionRequest,
        _GENERATES,
        streams=True,
    ),
    Endpoint(
        "post",
        "/v1/embeddings",
        "embed",
        "Embed texts: pooled hidden states of the model.",
        _of("EmbeddingReply"),
        protocol.EmbeddingRequest,
        _GENERATES,
    ),
    Endpoint(
        "get",
        "/v1/models",
        "models",
        "The served names.",
        _object(object={"const": "list"}, data={"type": "array", "items": _of("Model")}),
    ),
    Endpoint(
        "get", "/v1/models/{name}", "model", "One served name.", _of("Model"), refuses=(404,), parameters=(_NAME,)
    ),
    Endpoint(
        "post",
        "/tokenize",
        "tokenize",
        "The token ids of a text or of a conversation.",
        _object(tokens={"type": "array", "items": _COUNT}, count=_COUNT, max_model_len=_COUNT),
        protocol.TokenizeRequest,
        _READS,
    ),
    Endpoint(
        "post",
        "/detokenize",
        "detokenize",
        "The text of token ids.",
        _object(prompt=_TEXT),
        protocol.DetokenizeRequest,
        _READS,
    ),
    Endpoint(
        "post",
        "/render",
        "render",
        "What the chat template makes of a conversation.",
        _object(prompt=_TEXT),
        protocol.RenderRequest,
        _READS,
    ),
    Endpoint(
        "get",
        "/tokenizer_info",
        "tokenizer_info",
        "What a client has to know that encodes and renders with this server.",
        _object(
            bos_token=_OPTIONAL_TEXT, eos_token=_OPTIONAL_TEXT, pad_token={"type": "null"}, chat_template=_OPTIONAL_TEXT
        ),
    ),
    Endpoint("get", "/health", "health", "Whether the engine lives.", _object(status={"const": "ok"}), refuses=(503,)),
    Endpoint(
        "get", "/ready", "ready", "Whether new calls are welcome.", _object(status={"const": "ready"}), refuses=(503,)
    ),
    Endpoint("get", "/metrics", "metrics", "Prometheus' text format.", _TEXT, media_type="text/plain"),
    Endpoint(
        "get",
        "/version",
        "version",
        "The version, and the instruction sets of this machine.",
        _object(version=_TEXT, instruction_sets={"type": "array", "items": _TEXT}),
    ),
    Endpoint("get", "/openapi.json", "openapi", "This document.", {"type": "object"}),
)

_REFUSALS = {
    400: "What the client has to change.",
    401: "No valid API key.",
    404: "No such model.",
    413: "The body is too large.",
    429: "The queue is full; see Retry-After.",
    500: "A bug of the server.",
    503: "The server is shutting down, or its engine has failed.",
}


def document(version: str, limits: CallLimits, *, has_keys: bool) -> Schema:
    """OpenAPI 3.1. `has_keys`: every path but /health asks for an API key."""
    paths: dict[str, Schema] = {}
    for endpoint in ENDPOINTS:
        is_guarded = has_keys and endpoint.path != "/health"
        paths.setdefault(endpoint.path, {})[endpoint.method] = _operation(endpoint, is_guarded)
    components: Schema = {"schemas": _request_schemas(limits) | _answer_schemas()}
    described: Schema = {
        "openapi": "3.1.0",
        "info": {"title": "Headrace", "version": version},
        "paths": paths,
        "components": components,
    }
    if has_keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return described


def _operation(endpoint: Endpoint, is_guarded: bool) -> Schema:
    content: Schema = {endpoint.media_type: {"schema": endpoint.answer}}
    answers = "The answer."
    if endpoint.streams:
        content["text/event-stream"] = {}  # OpenAPI 3.1 has no schema for the events of a stream
        answers += " With `stream`, events with a chunk of it each, then `data: [DONE]`."
    refuses = sorted({*endpoint.refuses, 500, *((401,) if is_guarded else ())})
    operation: Schema = {
        "operationId": endpoint.name,
        "summary": endpoint.summary,
        "responses": {"200": {"description": answers, "content": content}}
        | {str(status): _refusal(status) for status in refuses},
    }
    if endpoint.parameters:
        operation["parameters"] = list(endpoint.parameters)
    if endpoint.body is not None:
        schema = _of(endpoint.body.__name__)
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if is_guarded:
        operation["security"] = [{"key": []}]
    return operation


def _refusal(status: int) -> Schema:
    refusal: Schema = {
        "description": _REFUSALS[status],
        "content": {"application/json": {"schema": _of("Error")}},
    }
    if status == 429:
        refusal["headers"] = {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds."}}
    return refusal


def _answer_schemas() -> dict[str, Schema]:
    types = (Reply[ChatChoice], Reply[TextChoice], EmbeddingReply, Model)
    _, schemas = msgspec.json.schema_components(types, ref_template=_REF + "{name}")
    named = {"Reply_ChatChoice_": "ChatReply", "Reply_TextChoice_": "TextReply"}
    nullable = {"type": ["string", "null"]}
    error = _object(message=_TEXT, type=_TEXT, param=nullable, code=nullable)
    return {named.get(name, name): schema for name, schema in schemas.items()} | {"Error": _object(error=error)}


def _request_schemas(limits: CallLimits) -> dict[str, Schema]:
    bodies = [endpoint.body for endpoint in ENDPOINTS if endpoint.body is not None]
    _, generated = models_json_schema([(body, "validation") for body in bodies], ref_template=_REF + "{model}")
    schemas: dict[str, Schema] = generated["$defs"]
    for schema in schemas.values():
        schema["additionalProperties"] = False
    schemas["TokenizeRequest"]["oneOf"] = [_either("prompt", "messages"), _either("messages", "prompt")]
    for class_name, field, text in _field_docs():
        for name, schema in schemas.items():
            if field in schema["properties"] and class_name in {base.__name__ for base in _TYPES[name].__mro__}:
                schema["properties"][field]["description"] = text
    for body in bodies:
        properties = schemas[body.__name__]["properties"]
        for name, bounds in _bounds(limits).items():
            if name in properties:
                _bound(properties[name], bounds)
        if "messages" in properties:
            _bound(properties["messages"], {"minItems": 1}, "array")
        for name in sorted(protocol.HARMLESS):
            properties[name] = {"description": "Accepted, without effect."}
    return schemas


_TYPES: Mapping[str, type] = {name: kind for name, kind in vars(protocol).items() if isinstance(kind, type)}


def _field_docs() -> Iterator[tuple[str, str, str]]:
    """(class, field, the text below it). Pydantic would collect them on import, which slows down every start."""
    for node in ast.parse(inspect.getsource(protocol)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for before, after in pairwise(node.body):
            match before, after:
                case ast.AnnAssign(target=ast.Name(id=field)), ast.Expr(value=ast.Constant(value=str(text))):
                    yield node.name, field, inspect.cleandoc(text)


def _either(given: str, absent: str) -> Schema:
    return {
        "required": [given],
        "properties": {given: {"type": ["string", "array"]}, absent: {"type": "null"}},
    }


def _bound(schema: Schema, bounds: Mapping[str, float], *types: str) -> None:
    """`schema` may be one of a value or null; of a number, unless `types` say otherwise."""
    for branch in schema.get("anyOf", (schema,)):
        if branch.get("type") in (types or ("number", "integer")):
            branch.update(bounds)


def _between(low: float, high: float) -> dict[str, float]:
    return {"minimum": low, "maximum": high}


_UP_TO_1 = {"exclusiveMinimum": 0, "maximum": 1}


def _bounds(limits: CallLimits) -> dict[str, Mapping[str, float]]:
    """The ranges that `SamplingParams` and `admission` enforce."""
    logprobs = {"minimum": 0, "maximum": limits.max_logprobs}
    choices = {"minimum": 1, "maximum": limits.max_choices}
    return {
        "n": choices,
        "best_of": choices,
        "logprobs": logprobs,
        "top_logprobs": logprobs,
        "prompt_logprobs": logprobs,
        "temperature": _between(0, 100),
        "top_p": {"minimum": 0, "maximum": 1},
        "min_p": _between(0, 1),
        "typical_p": _UP_TO_1,
        "xtc_probability": _between(0, 1),
        "xtc_threshold": _UP_TO_1,
        "dry_multiplier": _between(0, 100),
        "dry_base": _between(1, 10),
        "dry_allowed_length": {"minimum": 1},
        "presence_penalty": _between(-2, 2),
        "frequency_penalty": _between(-2, 2),
        "repetition_penalty": {"minimum": 0.01, "maximum": 100},
    }
