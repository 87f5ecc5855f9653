"""Qwen 3: Llama with an RMS norm on each head of q and k. Source: Yang et al. 2025."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headrace.models.architectures import llama
from headrace.models.architectures.llama import LlamaConfig, decoder_from_gguf
from headrace.models.architectures.metadata import Metadata, Tensors
from headrace.models.architectures.qwen2 import sliding_windows


def from_huggingface(config: Mapping[str, Any]) -> LlamaConfig:
    c = llama.from_huggingface(config)
    attention = replace(c.attention, norm_eps=c.norm_eps)
    return replace(c, attention=attention, windows=sliding_windows(Metadata(config), c.num_layers))


def from_gguf(metadata: Mapping[str, Any], tensors: Tensors) -> LlamaConfig:
    return decoder_from_gguf(Metadata(metadata, "qwen3."), tensors, "half")
