"""What is worked out about a program before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.program.cost import ACTIVATION_BYTES
from headrace.program.ops import Buffer, Op
from headrace.program.program import Program


def dying_buffers(ops: Sequence[Op], keep: frozenset[Buffer] = frozenset()) -> list[tuple[Buffer, ...]]:
    """For each op, the buffers nobody reads after it, except `keep`. An unread output dies at once."""
    seen = set(keep)
    dying: list[tuple[Buffer, ...]] = []
    for op in reversed(ops):
        last = tuple(b for b in dict.fromkeys((*op.inputs, op.output)) if b not in seen)
        seen.update(last)
        dying.append(last)
    return dying[::-1]


@dataclass(frozen=True, slots=True)
class BufferPlan:
    """Where buffers lie in two arenas, one of [tokens, width] buffers and one of [rows, width] buffers.

    `offsets[b]` counts numbers per row: with n rows, buffer b is the n * width numbers from n * offsets[b]
    of its arena. Buffers that are live at the same time never overlap; an op's output does not overlap its
    inputs.
    """

    offsets: tuple[int, ...]
    trunk_width: int
    """Numbers per token of the arena of the trunk's buffers."""
    head_width: int
    """Numbers per row of the arena of the head's buffers."""

    @property
    def peak_bytes_per_token(self) -> int:
        return ACTIVATION_BYTES * self.trunk_width

    @property
    def peak_bytes_per_row(self) -> int:
        return ACTIVATION_BYTES * self.head_width


def plan_buffers(program: Program) -> BufferPlan:
    """Give each buffer the lowest place that no live buffer holds (first fit in order of the ops)."""
    offsets = [0] * len(program.widths)
    # The rows to read out are gathered from the trunk's last buffer tile by tile: it outlives the trunk.
    selected = frozenset(program.head[0].inputs)
    trunk_width = _place(program.trunk, program.widths, selected, offsets)
    head_width = _place(program.head, program.widths, selected | {program.ops[-1].output}, offsets)
    return BufferPlan(tuple(offsets), trunk_width, head_width)


def _place(ops: Sequence[Op], widths: Sequence[int], keep: frozenset[Buffer], offsets: list[int]) -> int:
    """Fill in the offsets of the ops' outputs; the width of the arena."""
    live: set[Buffer] = set()
    arena = 0
    for op, dying in zip(ops, dying_buffers(ops, keep), strict=True):
        width = widths[op.output]
        place = 0
        for other in sorted(live, key=lambda b: offsets[b]):
            if place + width <= offsets[other]:
                break
            place = max(place, offsets[other] + widths[other])
        offsets[op.output] = place
        arena = max(arena, place + width)
        live.add(op.output)
        live.difference_update(dying)
    return arena
