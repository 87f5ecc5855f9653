"""How a check ends."""

from __future__ import annotations

from enum import StrEnum

from headrace.core.errors import HeadraceError


class Status(StrEnum):
    PASS = "pass"
    FAIL = "fail"
    NOT_APPLICABLE = "not applicable"


class Failed(HeadraceError):
    """What was expected and what came."""


class NotApplicable(HeadraceError):
    """Why this server, or this way of asking it, cannot show the behaviour."""


def require(condition: object, expected: str, came: object) -> None:
    """Raises `Failed` unless `condition` holds."""
    if not condition:
        raise Failed(f"expected {expected}; came {came}")
