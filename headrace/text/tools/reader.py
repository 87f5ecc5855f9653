"""Reading text that is still being written, as if it were all there.

A parser is a generator that calls the steps below with `yield from`; a step that cannot be decided yet yields, and
goes on when there is more text. So parsers read like the grammar of their format, hold back only what is undecided,
and cannot depend on how the text was cut.

What has been read, as half-open intervals of the text:

    [0, start)      given out, or dropped
    [start, at)     read, and not yet known to be more than text: the next `until` or `rest` gives it out
    [at, end)       not read
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from headrace.text.tools.json_scanner import JsonScanner

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Yields while it waits for text; its value is what it found."""

Give = Callable[[str], object]

SPACE = " \t\r\n"


class TextReader:
    """No step raises. At the end of the text, what is asked for and not there is simply not found."""

    __slots__ = ("_at", "_is_ended", "_start", "_text")

    def __init__(self) -> None:
        self._text = ""
        self._start = 0
        self._at = 0
        self._is_ended = False

    def add(self, text: str) -> None:
        self._text = self._text[self._start :] + text
        self._at -= self._start  # steps keep no index over a yield, except as a distance from here
        self._start = 0

    def end(self) -> None:
        """There is no more text: no step waits from now on."""
        self._is_ended = True

    def drop(self) -> None:
        """What was read is not text of the reply."""
        self._start = self._at

    def peek(self, ahead: int = 0) -> Steps[str]:
        """The character `ahead` of the next one; "" behind the end."""
        while len(self._text) <= self._at + ahead:
            if self._is_ended:
                return ""
            yield
        return self._text[self._at + ahead]

    def spaces(self) -> Steps[None]:
        while (char := (yield from self.peek())) and char in SPACE:
            self._at += 1

    def literal(self, text: str) -> Steps[bool]:
        """Read exactly `text`, or nothing."""
        for i, expected in enumerate(text):
            if (yield from self.peek(i)) != expected:
                return False
        self._at += len(text)
        return True

    def accept(self, text: str) -> Steps[bool]:
        """Read white space, and then `text` if it is there."""
        yield from self.spaces()
        return (yield from self.literal(text))

    def skip(self, text: str) -> Steps[None]:
        """`accept`, dropping `text` if it was there."""
        if (yield from self.accept(text)):
            self.drop()

    def run(self, is_part: Callable[[str], bool], most: int) -> Steps[str]:
        """Read characters up to one that is no part, at most so many."""
        length = 0
        while length < most and (char := (yield from self.peek(length))) and is_part(char):
            length += 1
        self._at += length
        return self._text[self._at - length : self._at]

    def json(self, give: Give) -> Steps[bool]:
        """Read one JSON value, giving its text out as it comes. False: it is broken, or the text ended inside it."""
        scanner = JsonScanner()
        while True:
            end = scanner.push(self._text, self._at)
            if end > self._at:
                give(self._text[self._at : end])
            self._at = end
            if scanner.is_complete:
                return True
            if self._is_ended or end < len(self._text):
                return False
            yield

    def until(self, markers: Sequence[str], give: Give) -> Steps[str]:
        """Give text out up to the first of the markers, which is read and returned; "" where none follows.

        Holds back the longest end of the text that is the beginning of a marker.
        """
        pattern = re.compile("|".join(map(re.escape, markers)))
        while True:
            found = pattern.search(self._text, self._at)
            if found is not None:
                self._give_up_to(found.start(), give)
                self._at = found.end()
                return found.group()
            held = 0 if self._is_ended else _held(self._text[self._at :], markers)
            self._give_up_to(len(self._text) - held, give)
            if self._is_ended:
                return ""
            yield

    def rest(self, give: Give) -> Steps[None]:
        """Give all further text out."""
        while True:
            self._give_up_to(len(self._text), give)
            if self._is_ended:
                return
            yield

    def _give_up_to(self, end: int, give: Give) -> None:
        if end > self._start:
            give(self._text[self._start : end])
        self._start = self._at = end


def _held(text: str, markers: Sequence[str]) -> int:
    """The length of the longest end of `text` that is the beginning of a marker, and not all of it."""
    tail = text[max(0, len(text) + 1 - max(map(len, markers))) :]
    firsts = {marker[0] for marker in markers}
    begun = (i for i, char in enumerate(tail) if char in firsts)
    return next((len(tail) - i for i in begun if any(marker.startswith(tail[i:]) for marker in markers)), 0)
