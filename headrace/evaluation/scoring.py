"""Logprobs of given tokens, through the engine as any request that scores its prompt."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.engine.engine import Engine
from headrace.evaluation.texts import Window

NUM_IN_FLIGHT = 4
"""Windows submitted at once: enough to fill the engine's steps, few enough for any queue."""

Tick = Callable[[int], None]
"""Called with the number of tokens just scored."""


@dataclass(frozen=True, slots=True)
class Perplexity:
    """exp of the mean negative logprob (natural) of the scored tokens."""

    num_tokens: int
    mean_nll: float
    mean_nll_error: float
    """One standard deviation of the mean, as if tokens were independent of each other: a guide, no more."""

    @property
    def perplexity(self) -> float:
        return math.exp(self.mean_nll)

    def as_dict(self) -> dict[str, float]:
        return {
            "perplexity": self.perplexity,
            "perplexity_error": self.perplexity * self.mean_nll_error,
            "mean_nll": self.mean_nll,
            "bits_per_token": self.mean_nll / math.log(2),
            "num_tokens": self.num_tokens,
        }


def perplexity(logprobs: Iterable[float]) -> Perplexity:
    values = list(logprobs)
    mean = -math.fsum(values) / len(values)
    variance = math.fsum((value + mean) ** 2 for value in values) / max(1, len(values) - 1)
    return Perplexity(len(values), mean, math.sqrt(variance / len(values)))


def score(engine: Engine, parts: Iterable[Window], tick: Tick = lambda count: None) -> list[float]:
    """Logprobs of the windows' tokens that are not known, in order. The engine is used by nobody else meanwhile.

    Raises `RequestError` for a window the engine refuses.
    """
    waiting = enumerate(parts)
    found: dict[str, list[float]] = {}
    known: dict[str, int] = {}
    open_ids: set[str] = set()
    while True:
        while len(open_ids) < NUM_IN_FLIGHT and (following := next(waiting, None)) is not None:
            number, window = following
            request = score_request(f"score-{number}", window)
            engine.submit(request)
            found[request.id], known[request.id] = [], window.num_known
            open_ids.add(request.id)
        if not open_ids:
            break
        for event in engine.step():
            found[event.request_id] += [entry.logprob for entry in event.prompt_logprobs]
            tick(len(event.prompt_logprobs))
            if event.finish_reason is not None:
                open_ids.discard(event.request_id)
    # Entry i is of token i + 1.
    return [value for request_id, values in found.items() for value in values[known[request_id] - 1 :]]


def score_request(request_id: str, window: Window) -> Request:
    return Request(request_id, window.tokens, SamplingParams(max_tokens=0, temperature=0.0), score_prompt=True)
