"""What a sequence reads at a row of the step."""

from __future__ import annotations

from headrace.backends.inputs import BatchInputs
from headrace.core.sequence import Sequence


def history_at(sequence: Sequence, inputs: BatchInputs, row: int) -> list[int]:
    """Its tokens up to the row's own, that one included.

    The scheduler may not know the last of them yet: a token in flight (depth 2), or drafts, which lie in a chain of
    rows. They are taken from the inputs.
    """
    count = int(inputs.positions[row]) + 1
    known = sequence.tokens[: count - 1]  # the row's own is read from the inputs in any case
    return [*known, *inputs.token_ids[row - (count - len(known)) + 1 : row + 1].tolist()]
