"""The HTTP app: what is served where."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from headrace.core.errors import HeadraceError
from headrace.server import admission, openapi, protocol, system
from headrace.server.embeddings import EmbeddingWriter
from headrace.server.errors import ApiError, as_api_error, handle_http_exception
from headrace.server.guard import ApiKeyGuard, OriginGuard
from headrace.server.limits import CallLimits
from headrace.server.replies import GenerationReply, Plan, arrival, read_body
from headrace.server.responses import ChatWriter, CompletionWriter, Header, Model
from headrace.server.service import Service

if TYPE_CHECKING:
    from headrace.server.build import Deployment

T = TypeVar("T")
Reading = TypeVar("Reading", protocol.TokenizeRequest, protocol.DetokenizeRequest, protocol.RenderRequest)


def create_app(
    deployment: Deployment,
    *,
    limits: CallLimits | None = None,
    aliases: Sequence[str] = (),
    api_keys: Sequence[str] = (),
    origins: Sequence[str] = (),
) -> FastAPI:
    """The app over a built deployment; `app.state.service` is what a server drains.

    `aliases`: further names under which requests may ask for the model. `api_keys`: if any, every path but /health
    needs one of them; each key is a tenant with prefixes of its own. `origins`: sites whose pages may ask, see
    `OriginGuard`.
    """
    service = Service(deployment, limits or CallLimits(), tuple(aliases))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        service.stop()

    app = FastAPI(
        title="Headrace",
        version=system.version(),
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.state.service = service

    async def handle_error(_: Request, error: Exception) -> Response:
        api_error = as_api_error(error)
        service.metrics.refused.labels(status=str(api_error.status)).inc()
        return api_error.response()

    for kind in (ApiError, HeadraceError, Exception):
        app.add_exception_handler(kind, handle_error)
    app.add_exception_handler(HTTPException, handle_http_exception)
    if api_keys:
        app.add_middleware(ApiKeyGuard, keys=tuple(api_keys))
    app.add_middleware(OriginGuard, origins=tuple(origins))
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=tuple(origins), allow_methods=["*"], allow_headers=["*"])

    handlers = Handlers(service, has_keys=bool(api_keys))
    for method, path, handler in (
        ("POST", "/v1/chat/completions", handlers.chat),
        ("POST", "/v1/completions", handlers.completions),
        ("POST", "/v1/embeddings", handlers.embeddings),
        ("GET", "/v1/models", handlers.models),
        ("GET", "/v1/models/{name:path}", handlers.model),
        ("POST", "/tokenize", handlers.tokenize),
        ("POST", "/detokenize", handlers.detokenize),
        ("GET", "/tokenizer_info", handlers.tokenizer_info),
        ("POST", "/render", handlers.render),
        ("GET", "/health", handlers.health),
        ("GET", "/ready", handlers.ready),
        ("GET", "/metrics", handlers.metrics),
        ("GET", "/version", handlers.version),
        ("GET", "/openapi.json", handlers.openapi),
    ):
        methods = ["GET", "HEAD"] if method == "GET" else [method]
        app.add_api_route(path, handler, methods=methods, response_model=None)
    return app


class Handlers:
    """One method per path. None of them waits for the engine except by awaiting a generation."""

    def __init__(self, service: Service, *, has_keys: bool) -> None:
        self._service = service
        self._has_keys = has_keys
        self._described: openapi.Schema | None = None

    async def chat(self, request: Request) -> Response:
        start_s = arrival()
        service = self._service
        call = await self._parse(protocol.ChatRequest, request)
        admission.check_model(call.model, service.names)
        header = self._header("chatcmpl", call)
        prepare = partial(
            admission.prepare_chat,
            call,
            header.id,
            service.deployment,
            service.limits,
            _tenant(request),
            arrival_s=start_s,
        )
        writer = ChatWriter(header, service.deployment.tokenizer, bool(call.logprobs))
        names = {"prompt": "messages", "max_tokens": admission.limit_of(call)[1]}
        plan = Plan(header.id, 1, prepare, names, writer, bool(call.stream), start_s)
        return GenerationReply(service, plan)

    async def completions(self, request: Request) -> Response:
        start_s = arrival()
        service = self._service
        call = await self._parse(protocol.CompletionRequest, request)
        admission.check_model(call.model, service.names)
        header = self._header("cmpl", call)
        prepare = partial(
            admission.prepare_completion,
            call,
            header.id,
            service.deployment,
            service.limits,
            _tenant(request),
            arrival_s=start_s,
        )
        ranking = admission.ranking_of(call)
        writer = CompletionWriter(header, service.deployment.tokenizer, call.logprobs, ranking)
        names = {"messages": "prompt"} | ({"n": "best_of"} if ranking else {})
        plan = Plan(header.id, len(call.prompt), prepare, names, writer, bool(call.stream), start_s)
        return GenerationReply(service, plan)

    async def embeddings(self, request: Request) -> Response:
        start_s = arrival()
        service = self._service
        call = await self._parse(protocol.EmbeddingRequest, request)
        admission.check_model(call.model, service.names)
        admission.check_inputs(call, service.limits)
        call_id = f"embd-{uuid.uuid4().hex}"
        prepare = partial(
            admission.prepare_embedding,
            call,
            call_id,
            service.deployment,
            _tenant(request),
            arrival_s=start_s,
        )
        writer = EmbeddingWriter(call.model or service.names[0], call.encoding_format == "base64", call.dimensions)
        plan = Plan(call_id, len(call.input), prepare, {"prompt": "input"}, writer, False, start_s)
        return GenerationReply(service, plan)

    async def models(self, request: Request) -> Response:
        data = [self._model(name) for name in self._service.names]
        return _json({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        admission.check_model(name, self._service.names)
        return _json(self._model(name))

    async def tokenize(self, request: Request) -> Response:
        tokens = await self._read(request, protocol.TokenizeRequest, admission.tokenize)
        context_length = self._service.deployment.context_length
        return _json({"tokens": tokens, "count": len(tokens), "max_model_len": context_length})

    async def detokenize(self, request: Request) -> Response:
        return _json({"prompt": await self._read(request, protocol.DetokenizeRequest, admission.detokenize)})

    async def render(self, request: Request) -> Response:
        return _json({"prompt": await self._read(request, protocol.RenderRequest, admission.render)})

    async def tokenizer_info(self, request: Request) -> Response:
        """What a client has to know that encodes and renders here; vLLM's fields, which lm-evaluation-harness reads."""
        deployment = self._service.deployment
        tokenizer, template = deployment.tokenizer, deployment.template
        names = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
        texts = {name: None if token is None else tokenizer.text_of(token) for name, token in names.items()}
        return _json({**texts, "pad_token": None, "chat_template": None if template is None else template.source})

    async def health(self, request: Request) -> Response:
        """200 while the engine lives, whatever it is doing."""
        if not self._service.engine.is_alive:
            raise ApiError(503, "engine_failed", "The engine has failed; its log says why. Restart the server.")
        return _json({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """200 while new calls are welcome."""
        with self._service.call():
            return _json({"status": "ready"})

    async def metrics(self, request: Request) -> Response:
        return Response(self._service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def version(self, request: Request) -> Response:
        return _json({"version": system.version(), "instruction_sets": system.instruction_sets()})

    async def openapi(self, request: Request) -> Response:
        if self._described is None:
            self._described = await self._service.in_text_pool(
                openapi.document, system.version(), self._service.limits, has_keys=self._has_keys
            )
        return _json(self._described)

    async def _read(self, request: Request, kind: type[Reading], function: Callable[[Reading, Deployment], T]) -> T:
        """What `function`, in the text pool, makes of a call that needs no engine."""
        service = self._service
        call = await self._parse(kind, request)
        admission.check_model(call.model, service.names)
        with service.call(), service.entering(1):
            return await service.in_text_pool(function, call, service.deployment)

    async def _parse(self, kind: type[protocol.Body], request: Request) -> protocol.Body:
        service = self._service
        body = await read_body(request, service.limits.max_body_bytes)
        if len(body) < _PARSE_HERE_BYTES:
            return protocol.parse(kind, body)
        with service.parsing():
            return await service.in_text_pool(protocol.parse, kind, body)

    def _header(self, prefix: str, call: protocol.Sampling) -> Header:
        name = call.model if call.model is not None else self._service.names[0]
        include_usage = call.stream_options is not None and bool(call.stream_options.include_usage)
        return Header(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), name, include_usage)

    def _model(self, name: str) -> Model:
        return Model(name, self._service.created, self._service.deployment.context_length)


_PARSE_HERE_BYTES = 64 << 10
"""Parsing takes about 5 ms per MiB: more than this is not for the event loop."""


def _tenant(request: Request) -> str:
    return getattr(request.state, "tenant", "")


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
