"""The request's own word."""

from __future__ import annotations

from headrace.core.protocols import LengthPrediction
from headrace.core.request import Request


class BoundPredictor:
    """The most tokens the reply may have: by `max_tokens`, by its grammar, or by what is left of the context."""

    def predict(self, request: Request, bound: int) -> LengthPrediction:
        return LengthPrediction(bound, bound)

    def observe(self, request: Request, num_generated: int) -> None:
        pass
