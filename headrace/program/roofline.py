"""What a cost model starts from: the work of a Program, counted, over what a machine can do.

A step takes as long as its bytes at the memory's bandwidth or its operations at the arithmetic's peak, whichever is
longer (Williams, Waterman and Patterson, Roofline, 2009). A rough start: a few real steps take over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from headrace.core.work import StepWork
from headrace.program.program import Program

STREAMS = (1, 4, 16, 64)
CONTEXTS = (16, 1024)
PROMPTS = (16, 160)


class Peaks(NamedTuple):
    """Of a machine."""

    flops_per_s: float
    """In the arithmetic of the kernels: for quantized weights that of integers."""
    bytes_per_s: float


def roofline_s(
    program: Program, spans: tuple[tuple[int, int], ...], num_readouts: int, weights: Mapping[str, int], peaks: Peaks
) -> float:
    """Seconds of a step of spans (first position, number of tokens). `weights`: bytes as stored."""
    cost = program.cost(program.step_shape(spans, num_readouts, cache_element_bytes=2), weights)
    return max(cost.flops / peaks.flops_per_s, (cost.bytes_read + cost.bytes_written) / peaks.bytes_per_s)


def seeds(program: Program, weights: Mapping[str, int], peaks: Peaks) -> Iterator[tuple[StepWork, float]]:
    """Steps of all kinds and their seconds, for `CostModel`."""
    for context in CONTEXTS:
        for count in STREAMS:
            spans = ((context, 1),) * count
            work = StepWork.of_streams(count, count * (context + 1))
            yield work, roofline_s(program, spans, count, weights, peaks)
        for size in PROMPTS:
            for count in (0, 4):
                spans = (*((context, 1),) * count, (context, size))
                work = StepWork.of_prompt(size, context, count, count * (context + 1))
                yield work, roofline_s(program, spans, count + 1, weights, peaks)
