"""DeepSeek-V3: latent attention and a mixture with shared experts.

Attention is recorded in absorbed form: the cache keeps one latent and one rope key per token for all heads,
and the up-projections of keys and values act on queries and outputs. Source: DeepSeek-V3 report (2024),
section 2.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from headrace.models.architectures.blocks import (
    FEED_FORWARD_NAMES,
    OUTER_NAMES,
    experts,
    feed_forward,
)
from headrace.models.architectures.metadata import Metadata, huggingface_rope, huggingface_rotation
from headrace.models.sources import Derived, Source, latent_keys, latent_values
from headrace.program.builder import Builder, Layer
from headrace.program.ops import Activation, Buffer
from headrace.program.program import Program
from headrace.program.rope import Rotation, yarn_mscale

_ATTENTION = "model.layers.{i}.self_attn."
_MIXTURE = "model.layers.{i}.mlp."
HUGGINGFACE_NAMES: Mapping[str, Source] = {
    **OUTER_NAMES,
    **FEED_FORWARD_NAMES,
    "blk.{i}.attn_norm": "model.layers.{i}.input_layernorm.weight",
    "blk.{i}.attn_q": _ATTENTION + "q_proj.weight",
    "blk.{i}.attn_q_a": _ATTENTION + "q_a_proj.weight",
    "blk.{i}.attn_q_a_norm": _ATTENTION + "q_a_layernorm.weight",
    "blk.{i}.attn_q_b": _ATTENTION + "q_b_proj.weight",
    "blk.{i}.attn_kv_a_mqa": _ATTENTION + "kv_a_proj_with_mqa.weight",
    "blk.{i}.attn_kv_a_norm": _ATTENTION + "kv_a_layernorm.weight",
    "blk.{i}.attn_k_b": Derived(_ATTENTION + "kv_b_proj.weight", latent_keys),
    "blk.{i}.attn_v_b": Derived(_ATTENTION + "kv_b_proj.weight", latent_values),
    "blk.{i}.attn_output": _ATTENTION + "o_proj.weight",
    "blk.{i}.ffn_gate_inp": _MIXTURE + "gate.weight",
    "blk.{i}.exp_probs_b.bias": _MIXTURE + "gate.e_score_correction_bias",
    "blk.{i}.ffn_gate_exps": _MIXTURE + "experts.{e}.gate_proj.weight",
    "blk.{i}.ffn_up_exps": _MIXTURE + "experts.{e}.up_proj.weight",
    "blk.{i}.ffn_down_exps": _MIXTURE + "experts.{e}.down_proj.weight",
    "blk.{i}.ffn_gate_shexp": _MIXTURE + "shared_experts.gate_proj.weight",
    "blk.{i}.ffn_up_shexp": _MIXTURE + "shared_experts.up_proj.weight",
    "blk.{i}.ffn_down_shexp": _MIXTURE + "shared_experts.down_proj.weight",
}


@dataclass(frozen=True, slots=True)
class LatentAttention:
    heads: int
    query_rank: int
    """Width of the queries' latent; 0: queries are projected at once."""
    latent: int
    """Width of the cached latent of keys and values."""
    plain_dim: int
    """Numbers of a head that are not turned."""
    rope_dim: int
    value_dim: int
    scale: float
    norm_eps: float
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Mixture:
    num_experts: int
    top_k: int
    intermediate: int
    num_shared: int
    num_groups: int
    top_groups: int
    renormalize: bool
    scaling: float
    score: Literal["softmax", "sigmoid"] = "sigmoid"


@dataclass(frozen=True, slots=True)
class DeepseekV3Config:
    vocab_size: int
    context_length: int
    num_layers: int
    num_dense_layers: int
    """The first layers have a dense feed-forward."""
    hidden: int
    intermediate: int
    attention: LatentAttention
    mixture: Mixture
    rotation: Rotation
    norm_eps: float
    activation: Activation = "silu"
    is_tied: bool = False


def deepseek_v3(c: DeepseekV3Config, p: Builder) -> Program:
    x = p.embed("token_embd", c.vocab_size, c.hidden)
    for i in range(c.num_layers):
        w = p.layer(i)
        h = p.rms_norm(x, w["attn_norm"], c.norm_eps)
        x = p.add(x, latent_attention(p, h, w, c.attention, c.rotation))
        h = p.rms_norm(x, w["ffn_norm"], c.norm_eps)
        if i < c.num_dense_layers:
            x = p.add(x, feed_forward(p, h, w, c.intermediate, c.activation))
        else:
            x = p.add(x, mixture(p, h, w, c.mixture, c.activation))
    rows = p.rms_norm(p.select_rows(x), "output_norm", c.norm_eps)
    return p.finish(p.linear(rows, "token_embd" if c.is_tied else "output", c.vocab_size))


def latent_attention(p: Builder, h: Buffer, w: Layer, a: LatentAttention, rotation: Rotation) -> Buffer:
    """h [tokens, hidden] -> [tokens, hidden]; the key of a token is its (latent, rope key), for all heads."""
    hidden, head_dim = p.width(h), a.plain_dim + a.rope_dim
    if a.query_rank:
        q = p.linear(h, w["attn_q_a"], a.query_rank, bias=a.bias)
        q = p.linear(p.rms_norm(q, w["attn_q_a_norm"], a.norm_eps), w["attn_q_b"], a.heads * head_dim)
    else:
        q = p.linear(h, w["attn_q"], a.heads * head_dim)
    plain = p.head_linear(p.slice(q, 0, a.plain_dim, heads=a.heads), w["attn_k_b"], a.latent, heads=a.heads)
    turned = p.rope(p.slice(q, a.plain_dim, head_dim, heads=a.heads), rotation, heads=a.heads)
    q = p.concat((plain, turned), heads=a.heads)

    kv = p.linear(h, w["attn_kv_a_mqa"], a.latent + a.rope_dim, bias=a.bias)
    latent = p.rms_norm(p.slice(kv, 0, a.latent), w["attn_kv_a_norm"], a.norm_eps)
    rope_key = p.rope(p.slice(kv, a.latent, a.latent + a.rope_dim), rotation, heads=1)
    k = p.concat((latent, rope_key))

    out = p.attend(q, k, None, heads=a.heads, kv_heads=1, scale=a.scale, value_width=a.latent)
    values = p.head_linear(out, w["attn_v_b"], a.value_dim, heads=a.heads)
    return p.linear(values, w["attn_output"], hidden, bias=a.bias)


def mixture(p: Builder, h: Buffer, w: Layer, m: Mixture, kind: Activation) -> Buffer:
    """Routed experts, chosen by score + correction bias, and the shared ones every token goes through."""
    routing = p.route(
        h,
        w["ffn_gate_inp"],
        m.num_experts,
        m.top_k,
        score=m.score,
        bias=w["exp_probs_b.bias"],
        num_groups=m.num_groups,
        top_groups=m.top_groups,
        renormalize=m.renormalize,
        scaling=m.scaling,
    )
    routed = experts(p, h, w, routing, num_experts=m.num_experts, intermediate=m.intermediate, kind=kind)
    if not m.num_shared:
        return routed
    return p.add(routed, feed_forward(p, h, w, m.num_shared * m.intermediate, kind, suffix="_shexp"))


def from_huggingface(config: Mapping[str, Any]) -> DeepseekV3Config:
    c = Metadata(config)
    plain_dim, rope_dim = c.integer("qk_nope_head_dim"), c.integer("qk_rope_head_dim")
    norm_eps = c.number("rms_norm_eps", 1e-6)
    _, scaling = huggingface_rope(c)
    scale = (plain_dim + rope_dim) ** -0.5
    if scaling.kind != "none" and scaling.mscale_all_dim:
        scale *= yarn_mscale(scaling.factor, scaling.mscale_all_dim) ** 2
    return DeepseekV3Config(
        vocab_size=c.integer("vocab_size"),
        context_length=c.integer("max_position_embeddings"),
        num_layers=c.integer("num_hidden_layers"),
        num_dense_layers=c.integer("first_k_dense_replace", 0),
        hidden=c.integer("hidden_size"),
        intermediate=c.integer("intermediate_size"),
        attention=LatentAttention(
            heads=c.integer("num_attention_heads"),
            query_rank=c.integer("q_lora_rank", 0),
            latent=c.integer("kv_lora_rank"),
            plain_dim=plain_dim,
            rope_dim=rope_dim,
            value_dim=c.integer("v_head_dim"),
            scale=scale,
            norm_eps=1e-6,  # transformers leaves the latents' norms at their default
            bias=c.get("attention_bias", False),
        ),
        mixture=Mixture(
            num_experts=c.integer("n_routed_experts"),
            top_k=c.integer("num_experts_per_tok"),
            intermediate=c.integer("moe_intermediate_size"),
            num_shared=c.integer("n_shared_experts", 0),
            num_groups=c.integer("n_group", 1),
            top_groups=c.integer("topk_group", 1),
            renormalize=c.get("norm_topk_prob", True),
            scaling=c.number("routed_scaling_factor", 1.0),
        ),
        rotation=huggingface_rotation(c, rope_dim, style="interleaved" if c.get("rope_interleave", True) else "half"),
        norm_eps=norm_eps,
        activation=c.activation("hidden_act", "silu"),
        is_tied=c.get("tie_word_embeddings", False),
    )
