"""What a check is: a row of the table, and a coroutine that asks a server and may raise."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from headrace.conformance.client import Server

Ask = Callable[[Server], Awaitable[str]]
"""Asks a server; returns what was seen. Raises `Failed` or `NotApplicable`."""


@dataclass(frozen=True, slots=True)
class Check:
    id: str
    """Chapter and row: "2.3"."""
    name: str
    title: str
    """The right behaviour."""
    ask: Ask | None
    """None: it cannot be seen over HTTP."""
    note: str = ""
    """Where `ask` is None: why. Elsewhere: which part of the behaviour it looks at, if not all of it."""


class Chapter:
    """The checks of one subject, numbered as they are declared."""

    def __init__(self, number: int, title: str) -> None:
        self.number = number
        self.title = title
        self.checks: list[Check] = []

    def check(self, title: str, *, part: str = "") -> Callable[[Ask], Ask]:
        """Declares the decorated coroutine as the next row. `part`: what of the behaviour it looks at, if not all."""

        def declare(ask: Ask) -> Ask:
            self._add(getattr(ask, "__name__", ""), title, ask, part)
            return ask

        return declare

    def unseen(self, name: str, title: str, reason: str) -> None:
        """Declares the next row as one that no HTTP client can check."""
        self._add(name, title, None, reason)

    def _add(self, name: str, title: str, ask: Ask | None, note: str) -> None:
        self.checks.append(Check(f"{self.number}.{len(self.checks) + 1}", name, title, ask, note))
