"""The steps that formats have in common: a call's name, its arguments, the JSON object around both."""

from __future__ import annotations

import string
from collections.abc import Collection

from headrace.text.tools.events import Arguments, CallBegin, CallEnd, Content, Event
from headrace.text.tools.reader import SPACE, Steps, TextReader

_NAME_CHARS = frozenset(string.ascii_letters + string.digits + "_-")
_MAX_NAME_CHARS = 64
_ARGUMENTS = ('"arguments"', '"parameters"')
_BEFORE_NAME = ('"id"', '"type"', '"index"')


class CallReader(TextReader):
    """A `TextReader` that reports calls.

    White space alone, beside a call, is no content: templates write calls on lines of their own.
    """

    __slots__ = ("_blank", "_events", "_num_calls")

    def __init__(self) -> None:
        super().__init__()
        self._events: list[Event] = []
        self._num_calls = 0
        self._blank: str | None = ""
        """The content since the last call while it is white space; None once it is more."""

    def take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    # What was found.

    def content(self, text: str) -> None:
        if self._blank is not None:
            text = self._blank + text
            self._blank = None if text.strip(SPACE) else text
        if self._blank is None:
            self._events.append(Content(text))

    def begin_call(self, name: str) -> None:
        """What was read so far and not given out was its beginning."""
        self.drop()
        self._blank = ""
        self._events.append(CallBegin(self._num_calls, name))

    def arguments(self, text: str) -> None:
        if text:
            self._events.append(Arguments(self._num_calls, text))

    def end_call(self, is_whole: bool) -> None:
        self._events.append(CallEnd(self._num_calls, is_whole))
        self._num_calls += 1

    def end_content(self) -> None:
        """The reply is over."""
        if self._blank and not self._num_calls:
            self._events.append(Content(self._blank))

    # Steps.

    def content_until(self, *markers: str) -> Steps[str]:
        """Content up to a marker, which is returned. If no call follows the marker, it was content, too."""
        return (yield from self.until(markers, self.content))

    def name(self) -> Steps[str]:
        """The name of a function, as OpenAI allows them; "" where there is none."""
        return (yield from self.run(_NAME_CHARS.__contains__, _MAX_NAME_CHARS))

    def call(self, name: str) -> Steps[bool]:
        """A call whose arguments, a JSON object, are next. Whether they are whole."""
        self.begin_call(name)
        is_whole = yield from self.json(self.arguments)
        self.drop()
        self.end_call(is_whole)
        return is_whole

    def json_call(self, names: Collection[str] | None = None) -> Steps[bool]:
        """A call written as `{"name": "f", "arguments": {...}}`. False: there is none, and nothing was reported.

        "parameters" means the same as "arguments", which may be missing and may come first; other members are ignored,
        and so is a missing bracket at the end. Ahead of the name only an id or a type is allowed: text that is JSON of
        its own is not held back for long. `names`: only these are called.
        """
        if not (yield from self.accept("{")):
            return False
        name, arguments, is_reported = "", "", False
        while True:
            key = yield from self._key()
            if key == '"name"' and not name:
                name = yield from self._quoted_name()
                if not name or (names is not None and name not in names):
                    return False
                if arguments:
                    is_reported = True
                    self._whole_call(name, arguments)
            elif key in _ARGUMENTS and not (arguments or is_reported):
                if (yield from self.peek()) != "{":
                    return False
                if name:
                    is_reported = True
                    if not (yield from self.call(name)):
                        return True
                elif not (arguments := (yield from self._value())):
                    return False
            elif not (key and (name or key in _BEFORE_NAME) and (yield from self._value())):
                return is_reported
            if not (yield from self.accept(",")):
                break
        if (yield from self.literal("}")):
            if is_reported:
                self.drop()
            elif name:
                is_reported = True
                self._whole_call(name, "{}")
        return is_reported

    def _whole_call(self, name: str, arguments: str) -> None:
        self.begin_call(name)
        self.arguments(arguments)
        self.end_call(is_whole=True)

    def _key(self) -> Steps[str]:
        """A member's key in its quotes, and the colon; "" where there is none."""
        yield from self.spaces()
        if (yield from self.peek()) != '"':
            return ""
        key = yield from self._value()
        if not (key and (yield from self.accept(":"))):
            return ""
        yield from self.spaces()
        return key

    def _quoted_name(self) -> Steps[str]:
        if not (yield from self.literal('"')):
            return ""
        name = yield from self.name()
        return name if (yield from self.literal('"')) else ""

    def _value(self) -> Steps[str]:
        """The text of a JSON value; "" where it is broken."""
        pieces: list[str] = []
        return "".join(pieces) if (yield from self.json(pieces.append)) else ""
