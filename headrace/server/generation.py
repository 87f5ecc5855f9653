"""The text stage: from token events to pieces of text. The one path of streamed replies, whole replies and `LLM`.

The text of a choice, as half-open intervals of characters:

    [0, num_emitted)             sent in deltas
    [num_emitted, num_decoded)   held back: it may be the beginning of a stop string
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from headrace.core.events import TokenEvent
from headrace.core.request import Request
from headrace.core.result import TokenLogprob
from headrace.core.sequence import FinishReason
from headrace.text.detokenizer import IncrementalDetokenizer
from headrace.text.stop import StopStrings
from headrace.text.tokenizer import Tokenizer
from headrace.text.tools.base import ReplyParser
from headrace.text.tools.events import Event

Finish = Literal["stop", "length", "abort", "error", "late"]
STOP = FinishReason.STOP  # looking up an enum's member takes 0.1 us


@dataclass(frozen=True, slots=True)
class ParserOfReplies:
    """For replies that are more than text: reasoning, tool calls."""

    make: Callable[[], ReplyParser]
    """One per choice."""
    markers: frozenset[int]
    """Special tokens that it has to see."""


@dataclass(frozen=True, slots=True)
class TextOptions:
    """What the text stage has to know of a request."""

    stops: tuple[str, ...] = ()
    """The reply ends before the first of these."""
    min_tokens: int = 0
    """The text of earlier tokens is not searched for stops."""
    logprobs: bool = False
    ranked: bool = False
    """The mean logprob of each choice is wanted (with `logprobs` only)."""
    echo: str | None = None
    """The prompt's text, to be sent ahead of the reply (with its logprobs, where the request scores its prompt)."""
    has_bos: bool = False
    """The prompt's first token is not of its text, so that it has no width in `echo`."""
    parser: ParserOfReplies | None = None


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token with its logprob, and where its text begins in the text of the choice (echo included)."""

    token: int
    offset: int
    logprob: TokenLogprob | None
    """None for the first token of a prompt: nothing precedes it."""


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of one choice's text. Joined, the pieces of a choice are its whole text."""

    choice: int
    text: str = ""
    scored: tuple[ScoredToken, ...] = ()
    """The tokens of this text, if logprobs were asked for."""
    tokens: tuple[int, ...] = ()
    """What was sampled meanwhile. A token that ended the reply is among them though its text is never shown."""
    finish_reason: Finish | None = None
    stop: str | int | None = None
    """The stop string or the token id that ended the choice."""
    events: tuple[Event, ...] | None = None
    """What the text says, where a parser reads it."""
    cut: bool = False
    """Ended by a stop string, of which the engine knows nothing: abort the choice there."""


@dataclass(slots=True)
class _Choice:
    detokenizer: IncrementalDetokenizer
    stops: StopStrings | None
    parser: ReplyParser | None
    num_tokens: int = 0
    num_decoded: int = 0
    num_emitted: int = 0
    sum_logprobs: float = 0.0
    num_summed: int = 0
    held: deque[tuple[ScoredToken, int]] = field(default_factory=deque)
    """Tokens not yet sent, with the end of their text."""
    is_started: bool = False
    is_over: bool = False


class TextStage:
    """Turns the events of one request into deltas; its choices are numbered from `first_choice`."""

    def __init__(self, request: Request, tokenizer: Tokenizer, options: TextOptions, first_choice: int = 0) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._options = options
        self._first_choice = first_choice
        self.prompt_logprobs: list[TokenLogprob] = []
        """Of prompt tokens 1, 2, ...; complete before the first token."""
        self.pooled: NDArray[np.float64] | None = None
        """The sum of the prompt's hidden states, where these are asked for."""
        self._prompt_scored: tuple[ScoredToken, ...] | None = None
        self._choices = [
            _Choice(
                IncrementalDetokenizer(
                    tokenizer, continues_text=True, shown=options.parser.markers if options.parser else frozenset()
                ),
                StopStrings(options.stops) if options.stops else None,
                options.parser.make() if options.parser else None,
            )
            for _ in range(request.num_choices)
        ]
        self.num_open = request.num_choices
        """Choices that have not finished."""
        self.num_cached = 0
        self.num_generated = 0
        self.num_drafts = 0
        self.num_accepted = 0
        """Drafts that became tokens which count."""

    def push(self, event: TokenEvent) -> Delta | None:
        """The text that `event` completes; None when there is nothing to tell."""
        self.prompt_logprobs.extend(event.prompt_logprobs)
        self.num_cached = max(self.num_cached, event.num_cached)
        choice = self._choices[event.choice]
        if choice.is_over or not (event.tokens or event.finish_reason):
            if event.pooled is not None:
                piece = np.frombuffer(event.pooled)
                self.pooled = piece if self.pooled is None else self.pooled + piece
            return None
        text, scored, matched, tokens = self._decode(choice, event)
        if not choice.is_started:
            choice.is_started = True
            if self._options.echo is not None:
                text = self._options.echo + text
                scored = [*self._scored_prompt(), *scored]
        self.num_generated += len(tokens)
        if event.num_drafts:
            self.num_drafts += event.num_drafts
            self.num_accepted += max(0, len(tokens) - 1)
        finish: Finish | None = event.finish_reason.value if event.finish_reason else None
        stop: str | int | None = None
        if matched is not None:
            finish, stop = "stop", matched
        elif event.finish_reason is STOP and tokens:
            stop = tokens[-1]
        if finish is not None:
            choice.is_over = True
            self.num_open -= 1
        cut = matched is not None and event.finish_reason is None
        events: tuple[Event, ...] | None = None
        if choice.parser is not None:
            events = (*choice.parser.push(text), *(choice.parser.finish() if finish is not None else ()))
        return Delta(self._first_choice + event.choice, text, tuple(scored), tokens, finish, stop, events, cut)

    @property
    def mean_logprobs(self) -> dict[int, float]:
        """Choice -> the mean logprob of its tokens, one that ended it included; empty unless ranked."""
        if not self._options.ranked:
            return {}
        return {
            self._first_choice + i: choice.sum_logprobs / max(choice.num_summed, 1)
            for i, choice in enumerate(self._choices)
        }

    def _decode(self, choice: _Choice, event: TokenEvent) -> tuple[str, list[ScoredToken], str | None, tuple[int, ...]]:
        """(text to send, its scored tokens, the stop string found, the tokens that count)."""
        shown = event.tokens[:-1] if event.finish_reason is STOP else event.tokens
        if choice.stops is None and not self._options.logprobs:
            text = choice.detokenizer.push(shown)
            if event.finish_reason is not None:
                text += choice.detokenizer.finish()
            return text, [], None, event.tokens

        pieces = []
        matched = None
        tokens = event.tokens
        for i, token in enumerate(shown):  # one by one: what a stop cuts off must not depend on how tokens come
            piece = choice.detokenizer.push((token,))
            self._hold(choice, token, event.logprobs[i] if self._options.logprobs else None, piece)
            choice.num_tokens += 1
            if choice.stops is not None and choice.num_tokens >= self._options.min_tokens:
                piece, matched = choice.stops.push(piece)
            pieces.append(piece)
            if matched is not None:
                tokens = event.tokens[: i + 1]
                break
        if event.finish_reason is not None and matched is None:
            piece = choice.detokenizer.finish()
            choice.num_decoded += len(piece)
            if choice.stops is not None:
                piece, matched = choice.stops.push(piece)
                if matched is None:
                    piece += choice.stops.finish()
            pieces.append(piece)
        text = "".join(pieces)
        choice.num_emitted += len(text)
        if self._options.ranked:
            choice.sum_logprobs += sum(entry.logprob for entry in event.logprobs[: len(tokens)])
            choice.num_summed += len(tokens)
        is_last = event.finish_reason is not None or matched is not None
        return text, self._release(choice, everything=is_last and matched is None), matched, tokens

    def _hold(self, choice: _Choice, token: int, logprob: TokenLogprob | None, piece: str) -> None:
        start = choice.num_decoded
        choice.num_decoded += len(piece)
        if self._options.logprobs:
            offset = start + len(self._options.echo or "")
            choice.held.append((ScoredToken(token, offset, logprob), choice.num_decoded))

    def _release(self, choice: _Choice, everything: bool) -> list[ScoredToken]:
        """The held tokens whose text has begun to be sent; those behind a stop never are."""
        released = []
        base = len(self._options.echo or "")
        while choice.held:
            scored, end = choice.held[0]
            start = scored.offset - base
            # A token without text of its own (half a character) goes with what precedes it.
            if not (everything or start < choice.num_emitted or start == end == choice.num_emitted):
                break
            released.append(scored)
            choice.held.popleft()
        return released

    def _scored_prompt(self) -> Sequence[ScoredToken]:
        """The prompt's tokens with their logprobs: complete before the first token of any choice."""
        if not (self._options.logprobs and self._request.score_prompt):
            return ()
        if self._prompt_scored is None:
            detokenizer = IncrementalDetokenizer(self._tokenizer, skip_special_tokens=False)
            scored = []
            offset = 0
            num_top = self._request.sampling.num_logprobs or 0
            for i, token in enumerate(self._request.prompt):
                logprob = self.prompt_logprobs[i - 1] if i else None
                if (
                    logprob is not None and len(logprob.top) > num_top
                ):  # `prompt_logprobs` asked for more than `logprobs`
                    logprob = replace(logprob, top=logprob.top[:num_top])
                scored.append(ScoredToken(token, offset, logprob))
                piece = detokenizer.push((token,))
                offset += 0 if i == 0 and self._options.has_bos else len(piece)
            self._prompt_scored = tuple(scored)
        return self._prompt_scored
