"""Llama and what shares its layout: SmolLM2, Mistral with its sliding window.

Sources: Touvron et al. 2023; Jiang et al. 2023 (Mistral).
"""

from __future__ import annotations

from collections.abc import Mapping
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
)
from headrace.program.builder import Builder
from headrace.program.ops import Activation
from headrace.program.program import Program
from headrace.program.rope import RopeStyle, Rotation

HUGGINGFACE_NAMES = {**OUTER_NAMES, **ATTENTION_NAMES, **FEED_FORWARD_NAMES}


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    vocab_size: int
    context_length: int
    num_layers: int
    hidden: int
    intermediate: int
    attention: Attention
    rotation: Rotation
    windows: tuple[int, ...]
    """Per layer, 0 for full attention."""
    norm_eps: float
    activation: Activation = "silu"
    feed_forward_bias: bool = False
    is_tied: bool = False
    """The output matrix is the embedding."""


def llama(c: LlamaConfig, p: Builder) -> Program:
    x = p.embed("token_embd", c.vocab_size, c.hidden)
    for i in range(c.num_layers):
        w = p.layer(i)
        h = p.rms_norm(x, w["attn_norm"], c.norm_eps)
        x = p.add(x, attention(p, h, w, c.attention, c.rotation, window=c.windows[i]))
        h = p.rms_norm(x, w["ffn_norm"], c.norm_eps)
        x = p.add(x, feed_forward(p, h, w, c.intermediate, c.activation, bias=c.feed_forward_bias))
    rows = p.rms_norm(p.select_rows(x), "output_norm", c.norm_eps)
    return p.finish(p.linear(rows, "token_embd" if c.is_tied else "output", c.vocab_size))


def from_huggingface(config: Mapping[str, Any]) -> LlamaConfig:
    c = Metadata(config)
    num_layers, hidden, heads = (c.integer(key) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    head_dim = c.integer("head_dim", hidden // heads)
    bias = c.get("attention_bias", False)
    return LlamaConfig(
        vocab_size=c.integer("vocab_size"),
        context_length=c.integer("max_position_embeddings"),
        num_layers=num_layers,
        hidden=hidden,
        intermediate=c.integer("intermediate_size"),
        attention=Attention(
            heads,
            c.integer("num_key_value_heads", heads),
            head_dim,
            head_dim**-0.5,
            qkv_bias=bias,
            output_bias=bias,
        ),
        rotation=huggingface_rotation(c, head_dim),
        windows=huggingface_windows(c, num_layers),
        norm_eps=c.number("rms_norm_eps", 1e-6),
        activation=c.activation("hidden_act", "silu"),
        feed_forward_bias=c.get("mlp_bias", False),
        is_tied=c.get("tie_word_embeddings", False),
    )


def from_gguf(metadata: Mapping[str, Any], tensors: Tensors) -> LlamaConfig:
    """Files of architecture "llama" hold q and k with rows reordered so that pairs lie side by side."""
    return decoder_from_gguf(Metadata(metadata, "llama."), tensors, "interleaved")


def decoder_from_gguf(c: Metadata, tensors: Tensors, style: RopeStyle) -> LlamaConfig:
    """A decoder of Llama's layout; biases, head norms and a separate output exist if their tensors do."""
    num_layers, hidden, heads = (c.integer(key) for key in ("block_count", "embedding_length", "attention.head_count"))
    head_dim = c.integer("attention.key_length", hidden // heads)
    norm_eps = c.number("attention.layer_norm_rms_epsilon")
    return LlamaConfig(
        vocab_size=tensors["token_embd.weight"].shape[0],
        context_length=c.integer("context_length"),
        num_layers=num_layers,
        hidden=hidden,
        intermediate=c.integer("feed_forward_length"),
        attention=Attention(
            heads,
            c.integer("attention.head_count_kv", heads),
            head_dim,
            head_dim**-0.5,
            qkv_bias="blk.0.attn_q.bias" in tensors,
            output_bias="blk.0.attn_output.bias" in tensors,
            norm_eps=norm_eps if "blk.0.attn_q_norm.weight" in tensors else None,
        ),
        rotation=gguf_rotation(c, tensors, head_dim, style=style),
        windows=(c.integer("attention.sliding_window", 0),) * num_layers,
        norm_eps=norm_eps,
        feed_forward_bias="blk.0.ffn_up.bias" in tensors,
        is_tied="output.weight" not in tensors,
    )
