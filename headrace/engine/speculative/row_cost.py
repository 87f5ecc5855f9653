"""What a row more in a step costs."""

from __future__ import annotations


class RowCost:
    """Seconds of a step of r rows, learnt from steps: seconds = base + row * r.

    The line of least squares through what was seen, old steps counting ever less (half as much after about 70). Where
    steps were all of one size, which says nothing about a row, a row's share of a step stays what it was; at the start
    it is `FIRST_SHARE`, which is cheap to be wrong about, since drafts are then tried and measured.
    """

    KEEP = 0.99
    FIRST_SHARE = 0.05
    """Of a step of one row, what another costs: about right where a step is bound by reading the weights."""
    LEAST_SPREAD = 0.05
    """Variance of the rows from which on the line is trusted."""
    MOST_TIMES = 4.0
    """A step of so many times the expected time counts as no longer than that: it met other work on the machine."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._rows = 0.0
        self._seconds = 0.0
        self._rows_rows = 0.0
        self._rows_seconds = 0.0
        self._share = self.FIRST_SHARE
        """Of a row in the time of a step without rows."""

    def observe(self, rows: int, seconds: float) -> None:
        if self._weight:
            seconds = min(seconds, self.MOST_TIMES * self.relative(rows) * self._scale())
        keep = self.KEEP
        self._weight = keep * self._weight + 1.0
        self._rows = keep * self._rows + rows
        self._seconds = keep * self._seconds + seconds
        self._rows_rows = keep * self._rows_rows + rows * rows
        self._rows_seconds = keep * self._rows_seconds + rows * seconds
        mean_rows, mean_seconds = self._rows / self._weight, self._seconds / self._weight
        spread = self._rows_rows / self._weight - mean_rows * mean_rows
        if spread >= self.LEAST_SPREAD * mean_rows and mean_seconds > 0.0:
            slope = (self._rows_seconds / self._weight - mean_rows * mean_seconds) / spread
            base = mean_seconds - slope * mean_rows
            # Steps neither cost nothing beside their rows nor get cheaper by more of them.
            self._share = max(0.0, slope) / max(base, 0.01 * mean_seconds)

    def relative(self, rows: int) -> float:
        """What a step of so many rows takes, in units of one without rows."""
        return 1.0 + self._share * rows

    def _scale(self) -> float:
        """Seconds of a step without rows."""
        return self._seconds / (self._weight + self._share * self._rows)
