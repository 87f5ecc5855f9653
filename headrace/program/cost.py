"""What a step costs, counted: floating point operations and bytes moved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

ACTIVATION_BYTES = 4
"""Buffers between ops are float32."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Work of one op or of a whole program. A multiply and an add count as two flops."""

    flops: float = 0.0
    bytes_read: float = 0.0
    bytes_written: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.flops + other.flops,
            self.bytes_read + other.bytes_read,
            self.bytes_written + other.bytes_written,
        )


@dataclass(frozen=True, slots=True)
class StepShape:
    """The sizes of a step that its cost depends on.

    `pairs[w]` is the number of (query, key) pairs and `keys[w]` the number of cached keys that are read,
    each once per sequence, when a query at position q reads keys at q - w + 1 ... q; window 0 stands for no
    window.
    """

    num_tokens: int
    num_rows: int
    """Readouts: rows the head of the program runs on."""
    num_sequences: int
    pairs: Mapping[int, int] = field(default_factory=dict)
    keys: Mapping[int, int] = field(default_factory=dict)
    cache_element_bytes: int = 4

    @classmethod
    def of(
        cls,
        spans: Iterable[tuple[int, int]],
        num_rows: int,
        windows: Iterable[int] = (0,),
        cache_element_bytes: int = 4,
    ) -> StepShape:
        """The shape of a step made of spans (first position, number of tokens)."""
        spans = tuple(spans)
        windows = tuple(windows)
        return cls(
            num_tokens=sum(count for _, count in spans),
            num_rows=num_rows,
            num_sequences=len(spans),
            pairs={w: sum(query_key_pairs(start, count, w) for start, count in spans) for w in windows},
            keys={w: sum(keys_read(start, count, w) for start, count in spans) for w in windows},
            cache_element_bytes=cache_element_bytes,
        )

    def of_head(self) -> StepShape:
        """The step as the ops after `SelectRows` see it: one row per readout."""
        return replace(self, num_tokens=self.num_rows)


def query_key_pairs(start: int, count: int, window: int = 0) -> int:
    """Sum over positions p in [start, start + count) of min(p + 1, window)."""
    end = start + count
    if not window:
        return (end * (end + 1) - start * (start + 1)) // 2
    growing_end = min(max(window, start), end)  # positions before this one see p + 1 keys, the others `window`
    return query_key_pairs(start, growing_end - start) + window * (end - growing_end)


def keys_read(start: int, count: int, window: int = 0) -> int:
    """Distinct keys that queries at [start, start + count) read."""
    if not count:
        return 0
    return start + count - (max(0, start + 1 - window) if window else 0)
