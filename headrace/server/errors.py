"""Errors as clients see them: a status and OpenAI's `{"error": {...}}`."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace.core.errors import HeadraceError, Overloaded, RequestError

log = logging.getLogger("headrace.server")


class ApiError(HeadraceError):
    """An error with its HTTP status; `code` is what clients switch on, `param` the field at fault."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["Retry-After"] = str(max(1, math.ceil(retry_after_s)))

    @property
    def type(self) -> str:
        if self.status >= 500:
            return "server_error"
        return {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, "invalid_request_error")

    def body(self) -> bytes:
        return msgspec.json.encode(
            {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}
        )

    def response(self) -> Response:
        return Response(self.body(), self.status, self.headers, media_type="application/json")


def bad_request(code: str, message: str, param: str | None = None) -> ApiError:
    return ApiError(400, code, message, param=param)


def in_words_of(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """The engine's refusal in the words of a call: `names` maps its parameters to the client's."""
    limit = names.get("max_tokens", "max_tokens")
    return type(error)(
        error.code,
        re.sub(r"\bmax_tokens\b", limit, error.message),
        param=names.get(error.param, error.param) if error.param else None,
        retry_after_s=error.retry_after_s,
    )


def as_api_error(error: Exception) -> ApiError:
    """The error a client is shown; what nobody raised on purpose is logged and becomes a 500 without details."""
    match error:
        case ApiError():
            return error
        case Overloaded():
            return ApiError(429, error.code, error.message, param=error.param, retry_after_s=error.retry_after_s or 1.0)
        case RequestError():
            return bad_request(error.code, error.message, error.param)
    log.error("A request failed on a bug of the server", exc_info=error)
    return ApiError(500, "internal_error", "The server failed on this request; its log says why.")


async def handle_http_exception(request: Request, error: Exception) -> Response:
    """For what the framework itself answers: unknown paths and wrong methods."""
    status = getattr(error, "status_code", 500)
    path = request.url.path
    code, message = {
        404: ("not_found", f"There is nothing at {path}; the API lives under /v1."),
        405: ("method_not_allowed", f"{request.method} is not allowed at {path}."),
    }.get(status, ("http_error", str(getattr(error, "detail", error))))
    return ApiError(status, code, message, headers=getattr(error, "headers", None)).response()


def show(value: object, limit: int = 60) -> str:
    """`value` for an error message: never longer than `limit`, whatever a client sent."""
    if isinstance(value, int) and abs(value) >= 10**limit:
        return f"an integer of {value.bit_length()} bits"  # its decimal form may be too long for Python to print
    text = repr(value[: limit + 1] if isinstance(value, str | list | tuple) else value)
    return text if len(text) <= limit else text[:limit] + "..."
