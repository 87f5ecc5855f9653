"""How much a step does, in the few numbers that its time depends on."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from headrace.core.plan import StepPlan


class StepWork(NamedTuple):
    """The sizes of a step. A span of one token is a *stream*, and so is each draft behind it; a longer one without
    drafts is a *prompt*."""

    num_streams: int
    num_prompt: int
    """Tokens of prompts."""
    num_prompts: int
    num_readouts: int
    num_keys: int
    """Cached keys that streams read; drafts read the same ones as the token before them."""
    num_pairs: int
    """(query, key) pairs of prompts, and of drafts."""

    @classmethod
    def of(cls, plan: StepPlan) -> StepWork:
        """About 0.1 us per span."""
        num_keys = num_pairs = num_prompts = num_prompt = 0
        for span in plan.spans:
            start, count = span.start, span.count
            if count == 1:
                num_keys += start + 1
            elif span.num_drafts:
                num_keys += start + 1
                num_pairs += (count - 1) * (start + 1)
            else:
                num_prompts += 1
                num_prompt += count
                num_pairs += _pairs(start, count)
        num_streams = len(plan.token_ids) - num_prompt
        return cls(num_streams, num_prompt, num_prompts, len(plan.readout_rows), num_keys, num_pairs)

    @classmethod
    def of_prompt(cls, num_tokens: int, start: int = 0, num_streams: int = 0, num_keys: int = 0) -> StepWork:
        """Of a prompt read from position `start`, alone or beside streams that read so many cached keys together."""
        num_pairs = _pairs(start, num_tokens)
        return cls(num_streams, num_tokens, int(num_tokens > 0), num_streams + 1, num_keys, num_pairs)

    @classmethod
    def of_streams(cls, num_streams: int, num_keys: int) -> StepWork:
        """Of streams alone, which read so many cached keys together."""
        return cls(num_streams, 0, 0, num_streams, num_keys, 0)

    def later(self, num_steps: int, num_readouts: int, chunk: tuple[int, int] | None = None) -> StepWork:
        """The same step, so many steps later: each stream has as many keys more, and beside them one prompt is read,
        (start, count) of it, or none. Its single token is a stream's, as everywhere."""
        streams, _, _, _, num_keys, _ = self
        num_keys += num_steps * streams
        if chunk is None:
            return StepWork(streams, 0, 0, num_readouts, num_keys, 0)
        start, count = chunk
        if count == 1:
            return StepWork(streams + 1, 0, 0, num_readouts, num_keys + start + 1, 0)
        return StepWork(streams, count, 1, num_readouts, num_keys, _pairs(start, count))


def _pairs(start: int, count: int) -> int:
    """(query, key) pairs of `count` tokens from position `start` on, each of which reads all up to itself."""
    return count * start + count * (count + 1) // 2


class StepTimes(Protocol):
    """Predicts how long steps take."""

    def seconds(self, work: StepWork) -> float:
        """0 as long as nothing is known."""
        ...
