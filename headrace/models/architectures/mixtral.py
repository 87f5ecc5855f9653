"""Mixtral: Llama with a mixture of experts for a feed-forward. Source: Jiang et al. 2024."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.models.architectures import llama
from headrace.models.architectures.blocks import ATTENTION_NAMES, OUTER_NAMES, attention, experts
from headrace.models.architectures.llama import LlamaConfig
from headrace.models.architectures.metadata import Metadata, Tensors
from headrace.program.builder import Builder
from headrace.program.program import Program

HUGGINGFACE_NAMES = {
    **OUTER_NAMES,
    **ATTENTION_NAMES,
    "blk.{i}.ffn_norm": "model.layers.{i}.post_attention_layernorm.weight",
    "blk.{i}.ffn_gate_inp": "model.layers.{i}.block_sparse_moe.gate.weight",
    "blk.{i}.ffn_gate_exps": "model.layers.{i}.block_sparse_moe.experts.{e}.w1.weight",
    "blk.{i}.ffn_down_exps": "model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight",
    "blk.{i}.ffn_up_exps": "model.layers.{i}.block_sparse_moe.experts.{e}.w3.weight",
}


@dataclass(frozen=True, slots=True)
class MixtralConfig:
    decoder: LlamaConfig
    """Everything but the experts; `intermediate` is an expert's."""
    num_experts: int
    top_k: int

    @property
    def context_length(self) -> int:
        return self.decoder.context_length


def mixtral(config: MixtralConfig, p: Builder) -> Program:
    c = config.decoder
    x = p.embed("token_embd", c.vocab_size, c.hidden)
    for i in range(c.num_layers):
        w = p.layer(i)
        h = p.rms_norm(x, w["attn_norm"], c.norm_eps)
        x = p.add(x, attention(p, h, w, c.attention, c.rotation, window=c.windows[i]))
        h = p.rms_norm(x, w["ffn_norm"], c.norm_eps)
        routing = p.route(h, w["ffn_gate_inp"], config.num_experts, config.top_k)
        x = p.add(
            x,
            experts(
                p,
                h,
                w,
                routing,
                num_experts=config.num_experts,
                intermediate=c.intermediate,
                kind=c.activation,
            ),
        )
    rows = p.rms_norm(p.select_rows(x), "output_norm", c.norm_eps)
    return p.finish(p.linear(rows, "token_embd" if c.is_tied else "output", c.vocab_size))


def from_huggingface(config: Mapping[str, Any]) -> MixtralConfig:
    c = Metadata(config)
    return MixtralConfig(
        llama.from_huggingface(config), c.integer("num_local_experts"), c.integer("num_experts_per_tok")
    )


def from_gguf(metadata: Mapping[str, Any], tensors: Tensors) -> MixtralConfig:
    """Mixtral files call themselves "llama" and have an expert count."""
    c = Metadata(metadata, "llama.")
    return MixtralConfig(llama.from_gguf(metadata, tensors), c.integer("expert_count"), c.integer("expert_used_count"))
