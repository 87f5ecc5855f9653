"""How much a step does, in the few numbers that its time depends on."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from headrace.core.plan import StepPlan


class StepWork(NamedTuple):
    """The sizes of a step. A *stream* is a span of one token, a *prompt* a longer one."""

    num_streams: int
    num_prompt: int
    """Tokens of prompts."""
    num_prompts: int
    num_readouts: int
    num_keys: int
    """Cached keys that streams read."""
    num_pairs: int
    """(query, key) pairs of prompts."""

    @classmethod
    def of(cls, plan: StepPlan) -> StepWork:
        """About 0.1 us per span."""
        num_keys = num_pairs = num_prompts = num_prompt = 0
        for span in plan.spans:
            start, count = span.start, span.count
            if count == 1:
                num_keys += start + 1
            else:
                num_prompts += 1
                num_prompt += count
                num_pairs += count * start + count * (count + 1) // 2
        num_streams = len(plan.spans) - num_prompts
        return cls(num_streams, num_prompt, num_prompts, len(plan.readout_rows), num_keys, num_pairs)

    def later(self, num_steps: int) -> StepWork:
        """The same step of streams alone, so many steps later: each has as many keys more."""
        streams, _, _, readouts, num_keys, _ = self
        return StepWork(streams, 0, 0, readouts, num_keys + num_steps * streams, 0)


class StepTimes(Protocol):
    """Predicts how long steps take."""

    def seconds(self, work: StepWork) -> float: ...
