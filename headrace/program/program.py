"""A recorded model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from headrace.program.cache import CacheSpec
from headrace.program.cost import Cost, StepShape
from headrace.program.ops import Attend, Op, WeightSpec

SHOWN_BY_SHAPES = ("inputs", "output", "width", "vocab", "in_features", "out_features")


@dataclass(frozen=True, slots=True)
class Program:
    """A flat list of ops; the last one writes the logits [rows, vocab].

    The trunk runs on every token of a step, the head (from `SelectRows` on) on the rows that are read out.
    """

    ops: tuple[Op, ...]
    widths: tuple[int, ...]
    """Numbers per row of each buffer."""
    weights: Mapping[str, WeightSpec]
    cache: tuple[CacheSpec, ...]
    head_start: int
    """Index of the `SelectRows` op."""

    @property
    def trunk(self) -> tuple[Op, ...]:
        return self.ops[: self.head_start]

    @property
    def head(self) -> tuple[Op, ...]:
        return self.ops[self.head_start :]

    @property
    def vocab_size(self) -> int:
        return self.ops[-1].output_width

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(spec.shape) for spec in self.weights.values())

    def step_shape(self, spans: Iterable[tuple[int, int]], num_rows: int, cache_element_bytes: int = 4) -> StepShape:
        """The shape of a step of spans (first position, number of tokens), with the sums this program
        needs.
        """
        windows = {op.window for op in self.ops if isinstance(op, Attend)}
        return StepShape.of(spans, num_rows, windows, cache_element_bytes)

    def cost(self, step: StepShape, weight_bytes: Mapping[str, int]) -> Cost:
        """Work of one step. `weight_bytes` gives the stored size of each weight, a shared weight read each
        time.
        """
        total = Cost()
        for op in self.trunk:
            total += op.cost(step, weight_bytes)
        for op in self.head:
            total += op.cost(step.of_head(), weight_bytes)
        return total

    def weight_bytes(self, element_bytes: float = 4) -> dict[str, int]:
        """Sizes of the weights at `element_bytes` per number: for models that exist only as a config."""
        return {name: int(element_bytes * math.prod(spec.shape)) for name, spec in self.weights.items()}

    def __str__(self) -> str:
        lines = [f"{self.num_parameters:,} parameters, {_counts(self.ops)}"]
        lines += [f"cache {i}: {spec.name}, {len(spec.entries)} entries" for i, spec in enumerate(self.cache)]
        for i, op in enumerate(self.ops):
            rows = "tokens" if i < self.head_start else "rows"
            lines.append(f"%{op.output} = {_describe(op)} -> [{rows}, {op.output_width}]")
        return "\n".join(lines)


def verb(op: Op) -> str:
    """The op's name as the builder spells it: RmsNorm -> rms_norm."""
    name = type(op).__name__
    return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))


def _describe(op: Op) -> str:
    inputs = " ".join(f"%{i}" for i in op.inputs)
    weights = " ".join(f"{w.name}{list(w.shape)}" for w in op.weights)
    names = {w.name for w in op.weights}
    settings = " ".join(
        f"{f.name}={value}"
        for f in fields(op)
        if f.name not in SHOWN_BY_SHAPES
        and (value := getattr(op, f.name)) is not None
        and value != f.default
        and not (isinstance(value, str) and value in names)
    )
    return " ".join(part for part in (verb(op), inputs, weights, settings) if part)


def _counts(ops: Iterable[Op]) -> str:
    return ", ".join(f"{count} {name}" for name, count in Counter(verb(op) for op in ops).most_common())
