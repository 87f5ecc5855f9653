"""Reading configs: a Hugging Face config.json and the metadata of a GGUF file."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.core.errors import ConfigurationError
from headrace.program.ops import Activation
from headrace.program.rope import RopeScaling, RopeStyle, Rotation, rotation

MISSING = object()

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


class Tensor(Protocol):
    """What an architecture looks at in a checkpoint's tensors: shapes, and the small `rope_freqs`."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def dequantize(self) -> Any: ...


Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Metadata:
    """Typed look-ups with errors that name the key; `prefix` is put before each key ("llama." in GGUF
    files).
    """

    values: Mapping[str, Any]
    prefix: str = ""

    def get(self, key: str, default: Any = MISSING) -> Any:
        """The value, or `default` when the key is absent or null. Raises `ConfigurationError` without one."""
        value = self.values.get(self.prefix + key)
        if value is not None:
            return value
        if default is MISSING:
            raise ConfigurationError(
                f"the model's config has no {self.prefix + key!r}; it may be incomplete or of another architecture."
            )
        return default

    def integer(self, key: str, default: Any = MISSING) -> int:
        value = self.get(key, default)
        if isinstance(value, Sequence) and not isinstance(value, str) and len(set(value)) == 1:
            value = value[0]  # GGUF: the same number for every layer
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigurationError(
                f"the model's config has {self.prefix + key} = {value!r}; one whole number is supported."
            )
        return int(value)

    def number(self, key: str, default: Any = MISSING) -> float:
        return float(self.get(key, default))

    def activation(self, key: str, default: Any = MISSING) -> Activation:
        name = self.get(key, default)
        if name not in ACTIVATIONS:
            raise ConfigurationError(
                f"the model's config has {key} = {name!r}; known activations: {', '.join(ACTIVATIONS)}."
            )
        return ACTIVATIONS[name]


# Hugging Face


def huggingface_rotation(
    config: Metadata, dims: int, *, layer_type: str | None = None, style: RopeStyle = "half"
) -> Rotation:
    """The rotation a config.json describes.

    Reads the newer `rope_parameters` (one dict, or one per layer type) and the older `rope_theta` with
    `rope_scaling` (for Gemma 3: `rope_local_base_freq`, never scaled, in sliding layers).
    """
    base, scaling = huggingface_rope(config, layer_type=layer_type)
    return rotation(base, dims, scaling, context_length=config.get("max_position_embeddings", 0), style=style)


def huggingface_rope(config: Metadata, *, layer_type: str | None = None) -> tuple[float, RopeScaling]:
    """Base of the frequencies and their scaling."""
    parameters = config.get("rope_parameters", None)
    if parameters is not None:
        if layer_type is not None and layer_type in parameters:
            parameters = parameters[layer_type]
        return float(parameters.get("rope_theta", 10000.0)), _scaling(parameters, config)
    if layer_type == "sliding_attention" and (base := config.get("rope_local_base_freq", None)) is not None:
        return float(base), RopeScaling()
    return config.number("rope_theta", 10000.0), _scaling(config.get("rope_scaling", {}), config)


def _scaling(parameters: Mapping[str, Any], config: Metadata) -> RopeScaling:
    kind: Any = parameters.get("rope_type") or parameters.get("type") or "default"
    kind = {"default": "none", "su": "longrope"}.get(kind, kind)
    if kind not in ("none", "linear", "llama3", "yarn", "longrope"):
        raise ConfigurationError(f"rope scaling {kind!r} is not supported; supported: linear, llama3, yarn, longrope.")
    if kind == "none":
        return RopeScaling()
    context = int(config.get("max_position_embeddings", 0))
    original = int(
        parameters.get("original_max_position_embeddings") or config.get("original_max_position_embeddings", context)
    )
    factor = parameters.get("factor")
    if factor is None:
        factor = context / original if original else 1.0
    known = {
        name: parameters[name]
        for name in (
            "attention_factor",
            "low_freq_factor",
            "high_freq_factor",
            "beta_fast",
            "beta_slow",
            "truncate",
            "mscale",
            "mscale_all_dim",
        )
        if parameters.get(name) is not None
    }
    return RopeScaling(
        kind,
        float(factor),
        original,
        short_factors=tuple(parameters.get("short_factor", ())),
        long_factors=tuple(parameters.get("long_factor", ())),
        **known,
    )


def huggingface_windows(config: Metadata, num_layers: int, *, period: int = 0) -> tuple[int, ...]:
    """The window of each layer, 0 for full attention, by `layer_types`.

    Without them, by `period`: every period-th layer is full and the others are sliding; period 0 means that
    all layers slide when there is a `sliding_window`.
    """
    window = config.get("sliding_window", 0)
    types = config.get("layer_types", None)
    if types is not None:
        if len(types) != num_layers:
            raise ConfigurationError(f"layer_types names {len(types)} layers; the model has {num_layers}.")
        return tuple(window if name == "sliding_attention" else 0 for name in types)
    return tuple(0 if period and (i + 1) % period == 0 else window for i in range(num_layers))


# GGUF


def gguf_rotation(
    metadata: Metadata,
    tensors: Tensors,
    dims: int,
    *,
    style: RopeStyle,
    base_key: str = "rope.freq_base",
    default_base: float = 10000.0,
    is_scaled: bool = True,
) -> Rotation:
    """The rotation a GGUF file describes; llama3's scaling comes as the tensor `rope_freqs.weight`."""
    scaling = RopeScaling()
    factors: tuple[float, ...] = ()
    if is_scaled:
        scaling = _gguf_scaling(metadata)
        if "rope_freqs.weight" in tensors:
            factors = tuple(float(f) for f in tensors["rope_freqs.weight"].dequantize())
    base = metadata.number(base_key, default_base)
    return rotation(base, metadata.integer("rope.dimension_count", dims), scaling, style=style, factors=factors)


def _gguf_scaling(metadata: Metadata) -> RopeScaling:
    kind = metadata.get("rope.scaling.type", "none")
    factor = metadata.number("rope.scaling.factor", metadata.number("rope.scale_linear", 1.0))
    if kind == "none" and factor != 1.0:
        kind = "linear"  # files older than `rope.scaling.type`
    if kind not in ("none", "linear", "yarn"):
        raise ConfigurationError(f"rope scaling {kind!r} is not supported in GGUF files; supported: linear, yarn.")
    return RopeScaling(
        kind,
        factor,
        metadata.integer("rope.scaling.original_context_length", metadata.integer("context_length")),
        beta_fast=metadata.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=metadata.number("rope.scaling.yarn_beta_slow", 1.0),
    )


def round_to(dtype: str, value: float) -> float:
    """`value` as a number of that type holds it: "bfloat16", "float16" or "float32"."""
    if dtype == "bfloat16":
        bits = int.from_bytes(struct.pack("<f", value), "little")
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000  # to nearest, ties to even
        return float(struct.unpack("<f", bits.to_bytes(4, "little"))[0])
    return float(struct.unpack("<e", struct.pack("<e", value))[0] if dtype == "float16" else value)
