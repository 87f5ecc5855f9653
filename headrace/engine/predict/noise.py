"""A predictor made worse on purpose: how much does a policy lose?"""

from __future__ import annotations

import math
from hashlib import blake2b

from headrace.core.protocols import LengthPrediction, LengthPredictor
from headrace.core.randomness import coin, uniform
from headrace.core.request import Request


class NoisyPredictor:
    """Another predictor's tokens times exp(sigma z), z standard normal and a pure function of the request's id.

    The mean absolute log error of an exact predictor becomes sigma x sqrt(2 / pi), 0.8 sigma.
    """

    def __init__(self, inner: LengthPredictor, sigma: float, seed: int = 0) -> None:
        self._inner = inner
        self._sigma = sigma
        self._seed = seed

    def predict(self, request: Request, bound: int) -> LengthPrediction:
        expected, high = self._inner.predict(request, bound)
        factor = math.exp(self._sigma * self._normal(request.id))
        return LengthPrediction(expected * factor, high * factor)

    def observe(self, request: Request, num_generated: int) -> None:
        self._inner.observe(request, num_generated)

    def _normal(self, id: str) -> float:
        """By Box and Muller."""
        digest = int.from_bytes(blake2b(id.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
        radius = math.sqrt(-2 * math.log(1 - uniform(digest, self._seed, 0)))
        return radius * math.cos(2 * math.pi * coin(digest, self._seed, 0))
