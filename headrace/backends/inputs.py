"""A step as arrays: what a backend is handed."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from headrace.core.plan import StepPlan

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SpanInputs:
    """`count` rows from `first_row` on, of a sequence that has `start` tokens in the cache."""

    start: int
    count: int
    first_row: int
    tables: tuple[Ints, ...]
    """Per cache group; see `core.plan.Span.tables`."""


@dataclass(frozen=True)
class BatchInputs:
    """Per row (token of the step): `token_ids`, `positions`, `parents`. Per readout: `readout_rows`.

    Spans lie flat, for whoever takes them as arrays: `span_numbers` has (start, count, first row) of each, and the
    block tables of group 0's spans, then group 1's, begin at `table_starts` of `tables`.
    """

    token_ids: Ints
    positions: Ints
    parents: Ints
    span_numbers: Ints
    tables: Ints
    table_starts: Ints
    readout_rows: Ints
    is_chain: bool
    """Every token's parent is the row before it, or the cache."""

    @classmethod
    def from_plan(cls, plan: StepPlan, previous_tokens: Sequence[int] | Ints = ()) -> BatchInputs:
        """Copies everything a step needs, so that the plan and its live tables may change afterwards.

        `previous_tokens`: see `with_previous`; not needed when no token is in flight.
        """
        spans, tables, starts = array("i"), array("i"), array("i")
        for span in plan.spans:  # once, for there are many and none is in the processor's caches
            spans.extend((span.start, span.count, span.first_row))
            starts.append(len(tables))
            tables.extend(span.tables[0])
        for group in range(1, len(plan.spans[0].tables)) if plan.spans else ():
            for span in plan.spans:
                starts.append(len(tables))
                tables.extend(span.tables[group])
        inputs = cls(
            token_ids=_array(plan.token_ids),
            positions=_array(plan.positions),
            parents=_array(plan.parents),
            span_numbers=_array(spans),
            tables=_array(tables),
            table_starts=_array(starts),
            readout_rows=_array(plan.readout_rows),
            is_chain=not plan.has_drafts,
        )
        return inputs.with_previous(previous_tokens) if len(previous_tokens) else inputs

    @cached_property
    def spans(self) -> tuple[SpanInputs, ...]:
        numbers = self.span_numbers.reshape(-1, 3).tolist()
        tables = np.split(self.tables, self.table_starts[1:]) if len(self.table_starts) else []
        return tuple(
            SpanInputs(start, count, first_row, tuple(tables[index :: len(numbers)]))
            for index, (start, count, first_row) in enumerate(numbers)
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def with_previous(self, previous_tokens: Sequence[int] | Ints) -> BatchInputs:
        """Fill in the tokens in flight: id -1 - r is the token of the previous plan's readout r.

        Raises `IndexError` when an id refers to a readout that is not there.
        """
        pending = np.flatnonzero(self.token_ids < 0)
        if not len(pending):
            return self
        readouts = -1 - self.token_ids[pending]
        if readouts.max() >= len(previous_tokens):
            raise IndexError(
                f"the plan refers to readout {readouts.max()} of the previous plan, which had "
                f"{len(previous_tokens)}; pass the tokens of the plan launched before."
            )
        token_ids = self.token_ids.copy()
        token_ids[pending] = np.asarray(previous_tokens, np.int32)[readouts]
        return replace(self, token_ids=token_ids)


def _array(values: array[int]) -> Ints:
    """A copy: arrays of the plan go on changing."""
    return np.array(values, np.int32)
