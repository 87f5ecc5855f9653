"""Errors a person can act on: each names the value that was wrong and the remedy."""

from __future__ import annotations


class HeadraceError(Exception):
    """Base of every error Headrace raises on purpose."""


class ConfigurationError(HeadraceError):
    """The parts do not fit together (pool too small, unknown option): nothing was started."""


class InternalError(HeadraceError):
    """A bug of Headrace: an invariant does not hold and going on would do harm. The message is for a bug report."""


class RequestError(HeadraceError):
    """A request that was refused; the engine's state is unchanged.

    `code` is the machine-readable name clients switch on (OpenAI's where one exists); `param` names the field
    at fault; `retry_after_s` is set when trying again later can help.
    """

    def __init__(
        self, code: str, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class InvalidRequest(RequestError):
    """The request can never be served as it is (HTTP 400)."""


class Overloaded(RequestError):
    """The request could be served later (HTTP 429 with Retry-After)."""
