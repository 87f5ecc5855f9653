"""An OpenAI-compatible server: ours, llama.cpp's, vLLM's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from headrace.bench.http_stream import Address, Exchange, HttpClient, request_bytes
from headrace.bench.prompts import PromptMaker
from headrace.bench.results import RequestResult
from headrace.bench.sse import read_stream
from headrace.core.errors import ConfigurationError
from headrace.sim.workload import PlannedRequest

Form = Literal["tokens", "text", "chat"]
"""How a prompt travels: token ids or text to /v1/completions, one user message to /v1/chat/completions."""

PROBE_TOKENS = 40


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """How to talk to a server."""

    endpoint: Literal["completions", "chat"] = "completions"
    prompt_as: Literal["auto", "tokens", "text"] = "auto"
    """For completions. auto: token ids where the server counts them right, else text."""
    model: str | None = None
    """The name in requests; None: the first one the server lists."""
    api_key: str | None = None
    ignore_eos: bool = True
    """Ask for exactly the planned number of tokens, an extension that many servers know and OpenAI's own refuses."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of each request body; they win."""
    timeout_s: float = 600.0
    record: bool = False
    """Keep the raw bytes of each stream."""


class HttpTarget:
    """A server at a URL. `overhead` tokens are what it adds to a prompt (BOS, a chat template): measured by `open` and
    taken off the prompts, so that what the server reads has the planned number of tokens."""

    measures_client = True

    def __init__(self, name: str, url: str, maker: PromptMaker, options: HttpOptions) -> None:
        self.name = name
        self.max_tokens: int | None = None
        self._url = url
        self._address = Address.parse(url)
        self._maker = maker
        self._options = options
        self._client = HttpClient(self._address, options.timeout_s, options.record)
        self._model = options.model
        self._form: Form = "chat" if options.endpoint == "chat" else "tokens"
        self._overhead = 0
        self._bodies: dict[int, bytes] = {}
        self._exchanges: list[tuple[PlannedRequest, Exchange]] = []

    async def open(self) -> None:
        await self._find_model()
        forms: tuple[Form, ...] = ("chat",)
        if self._options.endpoint == "completions":
            wanted = self._options.prompt_as
            forms = ("tokens", "text") if wanted == "auto" else (wanted,)
        problems = []
        for form in forms:
            counted = await self._probe(form)
            if isinstance(counted, int) and 0 <= counted - PROBE_TOKENS < 1000:
                self._form, self._overhead = form, counted - PROBE_TOKENS
                return
            problems.append(
                f"as {form}: {counted if isinstance(counted, str) else f'{PROBE_TOKENS} tokens were read as {counted}'}"
            )
        raise ConfigurationError(
            f"{self.name} ({self._url}) does not read prompts of a known length ({'; '.join(problems)}). Pass "
            "--tokenizer with the model it serves, or another --endpoint or --prompt-as."
        )

    async def _find_model(self) -> None:
        """The model's name, and its context where the server tells it."""
        exchange = await self._client.exchange(self._request("GET", "/v1/models"))
        if exchange.error is not None:
            raise ConfigurationError(f"{self.name} ({self._url}) does not answer: {exchange.detail}. Is it running?")
        try:
            models = msgspec.json.decode(exchange.content)["data"] if exchange.status == 200 else []
        except (msgspec.DecodeError, KeyError, TypeError):
            models = []
        listed = next((m for m in models if self._model in (None, m.get("id"))), None)
        if listed is None:
            if self._model is None:
                raise ConfigurationError(
                    f"{self.name} ({self._url}) lists no model (status {exchange.status}); pass --model-name."
                )
            return  # a server may answer to names it does not list
        self._model = listed["id"]
        context = listed.get("max_model_len")
        self.max_tokens = context if isinstance(context, int) else None

    async def _probe(self, form: Form) -> int | str:
        """How many prompt tokens the server counts in one of `PROBE_TOKENS`, or why there is no answer."""
        prompt = self._maker.make(0, "probe", 0, PROBE_TOKENS)
        fields = {"stream": False, "max_tokens": 1}
        body = self._body(PlannedRequest(0, prompt, 1), form, 0, fields)
        exchange = await self._client.exchange(self._request("POST", _PATHS[form], body))
        if exchange.error is not None:
            return exchange.detail
        if exchange.status != 200:
            return f"status {exchange.status}, {exchange.content[:300].decode('utf-8', 'replace')}"
        try:
            return int(msgspec.json.decode(exchange.content)["usage"]["prompt_tokens"])
        except (msgspec.DecodeError, KeyError, TypeError, ValueError):
            return "the reply has no usage.prompt_tokens"

    async def prepare(self, requests: Sequence[PlannedRequest]) -> None:
        self._exchanges = []
        streaming = {"stream": True, "stream_options": {"include_usage": True}}
        self._bodies = {
            request.index: self._request(
                "POST", _PATHS[self._form], self._body(request, self._form, self._overhead, streaming)
            )
            for request in requests
        }

    async def send(self, request: PlannedRequest) -> None:
        self._exchanges.append((request, await self._client.exchange(self._bodies[request.index])))

    def results(self) -> list[RequestResult]:
        return [_result(request, exchange) for request, exchange in sorted(self._exchanges, key=lambda x: x[0].index)]

    @property
    def exchanges(self) -> list[tuple[PlannedRequest, Exchange]]:
        """Of the last run, for the recording."""
        return self._exchanges

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "http",
            "url": self._url,
            "model": self._model,
            "prompts": self._form,
            "prompt_overhead_tokens": self._overhead,
        }

    async def close(self) -> None:
        self._bodies = {}

    def _request(self, method: str, path: str, body: bytes = b"") -> bytes:
        return request_bytes(self._address, method, path, body, self._options.api_key)

    def _body(self, request: PlannedRequest, form: Form, overhead: int, fields: Mapping[str, Any]) -> bytes:
        if overhead >= len(request.prompt):
            raise ConfigurationError(
                f"a prompt of {len(request.prompt)} tokens cannot be sent to {self.name}: what it adds to a prompt has "
                f"{overhead} already. Ask for longer prompts."
            )
        # Taken off the end: the head is what is shared.
        prompt = request.prompt[: len(request.prompt) - overhead]
        body: dict[str, Any] = {"model": self._model, "max_tokens": request.num_output, "temperature": 0, **fields}
        if self._options.ignore_eos:
            body["ignore_eos"] = True
        if request.tenant:
            body["user"] = request.tenant
        if form == "chat":
            body["messages"] = [{"role": "user", "content": self._maker.text(prompt).strip()}]
        else:
            body["prompt"] = prompt if form == "tokens" else self._maker.text(prompt)
        return msgspec.json.encode(body | dict(self._options.extra))


_PATHS: Mapping[Form, str] = {
    "tokens": "/v1/completions",
    "text": "/v1/completions",
    "chat": "/v1/chat/completions",
}


def _result(request: PlannedRequest, exchange: Exchange) -> RequestResult:
    def failed(kind: str, detail: str) -> RequestResult:
        return RequestResult(request.index, exchange.start_s, tenant=request.tenant, error=kind, detail=detail)

    if exchange.error is not None:
        return failed(exchange.error, exchange.detail)
    if exchange.status != 200:
        return failed(f"http {exchange.status}", exchange.content[:500].decode("utf-8", "replace"))
    try:
        reply = read_stream(exchange.body)
    except ValueError as error:
        return failed("bad event", str(error))
    if reply.error is not None:
        return failed("error event", reply.error[:500])
    if not reply.is_complete:
        return failed("incomplete", "the stream ended without a finish reason and without [DONE]")
    if not reply.token_times_s:
        return failed("no text", "the stream ended without any text")
    return RequestResult(
        index=request.index,
        start_s=exchange.start_s,
        token_times_s=reply.token_times_s,
        num_prompt=reply.num_prompt,
        num_output=len(reply.token_times_s) if reply.num_output is None else reply.num_output,
        num_cached=reply.num_cached,
        is_counted=reply.num_output is not None,
        tenant=request.tenant,
        text=reply.text,
    )
