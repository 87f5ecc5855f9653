"""Every architecture against an independent implementation: transformers in float32 (tests/data/tiny)."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headrace.backends.reference import ReferenceModel
from headrace.core.cache import CacheKind
from headrace.core.errors import ConfigurationError
from headrace.models.loaders.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from headrace.models.registry import HUGGINGFACE, describe, open_weights
from headrace.program.builder import Builder
from headrace.program.ops import Attend, Rope
from headrace.program.program import Program
from tests.model.harness import OneSequence, compute_together, in_chunks, load, make_store, prompt_logprobs
from tests.model.write_gguf import write_gguf

LIKE_LLAMA = (
    *("llama", "llama-bias", "llama-mha-tied", "llama-mqa-headdim", "mistral-window"),
    *("llama3-rope", "llama-linear-rope", "llama-yarn"),
)
TINY = (*LIKE_LLAMA, "qwen2", "qwen3", "gemma3", "mixtral", "mamba", "deepseek-v3")
AS_GGUF = [name for name in TINY if name not in ("mamba", "deepseek-v3")]
TOLERANCE = 1e-4
CLEAR_MARGIN = 0.01
"""Where the reference's two best tokens are further apart than this, the argmax must agree."""


def check_against_transformers(model: ReferenceModel, expected: dict, chunk: int) -> None:
    ids = expected["ids"]
    sequence = OneSequence(model)
    logprobs = in_chunks(sequence, ids, chunk)
    np.testing.assert_allclose(prompt_logprobs(logprobs, ids), expected["prompt_logprobs"], atol=TOLERANCE)
    best_two = np.sort(logprobs, axis=1)[:, -2:]
    clear = best_two[:, 1] - best_two[:, 0] > CLEAR_MARGIN
    assert (logprobs.argmax(axis=1) == expected["argmax"])[clear].all()
    row = logprobs[-1]
    for token, logprob, margin in expected["greedy"]["steps"]:
        assert row[token] == pytest.approx(logprob, abs=TOLERANCE)
        assert row.argmax() == token or margin <= CLEAR_MARGIN
        row = sequence.compute([token])[0]


@pytest.mark.parametrize("chunk", [7, 96])
@pytest.mark.parametrize("name", TINY)
def test_agrees_with_transformers(data_path: Path, name: str, chunk: int) -> None:
    folder = data_path / "tiny" / name
    check_against_transformers(load(folder), json.loads((folder / "expected.json").read_text()), chunk)


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma3", "mixtral", "mamba", "deepseek-v3"])
def test_sequences_of_one_step_do_not_touch_each_other(data_path: Path, name: str) -> None:
    """Three sequences in one store, in steps of odd chunks, one token here and twenty there."""
    folder = data_path / "tiny" / name
    model = load(folder)
    ids = json.loads((folder / "expected.json").read_text())["ids"]
    texts = [ids, ids[::-1], ids[20:] + ids[:20]]
    alone = [OneSequence(model).compute(text) for text in texts]
    store = make_store(model, 30)
    sequences = [OneSequence(model, store=store, blocks=range(i, 30, 3)) for i in range(3)]
    found: list[list[np.ndarray]] = [[], [], []]
    for chunks in [(20, 1, 0), (1, 30, 7), (40, 1, 1), (0, 1, 80), (35, 63, 8)]:
        active = [i for i in range(3) if chunks[i]]
        parts = [(s := sequences[i], texts[i][s.num_computed : s.num_computed + chunks[i]]) for i in active]
        for i, logprobs in zip(active, compute_together(parts), strict=True):
            found[i].append(logprobs)
    for pieces, wanted in zip(found, alone, strict=True):
        np.testing.assert_allclose(np.concatenate(pieces), wanted, atol=TOLERANCE)


@pytest.mark.parametrize("name", AS_GGUF)
def test_same_checkpoint_as_gguf(data_path: Path, tmp_path: Path, name: str) -> None:
    folder = data_path / "tiny" / name
    write_gguf(folder, tmp_path / "model.gguf")
    model = load(tmp_path / "model.gguf")
    check_against_transformers(model, json.loads((folder / "expected.json").read_text()), 96)


def program_of(config: dict) -> Program:
    page = HUGGINGFACE[config["model_type"]]
    return page.program(page.from_huggingface(config), Builder())


def older_style(config: dict) -> dict:
    """The config as transformers 4 wrote it."""
    config = copy.deepcopy(config)
    rope = config.pop("rope_parameters", None)
    if "dtype" in config:
        config["torch_dtype"] = config.pop("dtype")
    if rope and "full_attention" in rope:
        config["rope_theta"] = rope["full_attention"]["rope_theta"]
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        config["sliding_window_pattern"] = 3  # in place of layer_types
        del config["layer_types"], config["_sliding_window_pattern"]
    elif rope:
        config["rope_theta"] = rope.pop("rope_theta")
        kind = rope.pop("rope_type")
        config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    return config


@pytest.mark.parametrize("name", TINY)
def test_older_configs_mean_the_same(data_path: Path, name: str) -> None:
    config = json.loads((data_path / "tiny" / name / "config.json").read_text())
    assert program_of(older_style(config)) == program_of(config)


def test_description(data_path: Path) -> None:
    description = describe(open_checkpoint(data_path / "tiny" / "llama"))
    assert description.architecture == "llama"
    assert (description.context_length, description.vocab_size) == (128, 320)
    assert description.eos_token_ids == (2,)
    assert description.num_parameters == 152_000


def edited(checkpoint: Checkpoint, **changes: object) -> Checkpoint:
    return replace(checkpoint, **changes)


def test_unknown_architecture_lists_the_known_ones(data_path: Path) -> None:
    checkpoint = edited(open_checkpoint(data_path / "tiny" / "llama"), architecture="rwkv")
    with pytest.raises(ConfigurationError, match=r"'rwkv'.*supported here: .*llama.*qwen3"):
        describe(checkpoint)


def test_missing_tensor_is_named(data_path: Path) -> None:
    checkpoint = open_checkpoint(data_path / "tiny" / "llama")
    tensors = {k: v for k, v in checkpoint.tensors.items() if "layers.1.mlp.up" not in k}
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight.*\[128, 64\]"):
        open_weights(edited(checkpoint, tensors=tensors), describe(checkpoint).program)


def test_misshaped_tensor_is_named_with_both_shapes(data_path: Path) -> None:
    checkpoint = open_checkpoint(data_path / "tiny" / "llama")
    program = program_of({**checkpoint.config, "intermediate_size": 96})
    with pytest.raises(CheckpointError, match=r"gate_proj.weight.*\[128, 64\].*blk.0.ffn_gate.*\[96, 64\]"):
        open_weights(checkpoint, program)


def test_tensors_nobody_reads_are_reported(data_path: Path) -> None:
    checkpoint = open_checkpoint(data_path / "tiny" / "llama")
    some = next(iter(checkpoint.tensors.values()))
    tensors = {**checkpoint.tensors, "model.extra": some, "model.layers.0.self_attn.rotary_emb.inv_freq": some}
    weights = open_weights(edited(checkpoint, tensors=tensors), describe(checkpoint).program)
    assert weights.unused == ("model.extra",)


def test_stored_bytes_of_stacked_and_derived_weights_add_up(data_path: Path) -> None:
    checkpoint = open_checkpoint(data_path / "tiny" / "deepseek-v3")
    weights = open_weights(checkpoint, describe(checkpoint).program)
    assert sum(weights.num_bytes.values()) == checkpoint.num_bytes


def test_a_config_without_a_needed_key_names_it(data_path: Path) -> None:
    config = json.loads((data_path / "tiny" / "llama" / "config.json").read_text())
    del config["hidden_size"]
    with pytest.raises(ConfigurationError, match="hidden_size"):
        program_of(config)


def test_gemma_rounds_its_embedding_scale_as_the_embedding_is_stored(data_path: Path) -> None:
    """transformers multiplies by sqrt(hidden) in the embedding's type: 25.25 for 640 in bfloat16, not 25.298."""
    config = json.loads((data_path / "tiny" / "gemma3" / "config.json").read_text())
    page = HUGGINGFACE["gemma3_text"]
    stored_as = {**config, "hidden_size": 640, "dtype": "bfloat16"}
    assert page.from_huggingface(stored_as).embedding_scale == 25.25
    assert page.from_huggingface({**stored_as, "dtype": "float32"}).embedding_scale == pytest.approx(640**0.5)


def test_deepseek_scales_attention_by_yarns_temperature_squared(data_path: Path) -> None:
    """DeepSeek-V3's own rope settings: cosine and sine stay as they are, the softmax scale does not."""
    config = json.loads((data_path / "tiny" / "deepseek-v3" / "config.json").read_text())
    del config["rope_parameters"]
    config["rope_scaling"] = {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    program = program_of(config)
    (scale,) = {op.scale for op in program.ops if isinstance(op, Attend)}
    assert scale == pytest.approx(24**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert {op.rotation.attention_factor for op in program.ops if isinstance(op, Rope)} == {1.0}


def test_latent_attention_caches_one_latent_and_one_rope_key(data_path: Path) -> None:
    program = describe(open_checkpoint(data_path / "tiny" / "deepseek-v3")).program
    (spec,) = program.cache
    assert spec.kind is CacheKind.LATENT
    assert {entry.width for entry in spec.entries} == {32 + 8}


def test_qwen2_slides_only_when_told_to(data_path: Path) -> None:
    config = json.loads((data_path / "tiny" / "qwen2" / "config.json").read_text())
    del config["layer_types"]
    slides = {**config, "use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}
    page = HUGGINGFACE["qwen2"]
    assert page.from_huggingface(slides).windows == (0, 32, 32)
    assert page.from_huggingface({**slides, "use_sliding_window": False}).windows == (0, 0, 0)
