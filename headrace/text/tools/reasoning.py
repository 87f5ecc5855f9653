"""Reasoning ahead of the answer.

    <think> ... </think> answer

Source: the model cards and templates of DeepSeek-R1, Qwen3 ("<think>") and Magistral ("[THINK]").
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.text.tools.base import ReplyParser
from headrace.text.tools.events import Content, Event, Reasoning
from headrace.text.tools.reader import SPACE, Steps, TextReader


@dataclass(frozen=True, slots=True)
class Thinking:
    """The marks around reasoning."""

    open: str
    close: str

    def is_open_after(self, prompt: str) -> bool:
        """Whether the prompt, as the template wrote it, ends inside reasoning: then the reply begins there."""
        return prompt.rstrip(SPACE).endswith(self.open)


THINK = Thinking("<think>", "</think>")
MISTRAL_THINK = Thinking("[THINK]", "[/THINK]")


class ReasoningParser:
    """Splits reasoning off the start of a reply; what follows goes on to the parser of its tool calls.

    White space around the marks belongs to neither side. Marks further on are content. A reply that ends before its
    reasoning does is all reasoning.
    """

    def __init__(self, thinking: Thinking, then: ReplyParser | None = None, *, is_open: bool = False) -> None:
        """`then` reads the answer; without it, all of it is content. `is_open`: the prompt opened the reasoning."""
        self._thinking = thinking
        self._then = then
        self._is_open = is_open
        self._reader = TextReader()
        self._steps = self._read()
        self._events: list[Event] = []
        self._spaces = ""

    def push(self, text: str) -> list[Event]:
        self._reader.add(text)
        next(self._steps)
        return self._take_events()

    def finish(self) -> list[Event]:
        self._reader.end()
        next(self._steps, None)
        if self._then is not None:
            self._events += self._then.finish()
        return self._take_events()

    def _read(self) -> Steps[None]:
        reader = self._reader
        is_written = yield from reader.accept(self._thinking.open)
        if is_written or self._is_open:
            yield from reader.spaces()
            reader.drop()
            yield from reader.until((self._thinking.close,), self._reasoning)
            yield from reader.spaces()
            reader.drop()
        yield from reader.rest(self._answer)

    def _reasoning(self, text: str) -> None:
        text = self._spaces + text
        clear = text.rstrip(SPACE)
        self._spaces = text[len(clear) :]
        if clear:
            self._events.append(Reasoning(clear))

    def _answer(self, text: str) -> None:
        self._events += [Content(text)] if self._then is None else self._then.push(text)

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events
