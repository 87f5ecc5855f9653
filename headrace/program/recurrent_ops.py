"""Verbs that carry a state from token to token instead of a cache of keys.

A span reads its state from one block of the group and leaves it in another (see `core.plan.Span.tables`); no
block to read from is the zero state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.program.cost import ACTIVATION_BYTES, Cost, StepShape
from headrace.program.ops import Op, WeightSpec

STATE_BYTES = 4
"""States are float32 whatever the cache's format: their errors would add up from token to token."""


@dataclass(frozen=True, slots=True)
class RecurrentOp(Op):
    """An op whose state lives in entry `entry` of cache group `group`."""

    group: int
    entry: int

    @property
    def state_shape(self) -> tuple[int, ...]:
        raise NotImplementedError

    def cost(self, step: StepShape, weight_bytes: Mapping[str, int]) -> Cost:
        state = STATE_BYTES * step.num_sequences
        for size in self.state_shape:
            state *= size
        n = step.num_tokens
        weights = sum(weight_bytes[w.name] for w in self.weights) if n else 0
        return Cost(
            flops=n * self.flops_per_row,
            bytes_read=n * ACTIVATION_BYTES * sum(self.input_widths) + weights + state,
            bytes_written=n * ACTIVATION_BYTES * self.output_width + state,
        )


@dataclass(frozen=True, slots=True)
class Conv(RecurrentOp):
    """Causal convolution over the tokens, each channel by itself: [n, width] -> [n, width].

    y[t] = bias + sum over j of weight[:, j] x[t - kernel + 1 + j]; weight [width, kernel], bias [width].
    State [kernel - 1, width]: the last inputs, oldest first.
    """

    weight: str
    bias: str | None
    width: int
    kernel: int

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (self.kernel - 1, self.width)

    @property
    def output_width(self) -> int:
        return self.width

    @property
    def input_widths(self) -> tuple[int, ...]:
        return (self.width,)

    @property
    def weights(self) -> tuple[WeightSpec, ...]:
        weight = WeightSpec(self.weight, (self.width, self.kernel))
        return (weight,) if self.bias is None else (weight, WeightSpec(self.bias, (self.width,)))

    @property
    def flops_per_row(self) -> float:
        return 2 * self.width * self.kernel


@dataclass(frozen=True, slots=True)
class SsmScan(RecurrentOp):
    """Mamba's selective scan, token by token in order.

    Inputs x, dt [n, width], b, c [n, state_size] -> y [n, width]; weights a [width, state_size], d [width].
    h <- exp(dt a) h + dt b x for each channel, y = h c + d x. State h [width, state_size].
    `dt` comes after its softplus, `a` is negative. Source: Gu and Dao 2023, algorithm 2.
    """

    a: str
    d: str
    width: int
    state_size: int

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (self.width, self.state_size)

    @property
    def output_width(self) -> int:
        return self.width

    @property
    def input_widths(self) -> tuple[int, ...]:
        return (self.width, self.width, self.state_size, self.state_size)

    @property
    def weights(self) -> tuple[WeightSpec, ...]:
        return WeightSpec(self.a, (self.width, self.state_size)), WeightSpec(self.d, (self.width,))

    @property
    def flops_per_row(self) -> float:
        return 7 * self.width * self.state_size
