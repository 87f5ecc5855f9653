"""How many tokens one step may compute."""

from __future__ import annotations

import math
from typing import Protocol

from headrace.core.plan import StepPlan
from headrace.engine.state import EngineState


class TokenBudget(Protocol):
    max_tokens: int
    """No step's budget is larger."""

    def tokens(self, state: EngineState, now: float) -> int: ...

    def observe(self, plan: StepPlan, compute_s: float) -> None:
        """A step has taken so long."""
        ...


class FixedBudget:
    """The same number each step."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens

    def tokens(self, state: EngineState, now: float) -> int:
        return self.max_tokens

    def observe(self, plan: StepPlan, compute_s: float) -> None:
        pass


class PacedBudget:
    """Prompts are read at the pace of the streams beside them.

    Where sequences are generating, a step that also reads prompts takes at most `target_s`, or without one `STRETCH`
    times as long as a step of the streams alone. Where none is, it takes up to `max_tokens`. What a step takes is
    learnt from steps:

        seconds(streams m, prompt tokens n) = streams_s + token_s * (m - num_streams) + token_s * n

    `streams_s` and `num_streams` are those of the latest steps without prompts, `token_s` is a prompt token's share in
    steps with them; both move a tenth of the way with each step, and at most to twice their value, since a machine with
    other work has slow steps of its own.
    """

    STRETCH = 3.0
    LEAST = 16
    """Prompt tokens that a step may always read: all requests go on."""
    MOVE = 0.1

    def __init__(self, max_tokens: int, target_s: float | None = None) -> None:
        self.max_tokens = max_tokens
        self.target_s = target_s
        self._streams_s: float | None = None
        self._num_streams = 0
        self._token_s: float | None = None

    def tokens(self, state: EngineState, now: float) -> int:
        if self._streams_s is None or self._token_s is None:
            return self.max_tokens
        num_streams = 0
        for sequence in state.running:
            num_streams += sequence.num_computed >= sequence.num_prompt
        if not num_streams:
            return self.max_tokens
        alone_s = self._seconds(num_streams)
        target_s = self.STRETCH * alone_s if self.target_s is None else self.target_s
        num_prompt = max(self.LEAST, math.floor((target_s - alone_s) / self._token_s))
        return min(self.max_tokens, num_streams + num_prompt)

    def observe(self, plan: StepPlan, compute_s: float) -> None:
        if plan.num_drafts:
            return  # neither the streams alone nor prompts
        num_prompt = plan.num_tokens - len(plan.spans)
        if not num_prompt:  # a token for each
            # The move is from what was known of steps with so many streams.
            known = None if self._streams_s is None else self._seconds(len(plan.spans))
            self._streams_s, self._num_streams = self._moved(known, compute_s), len(plan.spans)
            return
        longer = [span.count for span in plan.spans if span.count > 1]
        num_streams = len(plan.spans) - len(longer)
        before_s = self._seconds(num_streams) if num_streams and self._streams_s is not None else 0.0
        if compute_s > before_s:
            self._token_s = self._moved(self._token_s, (compute_s - before_s) / sum(longer))

    def seconds(self, num_prompt: int, num_streams: int, context: int) -> float:
        """As a `StepCost`: of what steps have taken; the context is taken to be what it was in those."""
        if num_streams == 0 or self._streams_s is None:
            return (self._token_s or 0.0) * (num_prompt + num_streams)
        return self._seconds(num_streams) + (self._token_s or 0.0) * num_prompt

    def _seconds(self, num_streams: int) -> float:
        assert self._streams_s is not None
        more_s = (self._token_s or 0.0) * (num_streams - self._num_streams)
        return max(self._streams_s + more_s, self._streams_s / 4)

    def _moved(self, known: float | None, seen: float) -> float:
        return seen if known is None else known + self.MOVE * (min(seen, 2 * known) - known)
