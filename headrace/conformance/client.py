"""The server under test: how to ask it, and what is learnt of it before the checks begin."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from headrace.bench.http_stream import Address, Exchange, HttpClient, Watch, request_bytes
from headrace.conformance.gauges import RUNNING, Gauge
from headrace.conformance.outcome import Failed, NotApplicable
from headrace.conformance.replies import Generation, Reply, read_stream, read_whole
from headrace.core.errors import ConfigurationError

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

_WORDS = (
    "apple",
    "river",
    "stone",
    "cloud",
    "green",
    "music",
    "paper",
    "light",
    "water",
    "house",
    "bread",
    "north",
    "table",
    "glass",
    "horse",
    "winter",
    "silver",
    "garden",
    "summer",
    "letter",
    "market",
    "window",
    "mountain",
    "yellow",
    "forest",
    "bridge",
    "kitchen",
    "morning",
    "village",
    "doctor",
)
"""Each is one or two tokens to any tokenizer."""


@dataclass(frozen=True, slots=True)
class Target:
    """Which server, and what its operator knows of it."""

    url: str
    """Empty: of a server that is still to be started."""
    model: str
    api_key: str | None = None
    other_api_key: str | None = None
    """Of a second tenant."""
    context_length: int | None = None
    """None: as the server says."""
    capacity: int | None = None
    """Requests that it holds at once, running and waiting; None: unknown."""
    timeout_s: float = 60.0
    """For one reply."""


class Refused(Failed):
    """A call that had to succeed and did not."""

    def __init__(self, what: str, reply: Reply) -> None:
        why = f"the server does not support it: {reply}" if reply.is_missing else f"came {reply}"
        super().__init__(f"expected status 200 of {what}; {why}")
        self.reply = reply


class Server:
    """One server. Every method asks it over a new connection."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.context_length = target.context_length
        self._address = Address.parse(target.url)
        self._run_on: dict[str, Any] = {"ignore_eos": True}
        self._tokens_per_word = 1.5
        self._random = random.Random(time.time_ns())
        """Prompts differ from run to run, so that no cache knows them."""

    async def probe(self) -> None:
        """Learn the context length, whether `ignore_eos` is understood, and how long words are.

        Raises `ConfigurationError` if nothing answers, or not to this model.
        """
        words = " ".join(self._random.choices(_WORDS, k=64))
        body = {"prompt": words, "max_tokens": 1, **self._run_on}
        try:
            reply = await self.post(COMPLETIONS, body)
            if reply.status != 200:
                self._run_on = {}
                reply = await self.post(COMPLETIONS, {"prompt": words, "max_tokens": 1})
            if reply.status != 200:
                chat = {"messages": [{"role": "user", "content": words}], "max_tokens": 1}
                reply = await self.post(CHAT, chat)
            if reply.status != 200:
                raise ConfigurationError(f"{self.target.url} answers no request for {self.target.model}: {reply}")
            self._tokens_per_word = max(0.5, read_whole(reply).num_prompt / 64)
        except Failed as error:
            raise ConfigurationError(f"{self.target.url} cannot be asked: {error}") from None
        self.context_length = self.context_length or await self._find_context()

    async def use_served_name(self) -> None:
        """Where the server does not list the target's model, ask for the first that it lists."""
        reply = await self.get("/v1/models")
        listed = reply.json().get("data") if reply.status == 200 else None
        names = [each["id"] for each in listed or ()]
        if names and self.target.model not in names:
            self.target = replace(self.target, model=names[0])

    async def _find_context(self) -> int | None:
        """From what some servers tell beside OpenAI's API."""
        for path, find in (("/v1/models", _context_of_models), ("/props", _context_of_props)):
            try:
                reply = await self.get(path)
                found = find(reply.json()) if reply.status == 200 else None
            except (Failed, KeyError, TypeError, AttributeError):
                continue
            if isinstance(found, int):
                return found
        return None

    def known_context(self) -> int:
        if self.context_length is None:
            raise NotApplicable("the server does not tell its context length; give --context-length")
        return self.context_length

    def words(self, num_tokens: float) -> str:
        """A text nobody has sent before, of about so many tokens."""
        return " ".join(self._random.choices(_WORDS, k=max(1, round(num_tokens / self._tokens_per_word))))

    def exactly(self, num_tokens: int) -> dict[str, Any]:
        """Fields for a reply of so many tokens, where the server can be told to ignore the model's end."""
        return {"max_tokens": num_tokens, "temperature": 0, **self._run_on}

    async def get(self, path: str, *, key: str | None = "", timeout_s: float | None = None) -> Reply:
        return await self.request("GET", path, key=key, timeout_s=timeout_s)

    async def post(
        self, path: str, body: Mapping[str, Any], *, key: str | None = "", timeout_s: float | None = None
    ) -> Reply:
        """`key`: "" for the target's own, None for none. The model is added."""
        data = json.dumps({"model": self.target.model, **body}).encode()
        return await self.request("POST", path, data, key=key, timeout_s=timeout_s)

    async def request(
        self, method: str, path: str, data: bytes = b"", *, key: str | None = "", timeout_s: float | None = None
    ) -> Reply:
        """Raises `Failed` if no whole response comes."""
        start_s = time.monotonic()
        exchange = await self._exchange(method, path, data, key, timeout_s=timeout_s)
        if exchange.error is not None:
            raise Failed(f"expected a response of {method} {path}; came none ({exchange.detail})")
        return Reply(exchange.status, exchange.headers, exchange.content, time.monotonic() - start_s)

    async def complete(self, prompt: object, *, key: str | None = "", **fields: Any) -> Generation:
        """/v1/completions, whole. Raises `Refused`."""
        return await self._whole(COMPLETIONS, {"prompt": prompt, **fields}, key)

    async def chat(self, content: object, *, key: str | None = "", **fields: Any) -> Generation:
        """/v1/chat/completions, whole; `content` is a user's message or a list of messages. Raises `Refused`."""
        return await self._whole(CHAT, {"messages": messages(content), **fields}, key)

    async def stream(self, prompt: object, *, until: Watch | None = None, **fields: Any) -> Generation:
        """/v1/completions, streamed. The client leaves when `until` says so. Raises `Refused`."""
        return await self._stream(COMPLETIONS, {"prompt": prompt, **fields}, until)

    async def stream_chat(self, content: object, *, until: Watch | None = None, **fields: Any) -> Generation:
        return await self._stream(CHAT, {"messages": messages(content), **fields}, until)

    async def gauge(self, gauge: Gauge) -> float:
        """Raises `NotApplicable` where the server has no such gauge that is known here."""
        reply = await self.get("/metrics")
        value = gauge.read(reply.text) if reply.status == 200 else None
        if value is None:
            came = "it has none that is known here" if reply.status == 200 else str(reply)
            raise NotApplicable(f"needs a gauge of {gauge.what} at /metrics: {came}")
        return value

    async def quiet(self, timeout_s: float = 20.0) -> None:
        """Wait until nothing runs, where the server tells."""
        end_s = time.monotonic() + timeout_s
        try:
            while await self.gauge(RUNNING) > 0 and time.monotonic() < end_s:
                await asyncio.sleep(0.05)
        except (NotApplicable, Failed):
            await asyncio.sleep(0.2)

    async def _whole(self, path: str, body: Mapping[str, Any], key: str | None) -> Generation:
        reply = await self.post(path, body, key=key)
        if reply.status != 200:
            raise Refused(_summary(path, body), reply)
        return read_whole(reply)

    async def _stream(self, path: str, body: Mapping[str, Any], until: Watch | None) -> Generation:
        body = {"stream": True, "stream_options": {"include_usage": True}, **body}
        data = json.dumps({"model": self.target.model, **body}).encode()
        start_s = time.monotonic()
        exchange = await self._exchange("POST", path, data, "", watch=until)
        seconds = time.monotonic() - start_s
        if exchange.error is not None:
            raise Failed(f"expected a stream of {path} to its end; came {exchange.detail}")
        if exchange.status != 200:
            raise Refused(_summary(path, body), Reply(exchange.status, exchange.headers, exchange.content, seconds))
        return read_stream(exchange, seconds)

    async def _exchange(
        self,
        method: str,
        path: str,
        data: bytes,
        key: str | None,
        *,
        timeout_s: float | None = None,
        watch: Watch | None = None,
    ) -> Exchange:
        client = HttpClient(self._address, timeout_s or self.target.timeout_s)
        key = self.target.api_key if key == "" else key
        return await client.exchange(request_bytes(self._address, method, path, data, key), watch)


def messages(content: object) -> object:
    return content if isinstance(content, list) else [{"role": "user", "content": content}]


def after_events(count: int, then: Callable[[], object] | None = None) -> Watch:
    """Ends an exchange once so many events have come; with `then`, calls it once and goes on instead."""
    called = False

    def watch(exchange: Exchange) -> bool:
        nonlocal called
        if called or exchange.content.count(b"data:") < count:
            return False
        called = True
        if then is not None:
            then()
        return then is None

    return watch


def _summary(path: str, body: Mapping[str, Any]) -> str:
    told = [name for name in body if name not in _USUAL]
    return f"{path} with {', '.join(told)}" if told else path


async def begins(begun: asyncio.Event, task: asyncio.Task[Generation]) -> None:
    """Waits for the event, or for the end of the task, whose error is raised."""
    waiting = asyncio.ensure_future(begun.wait())
    await asyncio.wait({waiting, task}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if task.done():
        task.result()


_USUAL = frozenset(
    {"prompt", "messages", "max_tokens", "temperature", "seed", "stream", "stream_options", "ignore_eos"}
)


def _context_of_models(body: Any) -> object:
    model = body["data"][0]
    meta = model.get("meta") or {}
    return model.get("max_model_len") or meta.get("n_ctx") or model.get("context_length")


def _context_of_props(body: Any) -> object:
    return body["default_generation_settings"]["n_ctx"]
