"""Rotary position embeddings as data: the frequencies a checkpoint's settings stand for.

Source: Su et al. 2021 (RoFormer); the scalings as transformers' `modeling_rope_utils` defines them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from headrace.core.errors import ConfigurationError

RopeStyle = Literal["half", "interleaved"]
ScalingKind = Literal["none", "linear", "llama3", "yarn", "longrope"]


@dataclass(frozen=True, slots=True)
class Rotation:
    """How the pairs of a head turn with the position.

    Pair j of a head turns by position * frequencies[j] radians; cosine and sine are then multiplied by
    `attention_factor`. With style "half" (NeoX) pair j is the numbers (j, j + n) of the n pairs, with
    "interleaved" it is (2j, 2j + 1).
    """

    frequencies: tuple[float, ...]
    attention_factor: float = 1.0
    style: RopeStyle = "half"

    @property
    def dims(self) -> int:
        return 2 * len(self.frequencies)

    def __str__(self) -> str:
        factor = "" if self.attention_factor == 1.0 else f" x {self.attention_factor:.4g}"
        return f"{self.style}({self.frequencies[0]:.4g} ... {self.frequencies[-1]:.4g}){factor}"


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How a checkpoint stretches its rotations beyond the context it was trained on."""

    kind: ScalingKind = "none"
    factor: float = 1.0
    original_context: int = 0
    """Tokens of the context before stretching: llama3, yarn and longrope."""
    attention_factor: float | None = None
    """Given outright, or None: as the kind defines it."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


def rotation(
    base: float,
    dims: int,
    scaling: RopeScaling | None = None,
    *,
    context_length: int = 0,
    style: RopeStyle = "half",
    factors: tuple[float, ...] = (),
) -> Rotation:
    """The rotation of `dims` numbers of a head with frequencies base^(-2j / dims), scaled.

    `factors` divide the frequencies one by one (the `rope_freqs` tensor of GGUF files). `context_length` is
    the longest context that will be served: it decides between longrope's short and long factors, once for
    all requests, so that a key never depends on how long its sequence grew.

    Raises `ConfigurationError` when the number of factors is not dims / 2.
    """
    plain = tuple(base ** (-2 * j / dims) for j in range(dims // 2))
    scaling = scaling or RopeScaling()
    attention_factor = 1.0
    match scaling.kind:
        case "none":
            frequencies = plain
        case "linear":
            frequencies = tuple(f / scaling.factor for f in plain)
        case "llama3":
            frequencies = tuple(_llama3(f, scaling) for f in plain)
        case "yarn":
            frequencies = _yarn(plain, base, dims, scaling)
            attention_factor = yarn_attention_factor(scaling)
        case "longrope":
            stretched = context_length > scaling.original_context
            factors = scaling.long_factors if stretched else scaling.short_factors
            frequencies = plain
            attention_factor = _longrope_attention_factor(scaling)
    if factors:
        if len(factors) != len(frequencies):
            raise ConfigurationError(
                f"{len(factors)} rope factors do not fit {len(frequencies)} pairs of numbers (rotary "
                f"dimension {dims}); the checkpoint's rope factors must have one number per pair."
            )
        frequencies = tuple(f / divisor for f, divisor in zip(frequencies, factors, strict=True))
    return Rotation(frequencies, attention_factor, style)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's temperature: 0.1 mscale ln(factor) + 1 (Peng et al. 2023, section 3.4)."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def yarn_attention_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return yarn_mscale(scaling.factor, scaling.mscale) / yarn_mscale(scaling.factor, scaling.mscale_all_dim)
    return yarn_mscale(scaling.factor)


def _longrope_attention_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.factor <= 1.0:
        return 1.0
    return math.sqrt(1.0 + math.log(scaling.factor) / math.log(scaling.original_context))


def _llama3(frequency: float, scaling: RopeScaling) -> float:
    """Long waves are stretched, short ones kept, those between blended."""
    waves = scaling.original_context * frequency / (2 * math.pi)  # turns over the original context
    if waves < scaling.low_freq_factor:
        return frequency / scaling.factor
    if waves > scaling.high_freq_factor:
        return frequency
    kept = (waves - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return (1 - kept) * frequency / scaling.factor + kept * frequency


def _yarn(plain: tuple[float, ...], base: float, dims: int, scaling: RopeScaling) -> tuple[float, ...]:
    """A ramp over the pair index from kept (many turns) to stretched (few turns)."""

    def pair_with_turns(turns: float) -> float:
        return dims * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_with_turns(scaling.beta_fast), pair_with_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    if low == high:
        high += 0.001
    stretched = (min(max((j - low) / (high - low), 0.0), 1.0) for j in range(len(plain)))
    return tuple(f / scaling.factor * s + f * (1 - s) for f, s in zip(plain, stretched, strict=True))
