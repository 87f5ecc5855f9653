"""The verbs of a program. What an op means is in `backends/reference`, how it is done fast in the other
backends.

A buffer is [tokens, width] float32 before `SelectRows` and [rows, width] after it; ops name buffers by
index and weights by canonical name. Heads lie side by side in a row: [tokens, heads * head_dim]. Below, `n`
is the number of rows an op runs on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NewType

from headrace.program.cost import ACTIVATION_BYTES, Cost, StepShape
from headrace.program.rope import Rotation

Buffer = NewType("Buffer", int)
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "sigmoid", "softplus"]


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """A weight a program reads, shape in NumPy's order ([out, in] for a matrix)."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Op:
    """One op: reads some buffers, writes one. Subclasses state widths, weights and work per row."""

    inputs: tuple[Buffer, ...]
    output: Buffer

    @property
    def output_width(self) -> int:
        raise NotImplementedError

    @property
    def input_widths(self) -> tuple[int, ...]:
        raise NotImplementedError

    @property
    def weights(self) -> tuple[WeightSpec, ...]:
        return ()

    @property
    def flops_per_row(self) -> float:
        return self.output_width

    def cost(self, step: StepShape, weight_bytes: Mapping[str, int]) -> Cost:
        """Work on `step.num_tokens` rows; `weight_bytes` gives the stored size of each weight."""
        n = step.num_tokens
        weights = sum(weight_bytes[w.name] for w in self.weights) if n else 0
        return Cost(
            flops=n * self.flops_per_row,
            bytes_read=n * ACTIVATION_BYTES * sum(self.input_widths) + weights,
            bytes_written=n * ACTIVATION_BYTES * self.output_width,
        )


@dataclass(frozen=True, slots=True)
class Embed(Op):
    """Rows of `weight` [vocab, width] by token id: -> [n, width]."""

    weight: str
    vocab: int
    width: int

    @property
    def output_width(self) -> int:
        return self.width

    @property
    def input_widths(self) -> tuple[int, ...]:
        return ()

    @property
    def weights(self) -> tuple[WeightSpec, ...]:
        return (WeightSpec(self.weight, (self.vocab, self.width)),)

    def cost(self, step: StepShape, weight_bytes: Mapping[str, int]) -> Cost:
        n = step.num_tokens
        return Cost(0, n * weight_bytes[self.weight] / self.vocab, n * ACTIVATION_BYTES * self.width)


@dataclass(frozen=True, slots=True)
class RmsNorm(Op):
    """x / sqrt(mean(x^2) + eps) * (offset + weight), over each of `heads` equal parts of the row.

    [n, width] -> [n, width]; weight [width / heads], shared by the heads. Offset 1 is Gemma's convention in
    safetensors; its GGUF files store 1 + w. Source: Zhang and Sennrich 2019.
    """

    weight: str
    width: int
    eps: float
    heads: int = 1
    offset: float = 0.0

    @property
    def output_width(self) -> int:
        return self.width

    @property
    def input_widths(self) -> tuple[int, ...]:
        return (self.width,)

    @property
    def weights(self) -> tuple[WeightSpec, ...]:
        return (WeightSpec(self.weight, (self.width // self.heads,)),)

    @property
    def flops_per_row(self) -> float:
        return 4 * self.width


@dataclass(frozen=True, slots=True)
class LayerNorm(Op):
    """(x - mean) / sqrt(variance + eps) * weight + bias, over the row: [n, width] -> [n, width].

    Source: Ba, Kiros, Hinton 2016.
    """

    weight: str
    bias: str | None
    width: int
    eps: float

    @property
    def output_width(self) -> int:
        return self.width

    @property
    def input_widths(self) -> tuple[int, ...]:
        return (self.width,)

    @property
    def weights(self) -> tuple[WeightSpec, ...]:
        return tuple(WeightSpec(name, (self.width,)) for name in (self.weight, self.bias) if name is not None)

    @property
    def flops_per_row(self) -> float:
        return 7 * self.width


@dataclass(frozen=True, slots=True)
class Linear(Op):
    """x weight^T + bias: [n, in] -> [n, out]; weight [out, in], bias [out]."""

    weight: str
    bias: str | None
    in_features: int
    out_features: int

    @property
    def output_width(self) -> int:
        return self.out_features

    @property
    def input_widths(self) -> tuple[int, ...]:
        return (self.in_features,)

    @property
    def weights(self) -> tuple[WeightSpec, ...]:
        matrix = WeightSpec(self.weight, (self.out_features, self.in_features))
        return (matrix,) if self.bias is None else (matrix, WeightSpec(self.bias, (self.out_features,)))

    @property
    def flops_per_row(self) -> float:
        return 2 * self.in_features * self.out_features + (self.out_features if self.bias is not None else 0)


@dataclass(frozen=True, slots=True)
class HeadLinear(Op):
    """Each head through its own matrix: [n, heads * in] -> [n, heads * out]; weight [heads, out, in].

    Carries the products that latent attention absorbs (DeepSeek-V2, section 2.1.2).
    """

    weight: str
    heads: int
    in_features: int
    out_features: int

    @property
    def output_width(self) -> int:
        return self.heads * self.out_features

    @property
    def input_widths(self) -> tuple[int, ...]:
        return (self.heads * self.in_features,)

    @property
    def weights(self) -> tuple[WeightSpec, ...]:
        return (WeightSpec(self.weight, (self.heads, self.out_features, self.in_features)),)

    @property
    def flops_per_row(self) -> float:
        return 2 * self.heads * self.in_features * self.out_features


@dataclass(frozen=True, slots=True)
class Rope(Op):
    """Turns numbers [offset, offset + rotation.dims) of each head by the token's position; the others pass.

    [n, heads * head_dim] -> the same. See `Rotation` for pairs and angles.
    """

    heads: int
    head_dim: int
    rotation: Rotation
    offset: int = 0

    @property
    def output_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def input_widths(self) -> tuple[int, ...]:
        return (self.heads * self.head_dim,)

    @property
    def flops_per_row(self) -> float:
        return 3 * self.heads * self.rotation.dims


@dataclass(frozen=True, slots=True)
class Attend(Op):
    """Stores the step's keys and values in the cache, then softmax(scale q k^T) v over each token's context.

    Inputs q [n, heads * key_width], k [n, kv_heads * key_width], v [n, kv_heads * value_width];
    -> [n, heads * value_width]. Query head h reads key head h // (heads / kv_heads). Without v
    (`is_latent`) the values are the first `value_width` numbers of the keys. A token sees the cache before
    its span and its ancestors in the step, itself included; with a window only the last `window` positions.
    A softcap c turns a score s into c tanh(s / c) before the mask. Keys and values live in entry `entry` of
    cache group `group`.
    """

    group: int
    entry: int
    heads: int
    kv_heads: int
    key_width: int
    value_width: int
    scale: float
    window: int = 0
    softcap: float = 0.0

    @property
    def is_latent(self) -> bool:
        return len(self.inputs) == 2

    @property
    def output_width(self) -> int:
        return self.heads * self.value_width

    @property
    def input_widths(self) -> tuple[int, ...]:
        q, k, v = (
            self.heads * self.key_width,
            self.kv_heads * self.key_width,
            self.kv_heads * self.value_width,
        )
        return (q, k) if self.is_latent else (q, k, v)

    def cost(self, step: StepShape, weight_bytes: Mapping[str, int]) -> Cost:
        n = step.num_tokens
        pairs, keys = step.pairs[self.window], step.keys[self.window]
        cached = sum(self.input_widths[1:]) * step.cache_element_bytes  # bytes of one token in the cache
        return Cost(
            flops=2 * pairs * self.heads * (self.key_width + self.value_width),
            bytes_read=n * ACTIVATION_BYTES * sum(self.input_widths) + keys * cached,
            bytes_written=n * ACTIVATION_BYTES * self.output_width + n * cached,
        )


@dataclass(frozen=True, slots=True)
class Gate(Op):
    """activation(gate) * up, the inputs in this order: two [n, width] -> [n, width]. Source: Shazeer 2020."""

    kind: Activation
    width: int

    @property
    def output_width(self) -> int:
        return self.width

    @property
    def input_widths(self) -> tuple[int, ...]:
        return (self.width, self.width)

    @property
    def flops_per_row(self) -> float:
        return 5 * self.width


@dataclass(frozen=True, slots=True)
class Act(Op):
    """activation(x): [n, width] -> [n, width]. gelu_tanh is the tanh approximation (Hendrycks and Gimpel
    2016).
    """

    kind: Activation
    width: int

    @property
    def output_width(self) -> int:
        return self.width

    @property
    def input_widths(self) -> tuple[int, ...]:
        return (self.width,)

    @property
    def flops_per_row(self) -> float:
        return 4 * self.width


@dataclass(frozen=True, slots=True)
class Add(Op):
    """a + b: two [n, width] -> [n, width]."""

    width: int

    @property
    def output_width(self) -> int:
        return self.width

    @property
    def input_widths(self) -> tuple[int, ...]:
        return (self.width, self.width)


@dataclass(frozen=True, slots=True)
class Scale(Op):
    """factor * x: [n, width] -> [n, width]."""

    width: int
    factor: float

    @property
    def output_width(self) -> int:
        return self.width

    @property
    def input_widths(self) -> tuple[int, ...]:
        return (self.width,)


@dataclass(frozen=True, slots=True)
class Softcap(Op):
    """cap * tanh(x / cap): [n, width] -> [n, width]. Source: Gemma 2 report, section 2."""

    width: int
    cap: float

    @property
    def output_width(self) -> int:
        return self.width

    @property
    def input_widths(self) -> tuple[int, ...]:
        return (self.width,)

    @property
    def flops_per_row(self) -> float:
        return 4 * self.width


@dataclass(frozen=True, slots=True)
class Slice(Op):
    """Numbers [start, stop) of each head: [n, heads * head_width] -> [n, heads * (stop - start)]."""

    heads: int
    head_width: int
    start: int
    stop: int

    @property
    def output_width(self) -> int:
        return self.heads * (self.stop - self.start)

    @property
    def input_widths(self) -> tuple[int, ...]:
        return (self.heads * self.head_width,)

    @property
    def flops_per_row(self) -> float:
        return 0


@dataclass(frozen=True, slots=True)
class Concat(Op):
    """The inputs' heads end to end, head by head: [n, heads * w] for each w of `widths` -> [n, heads *
    sum(widths)].
    """

    heads: int
    widths: tuple[int, ...]

    @property
    def output_width(self) -> int:
        return self.heads * sum(self.widths)

    @property
    def input_widths(self) -> tuple[int, ...]:
        return tuple(self.heads * width for width in self.widths)

    @property
    def flops_per_row(self) -> float:
        return 0


@dataclass(frozen=True, slots=True)
class SelectRows(Op):
    """The rows that are read out: [tokens, width] -> [rows, width]. Every op before it runs on all tokens."""

    width: int

    @property
    def output_width(self) -> int:
        return self.width

    @property
    def input_widths(self) -> tuple[int, ...]:
        return (self.width,)

    @property
    def flops_per_row(self) -> float:
        return 0
