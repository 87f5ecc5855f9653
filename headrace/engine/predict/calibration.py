"""How good a predictor is, measured on the latest replies."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter, deque
from typing import NamedTuple


class CalibrationReport(NamedTuple):
    """Zeros before the first reply has ended."""

    num_observed: int = 0
    """Replies since the start."""
    log_error: float = 0.0
    """Mean of |ln(predicted / actual)|: 0.69 is off by a factor of two."""
    tau: float = 0.0
    """Kendall's tau-b between predicted and actual: 1 the same order, 0 none, -1 the reverse. All a policy of the
    shortest first needs is the order."""


class Calibration:
    """Over the latest `num_kept` replies; asked for, a report is made anew once in `EVERY` replies, in 1 ms for 256."""

    EVERY = 32

    def __init__(self, num_kept: int = 256) -> None:
        self._latest: deque[tuple[float, int]] = deque(maxlen=num_kept)
        self._num_observed = 0
        self._report = CalibrationReport()

    def observe(self, predicted: float, actual: int) -> None:
        """One token is the least of both."""
        self._latest.append((max(1.0, predicted), max(1, actual)))
        self._num_observed += 1

    @property
    def report(self) -> CalibrationReport:
        num_new = self._num_observed - self._report.num_observed
        if num_new >= (1 if self._num_observed < self.EVERY else self.EVERY):
            self._report = self._measured()
        return self._report

    def _measured(self) -> CalibrationReport:
        error = sum(abs(math.log(predicted / actual)) for predicted, actual in self._latest) / len(self._latest)
        return CalibrationReport(self._num_observed, error, kendall_tau(list(self._latest)))


def kendall_tau(pairs: list[tuple[float, int]]) -> float:
    """tau-b (Kendall 1945), which allows for ties; 0 where one side is the same throughout.

    n log n comparisons: for each pair in the order of the first side, its concordant ones are those before it that are
    smaller on the second.
    """
    n = len(pairs)
    total = n * (n - 1) // 2
    tied_first = _num_tied(Counter(first for first, _ in pairs))
    tied_second = _num_tied(Counter(second for _, second in pairs))
    if total in (tied_first, tied_second):
        return 0.0
    before: list[int] = []
    balance = start = 0
    ordered = sorted(pairs)
    while start < n:
        end = start
        while end < n and ordered[end][0] == ordered[start][0]:
            balance += bisect_left(before, ordered[end][1]) - (len(before) - bisect_right(before, ordered[end][1]))
            end += 1
        for _, second in ordered[start:end]:
            insort(before, second)
        start = end
    return balance / math.sqrt((total - tied_first) * (total - tied_second))


def _num_tied(counts: Counter) -> int:
    return sum(count * (count - 1) // 2 for count in counts.values())
