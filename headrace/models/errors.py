"""The error of getting a model onto this machine."""

from __future__ import annotations

from headrace.core.errors import HeadraceError


class FetchError(HeadraceError, RuntimeError):
    """A model could not be found or fetched: says what failed and what to do. Nothing partial is left."""
