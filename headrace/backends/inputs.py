"""A step as arrays: what a backend is handed."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

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


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """Per row (token of the step): `token_ids`, `positions`, `parents`. Per readout: `readout_rows`."""

    token_ids: Ints
    positions: Ints
    parents: Ints
    spans: tuple[SpanInputs, ...]
    readout_rows: Ints

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @classmethod
    def from_plan(cls, plan: StepPlan, previous_tokens: Sequence[int] | Ints = ()) -> BatchInputs:
        """Copies everything a step needs, so that the plan and its live tables may change afterwards.

        `previous_tokens`: see `with_previous`; not needed when no token is in flight.
        """
        inputs = cls(
            token_ids=_array(plan.token_ids),
            positions=_array(plan.positions),
            parents=_array(plan.parents),
            spans=tuple(
                SpanInputs(s.start, s.count, s.first_row, tuple(_array(t) for t in s.tables)) for s in plan.spans
            ),
            readout_rows=_array(plan.readout_rows),
        )
        return inputs.with_previous(previous_tokens) if len(previous_tokens) else inputs

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
