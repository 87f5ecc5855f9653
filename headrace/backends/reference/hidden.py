"""Hidden states as embeddings want them: what the head multiplies by its last matrix, without the product."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headrace.backends.reference import rowwise
from headrace.backends.reference.meanings import MEANINGS, Floats
from headrace.program.ops import Linear
from headrace.program.program import Program

_REGISTERS_MEANINGS = rowwise


class HiddenStates:
    """The head of a program up to its last product: the final norm, in all architectures there are."""

    def __init__(self, program: Program, load: Callable[[str], Floats]) -> None:
        """`load(name)`: the values of a weight, of which only the norm's are asked for."""
        self._selected = program.head[0]
        last = max(i for i, op in enumerate(program.head) if isinstance(op, Linear))
        self._ops = program.head[1:last]
        (self._read,) = program.head[last].inputs
        self.weights: Mapping[str, Floats] = {spec.name: load(spec.name) for op in self._ops for spec in op.weights}

    def of(self, rows: Floats) -> Floats:
        """Hidden states [rows, width] of rows of the trunk's last buffer. Never a view of `rows`."""
        buffers = {self._selected.output: rows.copy()}
        for op in self._ops:
            buffers[op.output] = MEANINGS[type(op)](op, self, *[buffers[i] for i in op.inputs])
        return buffers[self._read]
