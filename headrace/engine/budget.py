"""How many tokens one step may compute."""

from __future__ import annotations

from typing import Protocol

from headrace.core.work import StepWork
from headrace.engine.costs import StepCosts
from headrace.engine.state import EngineState


class TokenBudget(Protocol):
    max_tokens: int
    """No step's budget is larger."""

    def tokens(self, state: EngineState, now: float) -> int: ...


class FixedBudget:
    """The same number each step."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens

    def tokens(self, state: EngineState, now: float) -> int:
        return self.max_tokens


class PacedBudget:
    """Prompts are read at the pace of the streams beside them.

    Where sequences are generating, a step that also reads prompts takes `target_s`, or without one `STRETCH` times as
    long as a step of the streams alone and no less than `UNNOTICED_S`, by what the engine knows of step times. Where
    none is, or nothing is known yet, it takes up to `max_tokens`.
    """

    STRETCH = 2.5
    """Below 3, so that steps stay within three times the usual in spite of errors."""
    UNNOTICED_S = 0.02
    """Fifty tokens a second: nobody reads faster, and everybody's prompt is read sooner."""
    LEAST = 4
    """Prompt tokens that a step may always read: all requests go on."""
    MOST_CAUTION = 0.2
    """Steps aim lower than `target_s` by the mean error of predictions, at most by this: what other work on a machine
    adds to a step does not get less with its tokens. Without a target nothing is promised: prompts are read sooner."""

    def __init__(self, max_tokens: int, costs: StepCosts, target_s: float | None = None) -> None:
        self.max_tokens = max_tokens
        self.target_s = target_s
        self._costs = costs

    def tokens(self, state: EngineState, now: float) -> int:
        num_streams = num_keys = start = 0
        is_reading = False
        for sequence in state.running:
            if sequence.num_computed >= sequence.num_prompt:
                num_streams += 1
                num_keys += sequence.num_computed
            elif not is_reading:
                is_reading, start = True, sequence.num_computed + sequence.num_in_flight
        most = self.max_tokens - num_streams
        has_prompts = is_reading or state.waiting or state.batch
        if not (num_streams and has_prompts) or most <= self.LEAST:
            return self.max_tokens
        seconds = self._costs.seconds
        if self.target_s is None:
            alone_s = seconds(StepWork.of_streams(num_streams, num_keys))
            if alone_s <= 0.0:
                return self.max_tokens
            aim_s = max(self.STRETCH * alone_s, self.UNNOTICED_S)
        else:
            aim_s = self.target_s * (1.0 - min(self._costs.errors[1], self.MOST_CAUTION))

        def step_s(num_prompt: int) -> float:
            return seconds(StepWork.of_prompt(num_prompt, start, num_streams, num_keys))

        low, high = self.LEAST, most
        low_s, high_s = step_s(low), step_s(high)
        if high_s <= aim_s:
            return self.max_tokens
        while high - low > 1 and low_s < aim_s:  # the most prompt tokens with which the step meets its aim
            share = (aim_s - low_s) / (high_s - low_s)  # a step's time is nearly a line
            middle = min(low + max(1, int(share * (high - low))), high - 1)
            middle_s = step_s(middle)
            if middle_s <= aim_s:
                low, low_s = middle, middle_s
            else:
                high, high_s = middle, middle_s
        return num_streams + low
