"""The truth, for experiments."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.core.protocols import LengthPrediction
from headrace.core.request import Request


class OraclePredictor:
    """The lengths of a replayed trace by request id; the bound of a request it does not have, which is its length
    where ends are ignored."""

    def __init__(self, lengths: Mapping[str, int] | None = None) -> None:
        # Not `or`: an empty mapping is filled by a replay later.
        self._lengths: Mapping[str, int] = {} if lengths is None else lengths

    def predict(self, request: Request, bound: int) -> LengthPrediction:
        length = self._lengths.get(request.id, bound)
        return LengthPrediction(length, length)

    def observe(self, request: Request, num_generated: int) -> None:
        pass
