"""What the parsers of this folder say about a reply, piece by piece."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    index: int
    """Calls of a reply are numbered from 0."""
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of a call's arguments, which are a JSON object. Joined, the pieces are all of it."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    index: int
    is_whole: bool
    """The arguments parse. False: the text ended, or stopped being JSON, inside them."""


Event = Content | Reasoning | CallBegin | Arguments | CallEnd


@dataclass(slots=True)
class Call:
    name: str
    arguments: str = ""
    is_whole: bool = False


@dataclass(slots=True)
class Reply:
    """The events of one reply, put together."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)


def collect(events: Iterable[Event]) -> Reply:
    """A reply that is not streamed is this over the same events."""
    reply = Reply()
    content, reasoning = [], []
    for event in merge(events):
        match event:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case CallBegin(_, name):
                reply.calls.append(Call(name))
            case Arguments(index, text):
                reply.calls[index].arguments = text
            case CallEnd(index, is_whole):
                reply.calls[index].is_whole = is_whole
    reply.content, reply.reasoning = "".join(content), "".join(reasoning)
    return reply


def merge(events: Iterable[Event]) -> list[Event]:
    """The same events with neighbouring pieces of one text joined: what does not depend on how a reply came."""
    merged: list[tuple[Event, list[str]]] = []
    for event in events:
        text = [] if isinstance(event, CallBegin | CallEnd) else [event.text]
        if text and merged and _continues(event, merged[-1][0]):
            merged[-1][1].extend(text)
        else:
            merged.append((event, text))
    return [
        event if isinstance(event, CallBegin | CallEnd) else replace(event, text="".join(pieces))
        for event, pieces in merged
    ]


def _continues(event: Event, before: Event) -> bool:
    if isinstance(event, Arguments):
        return isinstance(before, Arguments) and before.index == event.index
    return type(event) is type(before)
