"""The weights of a program, found in a checkpoint by their canonical names."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace.models.loaders.stored import CheckpointError, StoredTensor
from headrace.models.sources import Derived, Source
from headrace.program.ops import WeightSpec

HARMLESS = re.compile(
    r"rope_freqs\.weight"  # read into the program as rope factors
    r"|.*rotary_emb\.inv_freq"  # a buffer old checkpoints saved
    r"|lm_head\.weight"  # tied models that store their embedding twice
)
"""Tensors that no program reads and nobody misses."""


@dataclass(frozen=True, slots=True, eq=False)
class StackedTensor:
    """One tensor per expert, stacked along a new first axis."""

    name: str
    parts: tuple[StoredTensor, ...] = field(repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.parts), *self.parts[0].shape)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def dequantize(self) -> NDArray[np.float32]:
        return np.stack([part.dequantize() for part in self.parts])


@dataclass(frozen=True, slots=True, eq=False)
class DerivedTensor:
    """A weight that is worked out from a stored tensor when it is read."""

    spec: WeightSpec
    source: StoredTensor
    derivation: Derived

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @property
    def nbytes(self) -> int:
        """Its share of the stored tensor."""
        return self.source.nbytes * math.prod(self.shape) // max(1, math.prod(self.source.shape))

    def dequantize(self) -> NDArray[np.float32]:
        """Raises `CheckpointError` when the stored tensor does not give the shape the program wants."""
        try:
            value = self.derivation.transform(self.source.dequantize(), self.spec)
        except ValueError as error:
            raise _misshaped(self.name, self.source.shape, self.spec) from error
        if value.shape != self.shape:
            raise _misshaped(self.name, self.source.shape, self.spec)
        return value


WeightTensor = StoredTensor | StackedTensor | DerivedTensor


class Weights(Mapping[str, WeightTensor]):
    """Canonical name -> tensor, for every weight of a program. Nothing is read until a tensor is dequantized.

    `names` maps canonical names to those of the checkpoint; None: the checkpoint is a GGUF file, whose
    names are the canonical ones. Raises `CheckpointError` for a tensor that is missing or has another shape
    than the program wants.
    """

    def __init__(
        self,
        specs: Mapping[str, WeightSpec],
        tensors: Mapping[str, StoredTensor],
        names: Mapping[str, Source] | None = None,
    ) -> None:
        self._used: set[str] = set()
        self._tensors = tensors
        self._names = names
        self._weights = {name: self._find(spec) for name, spec in specs.items()}
        for name, weight in self._weights.items():
            if weight.shape != specs[name].shape:
                raise _misshaped(weight.name, weight.shape, specs[name])

    def __getitem__(self, name: str) -> WeightTensor:
        return self._weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    @property
    def num_bytes(self) -> dict[str, int]:
        """Stored size of each weight: what `Program.cost` wants."""
        return {name: weight.nbytes for name, weight in self._weights.items()}

    @property
    def unused(self) -> tuple[str, ...]:
        """Tensors of the checkpoint the program does not read, the known harmless ones left out."""
        return tuple(n for n in self._tensors if n not in self._used and not HARMLESS.fullmatch(n))

    def _find(self, spec: WeightSpec) -> WeightTensor:
        if self._names is None:
            # Biases and Mamba's ssm_a and ssm_d are stored under their bare names.
            is_bare = spec.name.endswith(".bias") or spec.name in self._tensors
            name = spec.name if is_bare else f"{spec.name}.weight"
            return self._stored(name, spec)
        source, layer = _source(spec.name, self._names)
        if isinstance(source, Derived):
            stored = self._stored(source.name.format(i=layer), spec)
            return DerivedTensor(spec, stored, source)
        if "{e}" in source:
            names = [source.format(i=layer, e=expert) for expert in range(spec.shape[0])]
            parts = tuple(self._stored(name, spec) for name in names)
            for part in parts:
                if part.shape != spec.shape[1:]:
                    raise _misshaped(part.name, part.shape, WeightSpec(spec.name, spec.shape[1:]))
            return StackedTensor(source.format(i=layer, e="*"), parts)
        return self._stored(source.format(i=layer), spec)

    def _stored(self, name: str, spec: WeightSpec) -> StoredTensor:
        if name not in self._tensors:
            raise CheckpointError(
                f"the checkpoint has no tensor {name!r} (the program's {spec.name}, shape {list(spec.shape)}); "
                "it may be incomplete, or its config is of another model."
            )
        self._used.add(name)
        return self._tensors[name]


def _source(name: str, names: Mapping[str, Source]) -> tuple[Source, str]:
    """Where a canonical name is found, and its layer; a bias lies beside its weight unless the table names
    it.
    """
    layer = ""
    pattern = name
    if match := re.match(r"blk\.(\d+)\.", name):
        layer = match[1]
        pattern = "blk.{i}." + name[match.end() :]
    if pattern in names:
        return names[pattern], layer
    weight = names.get(pattern.removesuffix(".bias"))
    if not pattern.endswith(".bias") or not isinstance(weight, str):
        raise CheckpointError(
            f"no Hugging Face name is known for the weight {name!r}; add it to the architecture's names."
        )
    return weight.removesuffix(".weight") + ".bias", layer


def _misshaped(name: str, found: tuple[int, ...], spec: WeightSpec) -> CheckpointError:
    return CheckpointError(
        f"tensor {name!r} has shape {list(found)}; the program's {spec.name} wants {list(spec.shape)}. "
        "The config does not belong to these weights."
    )
