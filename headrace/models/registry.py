"""From a checkpoint to the program it stands for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.core.errors import ConfigurationError
from headrace.models.architectures import deepseek_v3, gemma3, llama, mamba, mixtral, qwen2, qwen3
from headrace.models.loaders.checkpoint import Checkpoint
from headrace.models.sources import Source
from headrace.models.weights import Weights
from headrace.program.builder import Builder
from headrace.program.program import Program


@dataclass(frozen=True, slots=True)
class Page:
    """An architecture: its program, and how each kind of checkpoint spells its config and weights."""

    program: Callable[[Any, Builder], Program]
    from_huggingface: Callable[[Mapping[str, Any]], Any]
    huggingface_names: Mapping[str, Source]
    from_gguf: Callable[[Mapping[str, Any], Any], Any] | None = None


LLAMA = Page(llama.llama, llama.from_huggingface, llama.HUGGINGFACE_NAMES, llama.from_gguf)
QWEN2 = Page(llama.llama, qwen2.from_huggingface, llama.HUGGINGFACE_NAMES, qwen2.from_gguf)
QWEN3 = Page(llama.llama, qwen3.from_huggingface, llama.HUGGINGFACE_NAMES, qwen3.from_gguf)
GEMMA3 = Page(gemma3.gemma3, gemma3.from_huggingface, gemma3.HUGGINGFACE_NAMES, gemma3.from_gguf)
MIXTRAL = Page(mixtral.mixtral, mixtral.from_huggingface, mixtral.HUGGINGFACE_NAMES, mixtral.from_gguf)
MAMBA = Page(mamba.mamba, mamba.from_huggingface, mamba.HUGGINGFACE_NAMES)
DEEPSEEK_V3 = Page(deepseek_v3.deepseek_v3, deepseek_v3.from_huggingface, deepseek_v3.HUGGINGFACE_NAMES)

HUGGINGFACE: Mapping[str, Page] = {
    "deepseek_v3": DEEPSEEK_V3,
    "gemma3_text": GEMMA3,
    "llama": LLAMA,
    "mamba": MAMBA,
    "mistral": LLAMA,
    "mixtral": MIXTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
}
"""By `model_type` of config.json."""
GGUF: Mapping[str, Page] = {"gemma3": GEMMA3, "llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3}
"""By `general.architecture`."""


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What the rest of Headrace needs to know of a model."""

    architecture: str
    num_parameters: int
    context_length: int
    """Tokens the model was made to read, prompt and reply together."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    program: Program = field(repr=False)


def describe(checkpoint: Checkpoint) -> ModelDescription:
    """Read the config and record the program; no weight is touched but GGUF's few rope factors.

    Raises `ConfigurationError` for an architecture that is not known or a config that lacks something.
    """
    page = find_page(checkpoint)
    if checkpoint.kind == "gguf":
        assert page.from_gguf is not None  # GGUF lists only pages that have one
        config = page.from_gguf(checkpoint.config, checkpoint.tensors)
    else:
        config = page.from_huggingface(checkpoint.config)
    program = page.program(config, Builder())
    return ModelDescription(
        architecture=checkpoint.architecture,
        num_parameters=program.num_parameters,
        context_length=config.context_length,
        vocab_size=program.vocab_size,
        eos_token_ids=eos_token_ids(checkpoint),
        program=program,
    )


def open_weights(checkpoint: Checkpoint, program: Program) -> Weights:
    """The program's weights in the checkpoint, by canonical name; nothing is read yet.

    Raises `CheckpointError` when a tensor is missing or has another shape.
    """
    names = None if checkpoint.kind == "gguf" else find_page(checkpoint).huggingface_names
    return Weights(program.weights, checkpoint.tensors, names)


def find_page(checkpoint: Checkpoint) -> Page:
    name = checkpoint.architecture
    pages = GGUF if checkpoint.kind == "gguf" else HUGGINGFACE
    if name not in pages:
        raise ConfigurationError(
            f"architecture {name!r} ({checkpoint.kind}) is not supported; supported here: {', '.join(pages)}."
        )
    if checkpoint.kind == "gguf" and name == "llama" and checkpoint.config.get("llama.expert_count"):
        return MIXTRAL
    return pages[name]


def eos_token_ids(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Tokens that end a reply, in rising order."""
    if checkpoint.kind == "gguf":
        found = [checkpoint.config.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    else:
        found = []
        for config in (checkpoint.config, checkpoint.generation_config):
            value = config.get("eos_token_id")
            found += value if isinstance(value, list) else [value]
    return tuple(sorted({value for value in found if isinstance(value, int)}))
