"""The parts most decoders share: attention, a gated feed-forward, a mixture; and their Hugging Face names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.program.builder import Builder, Layer
from headrace.program.ops import Activation, Buffer
from headrace.program.rope import Rotation


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention: heads share keys and values in groups of heads / kv_heads."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    qkv_bias: bool = False
    output_bias: bool = False
    norm_eps: float | None = None
    """RMS norm of each head of q and k before rope; None: none."""
    norm_offset: float = 0.0
    softcap: float = 0.0


def attention(p: Builder, h: Buffer, w: Layer, a: Attention, rotation: Rotation, *, window: int = 0) -> Buffer:
    """h [tokens, hidden] -> [tokens, hidden]."""
    hidden = p.width(h)
    q = p.linear(h, w["attn_q"], a.heads * a.head_dim, bias=a.qkv_bias)
    k = p.linear(h, w["attn_k"], a.kv_heads * a.head_dim, bias=a.qkv_bias)
    v = p.linear(h, w["attn_v"], a.kv_heads * a.head_dim, bias=a.qkv_bias)
    if a.norm_eps is not None:
        q = p.rms_norm(q, w["attn_q_norm"], a.norm_eps, heads=a.heads, offset=a.norm_offset)
        k = p.rms_norm(k, w["attn_k_norm"], a.norm_eps, heads=a.kv_heads, offset=a.norm_offset)
    q = p.rope(q, rotation, heads=a.heads)
    k = p.rope(k, rotation, heads=a.kv_heads)
    out = p.attend(q, k, v, heads=a.heads, kv_heads=a.kv_heads, scale=a.scale, window=window, softcap=a.softcap)
    return p.linear(out, w["attn_output"], hidden, bias=a.output_bias)


def feed_forward(
    p: Builder,
    h: Buffer,
    w: Layer,
    intermediate: int,
    kind: Activation = "silu",
    *,
    bias: bool = False,
    suffix: str = "",
) -> Buffer:
    """down(activation(gate h) * up h): [tokens, hidden] -> [tokens, hidden]; `suffix` ends the weights'
    names.
    """
    gate = p.linear(h, w[f"ffn_gate{suffix}"], intermediate, bias=bias)
    up = p.linear(h, w[f"ffn_up{suffix}"], intermediate, bias=bias)
    return p.linear(p.gate(kind, gate, up), w[f"ffn_down{suffix}"], p.width(h), bias=bias)


def experts(
    p: Builder,
    h: Buffer,
    w: Layer,
    routing: Buffer,
    *,
    num_experts: int,
    intermediate: int,
    kind: Activation = "silu",
) -> Buffer:
    """The chosen experts of each token: [tokens, hidden] -> [tokens, hidden]."""
    return p.experts(
        h,
        routing,
        gate=w["ffn_gate_exps"],
        up=w["ffn_up_exps"],
        down=w["ffn_down_exps"],
        num_experts=num_experts,
        intermediate=intermediate,
        kind=kind,
    )


# Canonical name -> name in Hugging Face checkpoints. {i} is the layer, {e} an expert (the parts are stacked).
OUTER_NAMES: Mapping[str, str] = {
    "token_embd": "model.embed_tokens.weight",
    "output_norm": "model.norm.weight",
    "output": "lm_head.weight",
}
ATTENTION_NAMES: Mapping[str, str] = {
    "blk.{i}.attn_norm": "model.layers.{i}.input_layernorm.weight",
    "blk.{i}.attn_q": "model.layers.{i}.self_attn.q_proj.weight",
    "blk.{i}.attn_k": "model.layers.{i}.self_attn.k_proj.weight",
    "blk.{i}.attn_v": "model.layers.{i}.self_attn.v_proj.weight",
    "blk.{i}.attn_q_norm": "model.layers.{i}.self_attn.q_norm.weight",
    "blk.{i}.attn_k_norm": "model.layers.{i}.self_attn.k_norm.weight",
    "blk.{i}.attn_output": "model.layers.{i}.self_attn.o_proj.weight",
}
FEED_FORWARD_NAMES: Mapping[str, str] = {
    "blk.{i}.ffn_norm": "model.layers.{i}.post_attention_layernorm.weight",
    "blk.{i}.ffn_gate": "model.layers.{i}.mlp.gate_proj.weight",
    "blk.{i}.ffn_up": "model.layers.{i}.mlp.up_proj.weight",
    "blk.{i}.ffn_down": "model.layers.{i}.mlp.down_proj.weight",
}
