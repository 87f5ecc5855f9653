"""Where a weight of a program lies in a checkpoint: a name, or a name and what is made of it.

Names are templates: {i} stands for the layer, {e} for an expert, whose tensors are stacked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.program.ops import WeightSpec

Floats = NDArray[np.float32]
Transform = Callable[[Floats, WeightSpec], Floats]


@dataclass(frozen=True, slots=True)
class Derived:
    """The weight is `transform(tensor, spec of the weight)`."""

    name: str
    transform: Transform


Source = str | Derived


def reshaped(tensor: Floats, spec: WeightSpec) -> Floats:
    """The same numbers in the shape the program wants."""
    return tensor.reshape(spec.shape)


def negative_exp(tensor: Floats, spec: WeightSpec) -> Floats:
    """Mamba's A from its logarithm: A = -exp(A_log)."""
    return -np.exp(tensor)


def latent_keys(tensor: Floats, spec: WeightSpec) -> Floats:
    """The keys' part of kv_b [heads * (plain + value), latent] as [heads, latent, plain]: it acts on
    queries.
    """
    heads, latent, plain = spec.shape
    return np.ascontiguousarray(tensor.reshape(heads, -1, latent)[:, :plain].swapaxes(1, 2))


def latent_values(tensor: Floats, spec: WeightSpec) -> Floats:
    """The values' part of kv_b [heads * (plain + value), latent] as [heads, value, latent]."""
    heads, value, latent = spec.shape
    return np.ascontiguousarray(tensor.reshape(heads, -1, latent)[:, -value:])
