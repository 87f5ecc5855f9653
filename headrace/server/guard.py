"""The doors. Without a key only `/health` is answered, and a path that does not exist looks like one that does.

Pages of other sites are let in by name only: a browser would otherwise let any page use a server on its user's machine.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.server.errors import ApiError, show

OPEN_PATHS = frozenset({"/health"})


class ApiKeyGuard:
    """ASGI middleware: denies by default. A caller with a key becomes a tenant named after it, not by it."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or (scope["type"] == "http" and scope["path"] in OPEN_PATHS):
            await self._app(scope, receive, send)
            return
        tenant = self._tenant(Headers(scope=scope).get("authorization", ""))
        if tenant is None:
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
                return
            error = ApiError(
                401,
                "invalid_api_key",
                "This server needs an API key; send it as `Authorization: Bearer KEY`.",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error.response()(scope, receive, send)
            return
        scope.setdefault("state", {})["tenant"] = tenant
        await self._app(scope, receive, send)

    def _tenant(self, authorization: str) -> str | None:
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer":
            return None
        given = _digest(key.strip())
        found = None
        for digest in self._digests:  # all of them, and digests of equal length: time tells nothing of a key
            if hmac.compare_digest(given, digest):
                found = digest
        return None if found is None else _name(found)


class OriginGuard:
    """ASGI middleware: a browser names the site of the page that asks. Programs name none, and pass."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        """`origins`: sites that may ask, such as "https://example.org"; "*": all of them."""
        self._app = app
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._may_enter(Headers(scope=scope)):
            site = show(Headers(scope=scope).get("origin"))
            error = ApiError(
                403,
                "origin_not_allowed",
                f"Pages of {site} may not use this server; its operator can let them with --allow-origin.",
            )
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _may_enter(self, headers: Headers) -> bool:
        origin = headers.get("origin")
        if origin is None or "*" in self._origins or origin in self._origins:
            return True
        return origin.partition("://")[2] == headers.get("host")  # a page of our own


def tenant_of(key: str) -> str:
    """The name of the tenant who has this key."""
    return _name(_digest(key))


def _name(digest: bytes) -> str:
    return digest.hex()[:16]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
