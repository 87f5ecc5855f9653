"""Runs a program, op by op."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from headrace.backends.inputs import BatchInputs
from headrace.backends.kv_store import KVStore
from headrace.backends.reference import attention, mixture, recurrent, rowwise
from headrace.backends.reference.hidden import HiddenStates
from headrace.backends.reference.meanings import MEANINGS, Floats, Meaning, Step
from headrace.program.ops import Buffer, Op
from headrace.program.passes import dying_buffers
from headrace.program.program import Program, verb

LOGIT_TILE_BYTES = 64 << 20
"""Logits of a prompt are made in tiles of rows of at most this size, never prompt x vocabulary at once."""
NUM_LOADING_THREADS = min(4, os.cpu_count() or 1)

_REGISTERS_MEANINGS = (attention, mixture, recurrent, rowwise)


class Dequantizable(Protocol):
    def dequantize(self) -> Floats: ...


class ReferenceModel:
    """A program with float32 weights. It limits BLAS to one thread, for the whole process.

    Matrix products are BLAS calls, whose sums depend on the number of rows: the reference is right to
    rounding, not to the bit. Raises `KeyError` for a weight that is missing and `ValueError` for one of
    another shape.
    """

    def __init__(self, program: Program, weights: Mapping[str, Floats]) -> None:
        for name, spec in program.weights.items():
            if weights[name].shape != spec.shape:
                raise ValueError(
                    f"weight {name} has shape {list(weights[name].shape)}; the program wants {list(spec.shape)}."
                )
        # BLAS threads wait for each other spinning: with one of two cores busy (a test run, another server), a
        # product on two threads was seen to take 5 to 20 times as long as on one.
        threadpool_limits(limits=1, user_api="blas")
        self.program = program
        self.weights = weights
        (selected,) = program.head[0].inputs
        self._selected = selected
        self._trunk_rows: Floats = np.empty((0, program.widths[selected]), np.float32)
        self._hidden = HiddenStates(program, weights.__getitem__)
        self._trunk = _compile(program.trunk, keep=frozenset({selected}))
        self._head = _compile(program.head, keep=frozenset({selected, program.ops[-1].output}))
        self._rows_per_tile = max(1, LOGIT_TILE_BYTES // (4 * program.vocab_size))

    @classmethod
    def load(
        cls,
        program: Program,
        weights: Mapping[str, Dequantizable],
        progress: Callable[[int, int, str], None] = lambda num_done, num_total, what: None,
    ) -> ReferenceModel:
        """Dequantize all weights, several at a time. `progress` counts bytes of float32."""
        names = list(program.weights)
        arrays: dict[str, Floats] = {}
        num_bytes, total_bytes = 0, sum(program.weight_bytes().values())
        with ThreadPoolExecutor(NUM_LOADING_THREADS) as pool:
            loaded = pool.map(lambda name: np.ascontiguousarray(weights[name].dequantize(), np.float32), names)
            for name, array in zip(names, loaded, strict=True):
                arrays[name] = array
                num_bytes += array.nbytes
                progress(num_bytes, total_bytes, "unpacking weights")
        return cls(program, arrays)

    def run(self, inputs: BatchInputs, store: KVStore) -> Iterator[tuple[slice, Floats]]:
        """Compute the step's tokens now; then (slice of readouts, logits [rows, vocab]) as they are asked
        for.

        Keys, values and states are in the store when this returns, whether or not logits are read.
        """
        step = Step(inputs, self.weights, store)
        buffers: list[Any] = [None] * len(self.program.widths)
        _execute(self._trunk, step, buffers)
        self._trunk_rows = buffers[self._selected]
        return self._logits(step, buffers)

    def hidden(self, first: int, count: int) -> Floats:
        """Hidden states [count, width] of rows of the last `run`: what the head multiplies by its matrix."""
        return self._hidden.of(self._trunk_rows[first : first + count])

    def _logits(self, step: Step, buffers: list[Any]) -> Iterator[tuple[slice, Floats]]:
        rows = step.inputs.readout_rows
        for begin in range(0, len(rows), self._rows_per_tile):
            tile = slice(begin, min(begin + self._rows_per_tile, len(rows)))
            step.readout_rows = rows[tile]
            _execute(self._head, step, buffers)
            yield tile, buffers[self.program.ops[-1].output]


_Compiled = list[tuple[Op, Meaning, tuple[Buffer, ...]]]


def _compile(ops: Sequence[Op], keep: frozenset[Buffer]) -> _Compiled:
    """Ops with their meanings and the buffers that may be dropped after each."""
    for op in ops:
        if type(op) not in MEANINGS:
            raise NotImplementedError(f"the reference backend has no meaning for {verb(op)}; register one.")
    return [(op, MEANINGS[type(op)], dying) for op, dying in zip(ops, dying_buffers(ops, keep), strict=True)]


def _execute(ops: _Compiled, step: Step, buffers: list[Any]) -> None:
    for op, mean, dying in ops:
        buffers[op.output] = mean(op, step, *[buffers[i] for i in op.inputs])
        for buffer in dying:
            buffers[buffer] = None
