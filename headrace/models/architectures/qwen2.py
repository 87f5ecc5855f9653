"""Qwen 2 and 2.5: Llama with biases on q, k and v. Source: Yang et al. 2024."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headrace.models.architectures import llama
from headrace.models.architectures.llama import LlamaConfig, decoder_from_gguf
from headrace.models.architectures.metadata import Metadata, Tensors, huggingface_windows


def from_huggingface(config: Mapping[str, Any]) -> LlamaConfig:
    c = llama.from_huggingface(config)
    attention = replace(c.attention, qkv_bias=True, output_bias=False)
    return replace(c, attention=attention, windows=sliding_windows(Metadata(config), c.num_layers))


def sliding_windows(c: Metadata, num_layers: int) -> tuple[int, ...]:
    """Older configs slide in the layers from `max_window_layers` on, and only with `use_sliding_window`."""
    if not c.get("use_sliding_window", False):
        return (0,) * num_layers
    if c.get("layer_types", None) is not None:
        return huggingface_windows(c, num_layers)
    first = c.integer("max_window_layers", 0)
    return tuple(c.integer("sliding_window") if i >= first else 0 for i in range(num_layers))


def from_gguf(metadata: Mapping[str, Any], tensors: Tensors) -> LlamaConfig:
    return decoder_from_gguf(Metadata(metadata, "qwen2."), tensors, "half")
