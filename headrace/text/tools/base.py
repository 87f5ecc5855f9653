"""A format of tool calls, and the parser that every format shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.text.tools.calls import CallReader
from headrace.text.tools.events import Event, merge
from headrace.text.tools.reader import Steps
from headrace.text.tools.schema import Layout, Tool


class ReplyParser(Protocol):
    """Fed with the pieces of one reply. Merged, the events do not depend on how it was cut into them."""

    def push(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]:
        """What was held back. Nothing may be pushed after it."""
        ...


@dataclass(frozen=True, slots=True)
class Format:
    name: str
    markers: tuple[str, ...]
    """Texts that tell calls from content. Where the vocabulary has them as special tokens, the detokenizer must not
    skip these."""
    read: Callable[[CallReader, Sequence[Tool]], Steps[None]]
    """Reads a whole reply."""
    layout: Layout
    """How a call is written when a grammar forces it."""


class ToolParser:
    """Tells the calls in a reply from its content.

    A call is reported as soon as its name and the beginning of its arguments are there, and stays one: if the
    arguments break later, it ends there (`CallEnd.is_whole` is false) and the rest is content. What never gets so
    far is content, as it was written. Cost: about 5 us per token.
    """

    def __init__(self, format: Format, tools: Sequence[Tool] = ()) -> None:
        """`tools`: those of the request. They settle what the text leaves open (see the formats)."""
        self._reader = CallReader()
        self._steps = format.read(self._reader, tools)

    def push(self, text: str) -> list[Event]:
        self._reader.add(text)
        next(self._steps)
        return self._reader.take_events()

    def finish(self) -> list[Event]:
        self._reader.end()
        next(self._steps, None)
        self._reader.end_content()
        return self._reader.take_events()


def parse(parser: ReplyParser, text: str) -> list[Event]:
    """The merged events of a whole reply."""
    return merge([*parser.push(text), *parser.finish()])
