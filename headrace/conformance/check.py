"""What a check is: a row of the table, and a coroutine that asks a server, or starts some, and may raise."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from headrace.conformance.client import Server
from headrace.conformance.launcher import Launcher

Ask = Callable[[Server], Awaitable[str]]
"""Asks a server; returns what was seen. Raises `Failed` or `NotApplicable`."""
Start = Callable[[Launcher], Awaitable[str]]
"""The same with servers of its own."""


@dataclass(frozen=True, slots=True)
class Check:
    id: str
    """Chapter and row: "2.3"."""
    name: str
    title: str
    """The right behaviour."""
    ask: Ask | None = None
    start: Start | None = None
    """One of the two, or neither: it cannot be seen from outside. Of both, `start` is for servers to which the other
    does not apply."""
    note: str = ""
    """Where there is neither: why. Elsewhere: which part of the behaviour it looks at, if not all of it."""

    @property
    def is_unseen(self) -> bool:
        return self.ask is None and self.start is None


class Chapter:
    """The checks of one subject, numbered as they are declared."""

    def __init__(self, number: int, title: str) -> None:
        self.number = number
        self.title = title
        self.checks: list[Check] = []

    def check(self, title: str, *, part: str = "", otherwise: Start | None = None) -> Callable[[Ask], Ask]:
        """Declares the decorated coroutine as the next row. `part`: what of the behaviour it looks at, if not all;
        `otherwise`: what is done instead where it does not apply to the server's model."""

        def declare(ask: Ask) -> Ask:
            self._add(getattr(ask, "__name__", ""), title, part, ask=ask, start=otherwise)
            return ask

        return declare

    def process_check(self, title: str, *, part: str = "") -> Callable[[Start], Start]:
        """The same for a row about the server's process, which the check starts itself."""

        def declare(start: Start) -> Start:
            self._add(getattr(start, "__name__", ""), title, part, start=start)
            return start

        return declare

    def unseen(self, name: str, title: str, reason: str) -> None:
        """Declares the next row as one that cannot be checked from outside."""
        self._add(name, title, reason)

    def _add(self, name: str, title: str, note: str, *, ask: Ask | None = None, start: Start | None = None) -> None:
        self.checks.append(Check(f"{self.number}.{len(self.checks) + 1}", name, title, ask, start, note))
