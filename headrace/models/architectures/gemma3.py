"""Gemma 3 (text): sliding and full layers with their own rope bases, norms before and after each block.

Source: Gemma 3 technical report, 2025.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.models.architectures.blocks import (
    ATTENTION_NAMES,
    FEED_FORWARD_NAMES,
    OUTER_NAMES,
    Attention,
    attention,
    feed_forward,
)
from headrace.models.architectures.metadata import (
    Metadata,
    Tensors,
    gguf_rotation,
    huggingface_rotation,
    huggingface_windows,
    round_to,
)
from headrace.program.builder import Builder
from headrace.program.ops import Activation
from headrace.program.program import Program
from headrace.program.rope import Rotation

HUGGINGFACE_NAMES = {
    **OUTER_NAMES,
    **ATTENTION_NAMES,
    **FEED_FORWARD_NAMES,
    "blk.{i}.post_attention_norm": "model.layers.{i}.post_attention_layernorm.weight",
    "blk.{i}.ffn_norm": "model.layers.{i}.pre_feedforward_layernorm.weight",
    "blk.{i}.post_ffw_norm": "model.layers.{i}.post_feedforward_layernorm.weight",
}
PERIOD = 6
"""Every sixth layer is full unless the file says otherwise."""


@dataclass(frozen=True, slots=True)
class Gemma3Config:
    vocab_size: int
    context_length: int
    num_layers: int
    hidden: int
    intermediate: int
    attention: Attention
    full_rotation: Rotation
    sliding_rotation: Rotation
    windows: tuple[int, ...]
    norm_eps: float
    norm_offset: float
    """1 where the file stores w of 1 + w (safetensors), 0 where it stores 1 + w (GGUF)."""
    embedding_scale: float
    activation: Activation = "gelu_tanh"
    final_softcap: float = 0.0
    is_tied: bool = True


def gemma3(c: Gemma3Config, p: Builder) -> Program:
    x = p.scale(p.embed("token_embd", c.vocab_size, c.hidden), c.embedding_scale)
    for i, window in enumerate(c.windows):
        w = p.layer(i)
        rotation = c.sliding_rotation if window else c.full_rotation
        h = p.rms_norm(x, w["attn_norm"], c.norm_eps, offset=c.norm_offset)
        h = attention(p, h, w, c.attention, rotation, window=window)
        x = p.add(x, p.rms_norm(h, w["post_attention_norm"], c.norm_eps, offset=c.norm_offset))
        h = p.rms_norm(x, w["ffn_norm"], c.norm_eps, offset=c.norm_offset)
        h = feed_forward(p, h, w, c.intermediate, c.activation)
        x = p.add(x, p.rms_norm(h, w["post_ffw_norm"], c.norm_eps, offset=c.norm_offset))
    rows = p.rms_norm(p.select_rows(x), "output_norm", c.norm_eps, offset=c.norm_offset)
    logits = p.linear(rows, "token_embd" if c.is_tied else "output", c.vocab_size)
    return p.finish(p.softcap(logits, c.final_softcap) if c.final_softcap else logits)


def from_huggingface(config: Mapping[str, Any]) -> Gemma3Config:
    c = Metadata(config)
    num_layers, hidden, heads = (c.integer(key) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    head_dim = c.integer("head_dim", 256)
    norm_eps = c.number("rms_norm_eps", 1e-6)
    period = c.integer("_sliding_window_pattern", c.integer("sliding_window_pattern", PERIOD))
    # transformers multiplies by sqrt(hidden) as the embedding's type holds it, and so the model was trained.
    dtype = c.get("dtype", c.get("torch_dtype", "float32"))
    return Gemma3Config(
        vocab_size=c.integer("vocab_size", 262208),
        context_length=c.integer("max_position_embeddings", 131072),
        num_layers=num_layers,
        hidden=hidden,
        intermediate=c.integer("intermediate_size"),
        attention=Attention(
            heads,
            c.integer("num_key_value_heads", heads),
            head_dim,
            c.number("query_pre_attn_scalar", 256) ** -0.5,
            norm_eps=norm_eps,
            norm_offset=1.0,
            softcap=c.number("attn_logit_softcapping", 0.0),
        ),
        full_rotation=huggingface_rotation(c, head_dim, layer_type="full_attention"),
        sliding_rotation=huggingface_rotation(c, head_dim, layer_type="sliding_attention"),
        windows=huggingface_windows(c, num_layers, period=period),
        norm_eps=norm_eps,
        norm_offset=1.0,
        embedding_scale=round_to(dtype, math.sqrt(hidden)),
        activation=c.activation("hidden_activation", "gelu_pytorch_tanh"),
        final_softcap=c.number("final_logit_softcapping", 0.0),
        is_tied=c.get("tie_word_embeddings", True),
    )


def from_gguf(metadata: Mapping[str, Any], tensors: Tensors) -> Gemma3Config:
    c = Metadata(metadata, "gemma3.")
    num_layers, hidden, heads = (c.integer(key) for key in ("block_count", "embedding_length", "attention.head_count"))
    head_dim = c.integer("attention.key_length", 256)
    norm_eps = c.number("attention.layer_norm_rms_epsilon")
    # The 27B model alone scales by the width its heads would have had; files do not say so (llama.cpp).
    query_width = hidden // heads if num_layers == 62 else head_dim
    return Gemma3Config(
        vocab_size=tensors["token_embd.weight"].shape[0],
        context_length=c.integer("context_length"),
        num_layers=num_layers,
        hidden=hidden,
        intermediate=c.integer("feed_forward_length"),
        attention=Attention(
            heads, c.integer("attention.head_count_kv", heads), head_dim, query_width**-0.5, norm_eps=norm_eps
        ),
        full_rotation=gguf_rotation(c, tensors, head_dim, style="half", default_base=1e6),
        sliding_rotation=gguf_rotation(
            c, tensors, head_dim, style="half", base_key="rope.freq_base_swa", is_scaled=False
        ),
        windows=_gguf_windows(c, num_layers),
        norm_eps=norm_eps,
        norm_offset=0.0,
        embedding_scale=math.sqrt(hidden),
        final_softcap=c.number("final_logit_softcapping", 0.0),
        is_tied="output.weight" not in tensors,
    )


def _gguf_windows(c: Metadata, num_layers: int) -> tuple[int, ...]:
    """`sliding_window_pattern` is a period, or says of each layer whether it slides."""
    window = c.integer("attention.sliding_window")
    pattern = c.get("attention.sliding_window_pattern", PERIOD)
    if isinstance(pattern, Sequence):
        return tuple(window if slides else 0 for slides in pattern)
    return tuple(0 if (i + 1) % pattern == 0 else window for i in range(num_layers))
