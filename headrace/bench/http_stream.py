"""One HTTP/1.1 exchange per connection, as light as Python gets: bytes are stamped when they arrive and read later.

Of each arrival only httptools (C) sees the bytes, to find the end of the response. No JSON is parsed while the clock
runs. The connection is opened for the exchange and closed after it, as the request says.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httptools

from headrace.core.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Address:
    """Where a target listens. `base_path` is what precedes /v1."""

    host: str
    port: int
    is_tls: bool
    base_path: str

    @classmethod
    def parse(cls, url: str) -> Address:
        """From http://host:port with or without /v1. Raises `ConfigurationError`."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigurationError(f"{url!r} is no URL: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigurationError(f"{url!r} is no URL of a server; write it like http://127.0.0.1:8000.")
        is_tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if is_tls else 80), is_tls, path)

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(slots=True)
class Exchange:
    """A request and what came back. Times on `time.monotonic`."""

    start_s: float
    """Before the connection was opened."""
    status: int = 0
    """0: no response."""
    headers: dict[str, str] = field(default_factory=dict)
    """Names in lower case."""
    body: list[tuple[float, bytes]] = field(default_factory=list)
    """(arrival, bytes of the body)."""
    raw: list[tuple[float, bytes]] | None = None
    """(arrival, bytes of the connection), where they are recorded."""
    error: str | None = None
    """Kind: "connect", "timeout", "connection lost", "bad response"."""
    detail: str = ""

    @property
    def content(self) -> bytes:
        return b"".join(piece for _, piece in self.body)


Watch = Callable[[Exchange], bool]
"""Sees an exchange after each arrival; True ends it there and closes the connection."""


class _Connection(asyncio.Protocol):
    """Callbacks of asyncio (`data_received`, ...) and of httptools (`on_...`)."""

    def __init__(self, exchange: Exchange, done: asyncio.Future[None], watch: Watch | None) -> None:
        self._exchange = exchange
        self._done = done
        self._watch = watch
        self._parser = httptools.HttpResponseParser(self)
        self._now_s = 0.0
        self._ends_with_connection = True

    def data_received(self, data: bytes) -> None:
        self._now_s = time.monotonic()
        if self._exchange.raw is not None:
            self._exchange.raw.append((self._now_s, data))
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail("bad response", str(error))
        if self._watch is not None and self._watch(self._exchange):
            self.on_message_complete()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._done.done():
            if error is None and self._exchange.status and self._ends_with_connection:
                self._done.set_result(None)
            else:
                self._fail("connection lost", str(error or "the server closed it before the end of its response"))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._exchange.headers[name.decode("latin-1").lower()] = value.decode("latin-1")
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._ends_with_connection = False

    def on_headers_complete(self) -> None:
        self._exchange.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._exchange.body.append((self._now_s, body))

    def on_message_complete(self) -> None:
        if not self._done.done():
            self._done.set_result(None)

    def _fail(self, kind: str, detail: str) -> None:
        if not self._done.done():
            self._exchange.error, self._exchange.detail = kind, detail
            self._done.set_result(None)


def request_bytes(address: Address, method: str, path: str, body: bytes = b"", api_key: str | None = None) -> bytes:
    """A whole request, ready to send."""
    lines = [
        f"{method} {address.base_path}{path} HTTP/1.1",
        f"Host: {address.authority}",
        "Connection: close",
        "Accept: */*",
        "User-Agent: headrace-bench",
    ]
    if body:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    if api_key:
        lines.append(f"Authorization: Bearer {api_key}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


class HttpClient:
    """Exchanges with one address."""

    def __init__(self, address: Address, timeout_s: float, record: bool = False) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._record = record
        self._tls = ssl.create_default_context() if address.is_tls else None

    async def exchange(self, request: bytes, watch: Watch | None = None) -> Exchange:
        """Send a request and wait for the end of its response. Errors are in the exchange, none is raised."""
        loop = asyncio.get_running_loop()
        exchange = Exchange(time.monotonic(), raw=[] if self._record else None)
        done: asyncio.Future[None] = loop.create_future()
        transport: asyncio.WriteTransport | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                transport, _ = await loop.create_connection(
                    lambda: _Connection(exchange, done, watch), self._address.host, self._address.port, ssl=self._tls
                )
                transport.write(request)
                await done
        except TimeoutError:
            exchange.error = "timeout"
            exchange.detail = f"no complete response within {self._timeout_s:g} s"
        except OSError as error:
            exchange.error, exchange.detail = "connect", f"{self._address.authority}: {error}"
        finally:
            if transport is not None:
                transport.abort()
        return exchange
