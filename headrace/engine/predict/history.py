"""What replies have been like: quantiles per tenant and per length of prompt."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque

from headrace.core.protocols import LengthPrediction
from headrace.core.request import Request

LEAST = 8
"""Replies without which a history says nothing."""


class _Latest:
    """The latest so many numbers, kept in order too: a quantile is one index."""

    __slots__ = ("_arrived", "_ordered", "_size")

    def __init__(self, size: int) -> None:
        self._size = size
        self._arrived: deque[int] = deque()
        self._ordered: list[int] = []

    def __len__(self) -> int:
        return len(self._ordered)

    def add(self, value: int) -> None:
        self._arrived.append(value)
        insort(self._ordered, value)
        if len(self._arrived) > self._size:
            del self._ordered[bisect_left(self._ordered, self._arrived.popleft())]

    def quantile(self, share: float) -> int:
        return self._ordered[min(len(self._ordered) - 1, int(share * len(self._ordered)))]


class HistoryPredictor:
    """Median and 90th percentile of the latest `num_kept` replies to the same tenant's prompts of like length (within
    a power of two); with fewer than `LEAST` of these, of all tenants' such prompts, then of all replies, then the
    bound. Memory is bounded: of tenants and lengths, the `max_keys` seen last are kept."""

    def __init__(self, num_kept: int = 256, max_keys: int = 1024) -> None:
        self._num_kept = num_kept
        self._max_keys = max_keys
        self._histories: OrderedDict[tuple, _Latest] = OrderedDict()

    def predict(self, request: Request, bound: int) -> LengthPrediction:
        for key in self._keys(request):
            history = self._histories.get(key)
            if history is not None and len(history) >= LEAST:
                return LengthPrediction(history.quantile(0.5), history.quantile(0.9))
        return LengthPrediction(bound, bound)

    def observe(self, request: Request, num_generated: int) -> None:
        for key in self._keys(request):
            history = self._histories.setdefault(key, _Latest(self._num_kept))
            history.add(num_generated)
            self._histories.move_to_end(key)
        while len(self._histories) > self._max_keys:
            self._histories.popitem(last=False)

    @staticmethod
    def _keys(request: Request) -> tuple[tuple, ...]:
        """From the most particular to the most general."""
        length = len(request.prompt).bit_length()
        return (request.tenant, length), (length,), ()
