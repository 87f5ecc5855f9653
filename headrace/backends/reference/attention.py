"""Attention over a paged cache.

A span's keys lie at slots start, start + 1, ... of its sequence, in the order of its rows; slot s is token
s % block_size of block table[s // block_size]. The cache before the span is a chain: slot s < start is
position s.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.backends.inputs import SpanInputs
from headrace.backends.reference.meanings import Floats, Step, meaning
from headrace.core.plan import StepPlan
from headrace.program.ops import Attend

QUERY_TILE = 64
"""Queries scored at once: scores are [heads, QUERY_TILE, context], never [heads, prompt, prompt]."""


@meaning(Attend)
def attend(op: Attend, step: Step, q: Floats, k: Floats, v: Floats | None = None) -> Floats:
    stored = step.store.attention[op.group, op.entry]
    out = np.empty((len(q), op.output_width), np.float32)
    for index, span in enumerate(step.inputs.spans):
        rows = slice(span.first_row, span.first_row + span.count)
        view = span_view(step, index, op)
        stored.keys[view.write] = k[rows].reshape(span.count, op.kv_heads, op.key_width)
        keys = _gather(stored.keys, view.blocks)
        if stored.values is None or v is None:
            values = keys[..., : op.value_width]
        else:
            stored.values[view.write] = v[rows].reshape(span.count, op.kv_heads, op.value_width)
            values = _gather(stored.values, view.blocks)
        for begin in range(0, span.count, QUERY_TILE):
            end = min(begin + QUERY_TILE, span.count)
            tile = slice(span.first_row + begin, span.first_row + end)
            low, high, allowed = view.keys_of(begin, end)
            out[tile] = _attend_tile(op, q[tile], keys[low:high], values[low:high], allowed)
    return out


def _attend_tile(op: Attend, q: Floats, keys: Floats, values: Floats, allowed: NDArray[np.bool_] | None) -> Floats:
    """q [n, heads * key_width], keys [m, kv_heads, ...], allowed [n, m] -> [n, heads * value_width]."""
    n, m, sharing = len(q), len(keys), op.heads // op.kv_heads
    by_row = (q * np.float32(op.scale)).reshape(n, op.kv_heads, sharing, op.key_width)
    queries = by_row.transpose(1, 0, 2, 3).reshape(op.kv_heads, n * sharing, op.key_width)
    scores = queries @ keys.transpose(1, 2, 0)  # [kv_heads, n * sharing, m]
    if op.softcap:
        scores = np.float32(op.softcap) * np.tanh(scores / np.float32(op.softcap))
    if allowed is not None:
        masked = scores.reshape(op.kv_heads, n, sharing, m)
        np.copyto(masked, np.float32(-np.inf), where=~allowed[None, :, None, :])
    scores -= scores.max(axis=2, keepdims=True)
    np.exp(scores, out=scores)
    total = scores.sum(axis=2, keepdims=True)
    mixed = (scores @ values.transpose(1, 0, 2)) / total  # [kv_heads, n * sharing, value_width]
    mixed_by_row = mixed.reshape(op.kv_heads, n, sharing, op.value_width).transpose(1, 0, 2, 3)
    return mixed_by_row.reshape(n, op.heads * op.value_width)


def _gather(stored: NDArray[np.generic], blocks: NDArray[np.int32]) -> Floats:
    """The slots of some blocks, one after the other: [slots, kv_heads, width]."""
    found = stored[blocks].astype(np.float32, copy=False)
    return found.reshape(-1, *found.shape[2:])


@dataclass(frozen=True, slots=True)
class SpanView:
    """What the queries of a span see, the same for all layers of a cache group.

    `blocks` are the blocks that hold slots from `first_slot` (a multiple of the block size) to the end of the
    span; `write` indexes the storage of the span's own tokens.
    """

    span: SpanInputs
    window: int
    blocks: NDArray[np.int32]
    first_slot: int
    write: tuple[NDArray[np.int32], NDArray[np.int32]]
    positions: NDArray[np.int32]
    """Of the span's rows."""
    ancestors: NDArray[np.bool_] | None
    """[count, count]: row j of the span is row i or an ancestor of it; None for a chain."""

    def keys_of(self, begin: int, end: int) -> tuple[int, int, NDArray[np.bool_] | None]:
        """For rows [begin, end) of the span: the gathered keys [low, high) to score, and which each row sees.

        The mask is [end - begin, high - low]; None: every row sees all of them.
        """
        start, positions = self.span.start, self.positions[begin:end]
        low = max(0, int(positions.min()) + 1 - self.window) if self.window else 0
        if self.ancestors is None:
            slots = np.arange(low, start + end)  # a slot is its position
            if end - begin == 1:
                allowed = None
            else:
                allowed = slots <= positions[:, None]
                if self.window:
                    allowed &= slots > positions[:, None] - self.window
        else:
            low = min(low, start)  # a slot of the span says nothing about its position
            slots = np.concatenate([np.arange(low, start), self.positions])
            allowed = np.ones((end - begin, len(slots)), bool)
            allowed[:, start - low :] = self.ancestors[begin:end]
            if self.window:
                allowed &= slots > positions[:, None] - self.window
        return low - self.first_slot, low - self.first_slot + len(slots), allowed


def span_view(step: Step, index: int, op: Attend) -> SpanView:
    """The view of a span for the op's cache group. Raises `ValueError` when a block it needs is missing."""
    key = (index, op.group)
    if key not in step.shared:
        step.shared[key] = _make_view(step, step.inputs.spans[index], op)
    view: SpanView = step.shared[key]
    return view


def _make_view(step: Step, span: SpanInputs, op: Attend) -> SpanView:
    size = step.store.block_sizes[op.group]
    table = span.tables[op.group]
    first_block = max(0, span.start + 1 - op.window) // size if op.window else 0
    num_blocks = -(-(span.start + span.count) // size)
    blocks = table[first_block:num_blocks]
    if len(blocks) < num_blocks - first_block or (len(blocks) and blocks.min() < 0):
        raise ValueError(
            f"a span of tokens {span.start} to {span.start + span.count} needs blocks {first_block} to "
            f"{num_blocks} of group {op.group}, but its table holds {blocks.tolist()} there; the scheduler must "
            "give every block a span reads or writes."
        )
    slots = np.arange(span.start, span.start + span.count, dtype=np.int32)
    rows = slice(span.first_row, span.first_row + span.count)
    return SpanView(
        span=span,
        window=op.window,
        blocks=blocks,
        first_slot=first_block * size,
        write=(table[slots // size], slots % size),
        positions=step.inputs.positions[rows],
        ancestors=tree_ancestors(step.inputs.parents[rows], span.first_row),
    )


def is_chain(parents: NDArray[np.int32], first_row: int) -> bool:
    """Whether each row of a span follows the one before it."""
    return bool(parents[0] == StepPlan.IN_CACHE) and bool(
        (parents[1:] == np.arange(first_row, first_row + len(parents) - 1)).all()
    )


def tree_ancestors(parents: NDArray[np.int32], first_row: int) -> NDArray[np.bool_] | None:
    """Per row of a span, itself and its ancestors in the span; None for a chain. Parents come before
    children.
    """
    if is_chain(parents, first_row):
        return None
    ancestors = np.eye(len(parents), dtype=bool)
    for row, parent in enumerate(parents):
        if parent != StepPlan.IN_CACHE:
            if not first_row <= parent < first_row + row:
                raise ValueError(
                    f"row {first_row + row} has parent {parent}; a parent is an earlier row of the same "
                    f"span, from {first_row} on."
                )
            ancestors[row] |= ancestors[parent - first_row]
    return ancestors
