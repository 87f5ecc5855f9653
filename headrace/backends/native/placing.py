"""Places for buffers in an arena: first fit in order of the calls."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.backends.native import _native

QUANTIZED_FLOATS = 2 * 3 / 8
"""Room of a quantized number in floats, in each of two planes: a byte, two floats per 32 and an integer per 16 numbers
(`QuantizedRows`)."""


@dataclass(frozen=True, slots=True, eq=False)
class Ref:
    """A buffer [rows, width]; compared by identity."""

    width: int
    is_quantized: bool = False
    num_outliers: int = 0
    """Numbers of a quantized row that stay floats."""
    has_fixed: bool = False
    """Those of the same channels in all rows."""

    @property
    def num_floats(self) -> int:
        """Room per row."""
        if not self.is_quantized:
            return self.width
        return max(
            round(self.width * QUANTIZED_FLOATS), round(self.width * QUANTIZED_FLOATS / 2) + _native.OUTLIER_FLOATS
        )


class Arena:
    """With n rows, a buffer at offset o takes the floats from n * o. Buffers live at the same time never overlap."""

    def __init__(self) -> None:
        self.offsets: dict[Ref, int] = {}
        self.width = 0
        """Floats per row in all."""
        self.live: list[Ref] = []

    def add(self, ref: Ref) -> None:
        """Give the buffer the lowest place that is free now; one that has a place keeps it."""
        if ref in self.live:
            return
        place = 0
        for other in sorted(self.live, key=self.offsets.__getitem__):
            if place + ref.num_floats <= self.offsets[other]:
                break
            place = max(place, self.offsets[other] + other.num_floats)
        self.offsets[ref] = place
        self.width = max(self.width, place + ref.num_floats)
        self.live.append(ref)

    def free(self, ref: Ref) -> None:
        if ref in self.live:
            self.live.remove(ref)
