"""Mamba: a selective state space where attention stood. Source: Gu and Dao 2023."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.models.architectures.metadata import Metadata
from headrace.models.sources import Derived, Source, negative_exp, reshaped
from headrace.program.builder import Builder
from headrace.program.ops import Activation
from headrace.program.program import Program

HUGGINGFACE_NAMES: Mapping[str, Source] = {
    "token_embd": "backbone.embeddings.weight",
    "output_norm": "backbone.norm_f.weight",
    "output": "lm_head.weight",
    "blk.{i}.attn_norm": "backbone.layers.{i}.norm.weight",
    "blk.{i}.ssm_in": "backbone.layers.{i}.mixer.in_proj.weight",
    "blk.{i}.ssm_conv1d": Derived("backbone.layers.{i}.mixer.conv1d.weight", reshaped),  # [width, 1, kernel]
    "blk.{i}.ssm_conv1d.bias": "backbone.layers.{i}.mixer.conv1d.bias",
    "blk.{i}.ssm_x": "backbone.layers.{i}.mixer.x_proj.weight",
    "blk.{i}.ssm_dt": "backbone.layers.{i}.mixer.dt_proj.weight",
    "blk.{i}.ssm_a": Derived("backbone.layers.{i}.mixer.A_log", negative_exp),
    "blk.{i}.ssm_d": "backbone.layers.{i}.mixer.D",
    "blk.{i}.ssm_out": "backbone.layers.{i}.mixer.out_proj.weight",
}
UNBOUNDED_CONTEXT = 1 << 20
"""The state does not grow; this bound is the one GGUF files of Mamba carry."""


@dataclass(frozen=True, slots=True)
class MambaConfig:
    vocab_size: int
    num_layers: int
    hidden: int
    inner: int
    state_size: int
    dt_rank: int
    kernel: int
    norm_eps: float
    activation: Activation = "silu"
    conv_bias: bool = True
    projection_bias: bool = False
    is_tied: bool = True
    context_length: int = UNBOUNDED_CONTEXT


def mamba(c: MambaConfig, p: Builder) -> Program:
    x = p.embed("token_embd", c.vocab_size, c.hidden)
    for i in range(c.num_layers):
        w = p.layer(i)
        h = p.rms_norm(x, w["attn_norm"], c.norm_eps)
        h = p.linear(h, w["ssm_in"], 2 * c.inner, bias=c.projection_bias)
        u, z = p.slice(h, 0, c.inner), p.slice(h, c.inner, 2 * c.inner)
        u = p.act(c.activation, p.conv(u, w["ssm_conv1d"], c.kernel, bias=c.conv_bias))
        selected = p.linear(u, w["ssm_x"], c.dt_rank + 2 * c.state_size)
        dt = p.linear(p.slice(selected, 0, c.dt_rank), w["ssm_dt"], c.inner, bias=True)
        b = p.slice(selected, c.dt_rank, c.dt_rank + c.state_size)
        s = p.slice(selected, c.dt_rank + c.state_size, c.dt_rank + 2 * c.state_size)
        y = p.ssm_scan(u, p.act("softplus", dt), b, s, a=w["ssm_a"], d=w["ssm_d"])
        y = p.gate(c.activation, z, y)
        x = p.add(x, p.linear(y, w["ssm_out"], c.hidden, bias=c.projection_bias))
    rows = p.rms_norm(p.select_rows(x), "output_norm", c.norm_eps)
    return p.finish(p.linear(rows, "token_embd" if c.is_tied else "output", c.vocab_size))


def from_huggingface(config: Mapping[str, Any]) -> MambaConfig:
    c = Metadata(config)
    hidden = c.integer("hidden_size")
    dt_rank = c.get("time_step_rank", "auto")
    return MambaConfig(
        vocab_size=c.integer("vocab_size"),
        num_layers=c.integer("num_hidden_layers"),
        hidden=hidden,
        inner=c.integer("intermediate_size", c.integer("expand", 2) * hidden),
        state_size=c.integer("state_size", 16),
        dt_rank=-(-hidden // 16) if dt_rank == "auto" else int(dt_rank),
        kernel=c.integer("conv_kernel", 4),
        norm_eps=c.number("layer_norm_epsilon", 1e-5),
        activation=c.activation("hidden_act", "silu"),
        conv_bias=c.get("use_conv_bias", True),
        projection_bias=c.get("use_bias", False),
        is_tied=c.get("tie_word_embeddings", True),
    )
