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

    Where sequences are generating, a step that also reads prompts takes at most `target_s`, or without one `STRETCH`
    times as long as a step of the streams alone, by what the engine knows of step times. Where none is, or nothing is
    known yet, it takes up to `max_tokens`.
    """

    STRETCH = 2.5
    """Below 3, so that steps stay within three times the usual in spite of errors."""
    LEAST = 4
    """Prompt tokens that a step may always read: all requests go on."""
    SLACK, SPREAD = 1.25, 3.0
    """Steps aim lower once `SPREAD` times the mean error would take them past `SLACK` times their target."""

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
        seconds, target_s = self._costs.seconds, self.target_s
        if target_s is None:
            target_s = self.STRETCH * seconds(StepWork.of_streams(num_streams, num_keys))
        if target_s <= 0.0:
            return self.max_tokens

        def step(num_prompt: int) -> StepWork:
            num_pairs = num_prompt * start + num_prompt * (num_prompt + 1) // 2
            return StepWork(num_streams, num_prompt, 1, num_streams + 1, num_keys, num_pairs)

        aim_s = target_s * min(1.0, self.SLACK / (1.0 + self.SPREAD * self._costs.error(step(most))))
        low, high = self.LEAST, most
        while low < high:  # the most prompt tokens, at least LEAST, with which the step meets its aim
            middle = (low + high + 1) // 2
            if seconds(step(middle)) <= aim_s:
                low = middle
            else:
                high = middle - 1
        return num_streams + low
