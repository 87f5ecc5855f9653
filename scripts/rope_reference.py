"""Writes headrace/conformance/rope.json: the toy model's logprobs by transformers, in float32.

`python scripts/rope_reference.py`, in an environment that has torch and transformers 5; Headrace need not be installed
in it. Prints how far the logprobs would be off without each scaling, which is what the suite has to be able to see.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from headrace.conformance import toy_model as toy  # noqa: E402

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def model(rope: toy.Rope) -> LlamaForCausalLM:
    parameters: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.base}
    if rope.kind != "default":
        parameters["factor"] = rope.factor
    if rope.kind in ("yarn", "llama3"):
        parameters["original_max_position_embeddings"] = toy.ORIGINAL_LENGTH
    if rope.kind == "llama3":
        parameters |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    config = LlamaConfig(
        vocab_size=toy.VOCAB_SIZE,
        hidden_size=toy.WIDTH,
        intermediate_size=toy.HIDDEN,
        num_hidden_layers=toy.NUM_LAYERS,
        num_attention_heads=toy.NUM_HEADS,
        num_key_value_heads=toy.NUM_KV_HEADS,
        head_dim=toy.HEAD_DIM,
        rms_norm_eps=toy.NORM_EPS,
        max_position_embeddings=toy.CONTEXT_LENGTH,
        tie_word_embeddings=False,
        rope_parameters=parameters,
        attn_implementation="sdpa",
    )
    made = LlamaForCausalLM(config)
    state = {}
    for tensor in toy.tensors():
        values = torch.tensor(tensor.values, dtype=torch.float32).reshape(tensor.shape)
        *layer, name, kind = tensor.name.split(".")
        state[f"{f'model.layers.{layer[1]}.' if layer else ''}{NAMES[name]}.{kind}"] = values
    made.load_state_dict(state)
    return made.eval()


@torch.no_grad()
def top(rope: toy.Rope) -> dict[str, list[float]]:
    made, found = model(rope), {}
    for length in toy.POSITIONS:
        logits = made(torch.tensor([toy.token_ids(length)]), logits_to_keep=1).logits[0, -1].double()
        values = torch.log_softmax(logits, -1).topk(toy.NUM_TOP).values
        found[str(length)] = [round(float(value), 5) for value in values]
    return found


def distance(one: dict[str, list[float]], other: dict[str, list[float]]) -> list[float]:
    """Per length, the largest difference."""
    return [round(max(abs(a - b) for a, b in zip(one[at], other[at], strict=True)), 3) for at in one]


if __name__ == "__main__":
    right = {name: top(rope) for name, rope in toy.ROPES.items()}
    plain = top(toy.Rope())
    for name, values in right.items():
        print(f"{name}: {values}, without it off by {distance(values, plain)}")
    document = {
        "made_with": f"transformers {transformers.__version__}, torch {torch.__version__}, float32",
        "logprobs": right,
    }
    (ROOT / "headrace" / "conformance" / "rope.json").write_text(json.dumps(document, indent=1) + "\n", "utf-8")
