"""How many tokens one step may compute."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Protocol

from headrace.core.work import StepWork
from headrace.engine.costs import StepCosts
from headrace.engine.state import EngineState


class TokenBudget(Protocol):
    max_tokens: int
    """No step's budget is larger."""

    def tokens(self, state: EngineState, now: float) -> int: ...

    def beside(self, num_streams: int, num_keys: int, start: int) -> int:
        """What `tokens` says of a step that goes on with a prompt from position `start`, beside streams that have so
        many computed tokens together."""
        ...


class FixedBudget:
    """The same number each step."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens

    def tokens(self, state: EngineState, now: float) -> int:
        return self.max_tokens

    def beside(self, num_streams: int, num_keys: int, start: int) -> int:
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
        self._latest = max_tokens
        """Prompt tokens of the latest step, which those of the next will hardly differ from."""

    def tokens(self, state: EngineState, now: float) -> int:
        num_streams = num_keys = start = 0
        is_reading = False
        for sequence in state.running:
            if sequence.num_computed >= sequence.num_prompt:
                num_streams += 1
                num_keys += sequence.num_computed
            elif not is_reading:
                is_reading, start = True, sequence.num_computed + sequence.num_in_flight
        has_prompts = is_reading or state.waiting or state.batch
        return self.beside(num_streams, num_keys, start) if has_prompts else self.max_tokens

    def beside(self, num_streams: int, num_keys: int, start: int) -> int:
        most = self.max_tokens - num_streams
        if not num_streams or most <= self.LEAST:
            return self.max_tokens
        seconds = self._costs.seconds
        if self.target_s is None:
            alone_s = seconds(StepWork.of_streams(num_streams, num_keys))
            if alone_s <= 0.0:
                return self.max_tokens
            aim_s = max(self.STRETCH * alone_s, self.UNNOTICED_S)
        else:
            aim_s = self.target_s * (1.0 - min(self._costs.errors[1], self.MOST_CAUTION))

        def fits(num_prompt: int) -> bool:
            return seconds(StepWork.of_prompt(num_prompt, start, num_streams, num_keys)) <= aim_s

        self._latest = largest(fits, self.LEAST, most, self._latest)
        return num_streams + self._latest


def largest(fits: Callable[[int], bool], low: int, high: int, guess: int) -> int:
    """The largest number in [low, high] that fits, `low` if none does; whatever is smaller than one that fits, does
    too. Asks twice for a good guess, and more often, by the logarithm of its error, for another one."""
    guess, stride = min(max(guess, low), high), 1
    if fits(guess):
        low, above = guess, high + 1  # low fits, or is the least; above does not, or is too large
        while low + stride < above:
            if fits(low + stride):
                low, stride = low + stride, 2 * stride
            else:
                above = low + stride
                break
    else:
        above = guess
        while above - stride > low:
            if fits(above - stride):
                low = above - stride
                break
            above, stride = above - stride, 2 * stride
    return low + bisect_left(range(low + 1, above), True, key=lambda number: not fits(number))
