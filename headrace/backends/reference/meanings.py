"""Op type -> the function that is its meaning, and what such a function may look at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace.backends.inputs import BatchInputs
from headrace.backends.kv_store import KVStore
from headrace.program.ops import Op
from headrace.program.rope import Rotation

Floats = NDArray[np.float32]
Meaning = Callable[..., Floats]
"""(op, step, *inputs) -> output, each [rows, width] float32."""

MEANINGS: dict[type[Op], Meaning] = {}
F = TypeVar("F", bound=Meaning)


def meaning(op_type: type[Op]) -> Callable[[F], F]:
    """Register a function as the meaning of an op."""

    def register(function: F) -> F:
        MEANINGS[op_type] = function
        return function

    return register


class Step:
    """One run of a program: its inputs, the weights, the cache, and what the ops of the step share."""

    __slots__ = ("_angles", "inputs", "readout_rows", "shared", "store", "weights")

    def __init__(self, inputs: BatchInputs, weights: Mapping[str, Floats], store: KVStore) -> None:
        self.inputs = inputs
        self.weights = weights
        self.store = store
        self.readout_rows: NDArray[np.int32] = inputs.readout_rows
        """The rows the head runs on: a tile of the step's readouts."""
        self.shared: dict[Any, Any] = {}
        """What is the same for all layers, such as the blocks a span reads: computed by the first that
        asks.
        """
        self._angles: dict[Rotation, tuple[Floats, Floats]] = {}

    def cos_sin(self, rotation: Rotation) -> tuple[Floats, Floats]:
        """Cosine and sine [tokens, 1, pairs] of each token's turn, times the attention factor."""
        if rotation not in self._angles:
            angles = self.inputs.positions[:, None, None] * np.array(rotation.frequencies)  # float64
            self._angles[rotation] = (
                (np.cos(angles) * rotation.attention_factor).astype(np.float32),
                (np.sin(angles) * rotation.attention_factor).astype(np.float32),
            )
        return self._angles[rotation]
