"""Verbs of mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from headrace.program.cost import ACTIVATION_BYTES, Cost, StepShape
from headrace.program.ops import Activation, Op, WeightSpec


@dataclass(frozen=True, slots=True)
class Route(Op):
    """Chooses the experts of each token: logits [n, experts] -> [n, 2 * top_k].

    The output's first `top_k` numbers are the chosen experts' ids (small integers, exact in float32), by
    falling score and by id where scores are equal; the others are their weights.

    Scores are the softmax or the sigmoid of the logits. The choice is by score + `bias` [experts] where
    there is one; the weights are the scores without it. With groups, the experts are `num_groups` equal
    ranges, a group scores the sum of its two best choices, and only the best `top_groups` groups are chosen
    from. `renormalize` divides the weights by their sum; then they are multiplied by `scaling`. Sources:
    Mixtral (Jiang et al. 2024), DeepSeek-V3 (2024), section 2.1.2.
    """

    num_experts: int
    top_k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    bias: str | None = None
    num_groups: int = 1
    top_groups: int = 1
    renormalize: bool = True
    scaling: float = 1.0

    @property
    def output_width(self) -> int:
        return 2 * self.top_k

    @property
    def input_widths(self) -> tuple[int, ...]:
        return (self.num_experts,)

    @property
    def weights(self) -> tuple[WeightSpec, ...]:
        return () if self.bias is None else (WeightSpec(self.bias, (self.num_experts,)),)

    @property
    def flops_per_row(self) -> float:
        return 4 * self.num_experts


@dataclass(frozen=True, slots=True)
class Experts(Op):
    """Each token through its chosen experts: x [n, hidden], routing [n, 2 * top_k] -> [n, hidden].

    Expert e is down[e] (activation(gate[e] x) * up[e] x); gate and up [experts, intermediate, hidden],
    down [experts, hidden, intermediate]. No token is dropped, and a token's outputs are weighted and added in
    the order of its routing.
    """

    gate: str
    up: str
    down: str
    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    kind: Activation = "silu"

    @property
    def output_width(self) -> int:
        return self.hidden

    @property
    def input_widths(self) -> tuple[int, ...]:
        return (self.hidden, 2 * self.top_k)

    @property
    def weights(self) -> tuple[WeightSpec, ...]:
        wide = (self.num_experts, self.intermediate, self.hidden)
        narrow = (self.num_experts, self.hidden, self.intermediate)
        return WeightSpec(self.gate, wide), WeightSpec(self.up, wide), WeightSpec(self.down, narrow)

    @property
    def flops_per_row(self) -> float:
        return self.top_k * (6 * self.hidden * self.intermediate + 5 * self.intermediate + 2 * self.hidden)

    def cost(self, step: StepShape, weight_bytes: Mapping[str, int]) -> Cost:
        n = step.num_tokens
        # Experts touched when each token draws top_k of them evenly.
        touched = 1.0 - (1.0 - self.top_k / self.num_experts) ** n
        weights = touched * sum(weight_bytes[w.name] for w in self.weights)
        return Cost(
            flops=n * self.flops_per_row,
            bytes_read=n * ACTIVATION_BYTES * sum(self.input_widths) + weights,
            bytes_written=n * ACTIVATION_BYTES * self.output_width,
        )
