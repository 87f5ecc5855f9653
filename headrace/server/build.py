"""The one place that composes the parts of an engine."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.backends.kv_store import KVStore
from headrace.backends.reference.model import ReferenceModel
from headrace.core.cache import CacheGroup
from headrace.core.clock import WallClock
from headrace.core.errors import ConfigurationError
from headrace.engine.budget import FixedBudget
from headrace.engine.engine import Engine
from headrace.engine.gates import Gates
from headrace.engine.gates.prefix import PrefixGate
from headrace.engine.gates.running import RunningGate
from headrace.engine.limits import Limits
from headrace.engine.policies.fcfs import FirstComeFirstServed
from headrace.engine.scheduler import Scheduler
from headrace.engine.state import EngineState
from headrace.executor.local import LocalExecutor
from headrace.executor.sizing import blocks_within
from headrace.memory.manager import MemoryManager
from headrace.models.catalogue import DEFAULT_MODEL
from headrace.models.fetch import resolve
from headrace.models.loaders.checkpoint import Checkpoint, open_checkpoint
from headrace.models.progress import Progress, no_progress
from headrace.models.registry import ModelDescription, describe, open_weights
from headrace.program.cache import cache_groups
from headrace.program.program import Program
from headrace.server import system
from headrace.text.chat_template import ChatTemplate
from headrace.text.tokenizer import Tokenizer

log = logging.getLogger("headrace")

CHECKPOINT_TOKENS = 256  # between kept recurrent states: a hit recomputes at most this much
KV_MEMORY_SHARE = 0.25  # of the memory that is free at start, unless told otherwise
REFERENCE_NUMERICS = "reference/float32"


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """What to serve and with how much."""

    model: str = DEFAULT_MODEL
    """A catalogue name, a path or a hub id."""
    context_length: int | None = None
    """At most the model's own, which is the default."""
    block_size: int = 16
    kv_memory_bytes: int | None = None
    """None: a quarter of the free memory, and no more than `max_running` full contexts need."""
    max_running: int = 64
    max_step_tokens: int = 256
    max_queue: int = 256
    depth: int = 1
    chat_template: Path | None = None
    """Takes the place of the model's own."""
    served_model_name: str | None = None


@dataclass(slots=True)
class Deployment:
    """A model ready to generate."""

    engine: Engine
    tokenizer: Tokenizer
    template: ChatTemplate | None
    """None if the model has none and none was given: it completes prompts but takes no messages."""
    name: str
    context_length: int
    description: ModelDescription


def build(config: ServeConfig, progress: Progress | None = None) -> Deployment:
    """Fetch, load and compose. Raises `HeadraceError` of one kind or another for whatever does not fit."""
    progress = progress or no_progress
    path = resolve(config.model, progress)
    checkpoint = open_checkpoint(path)
    description = describe(checkpoint)
    context_length = _context_length(config, description)
    tokenizer = load_tokenizer(checkpoint, description)
    template = _template(config, tokenizer)
    weights = open_weights(checkpoint, description.program)
    for name in weights.unused:
        log.warning("tensor %s of %s is not used by architecture %s", name, path.name, description.architecture)
    model = ReferenceModel.load(description.program, weights, progress)
    numerics = f"{checkpoint.digest()}/{REFERENCE_NUMERICS}"
    groups = cache_groups(description.program, config.block_size, checkpoint_interval=_checkpoint_interval(config))
    engine = compose(
        config,
        description.program,
        model,
        groups,
        _blocks(config, groups, context_length),
        context_length=context_length,
        vocab_size=tokenizer.vocab_size,
        numerics=numerics,
    )
    return Deployment(
        engine=engine,
        tokenizer=tokenizer,
        template=template,
        name=config.served_model_name or _name_of(config.model),
        context_length=context_length,
        description=description,
    )


def compose(
    config: ServeConfig,
    program: Program,
    model: ReferenceModel,
    groups: tuple[CacheGroup, ...],
    num_blocks: tuple[int, ...],
    *,
    context_length: int,
    vocab_size: int,
    numerics: str,
) -> Engine:
    """Memory, scheduler and executor around a loaded model. `num_blocks` per cache group."""
    memory = MemoryManager(groups, num_blocks, numerics)
    capacity = memory.capacity_tokens(config.max_step_tokens, config.depth)
    if capacity < context_length:
        log.warning("the KV pool holds %d tokens of a context of %d: longer requests get 400", capacity, context_length)
    scheduler = Scheduler(
        EngineState(memory),
        FirstComeFirstServed(),
        Gates([RunningGate(config.max_running), PrefixGate()]),
        FixedBudget(config.max_step_tokens),
        Limits(context_length, capacity, config.max_queue, config.max_running),
    )
    executor = LocalExecutor(model, KVStore(program, groups, num_blocks), vocab_size)
    return Engine(scheduler, executor, WallClock(), config.depth)


def _blocks(config: ServeConfig, groups: tuple[CacheGroup, ...], context_length: int) -> tuple[int, ...]:
    kv_bytes = config.kv_memory_bytes
    if kv_bytes is None:
        kv_bytes = int(system.memory_bytes()[1] * KV_MEMORY_SHARE)
    return blocks_within(
        groups,
        kv_bytes,
        context_length=context_length,
        max_running=config.max_running,
        max_step_tokens=config.max_step_tokens,
        depth=config.depth,
    )


def load_tokenizer(checkpoint: Checkpoint, description: ModelDescription) -> Tokenizer:
    """Raises `ConfigurationError` for a folder without tokenizer.json or a tokenizer that is not known."""
    eos_ids = description.eos_token_ids
    try:
        if checkpoint.kind == "gguf":
            return Tokenizer.from_gguf(checkpoint.config, eos_ids=eos_ids)
        if "tokenizer.json" not in checkpoint.extra:
            raise ConfigurationError(f"{checkpoint.source} has no tokenizer.json; copy the model's there.")
        template = checkpoint.extra.get("chat_template.jinja")
        extra: Any = checkpoint.extra
        return Tokenizer.from_huggingface(
            extra["tokenizer.json"],
            extra.get("tokenizer_config.json"),
            chat_template=template.read_text("utf-8") if isinstance(template, Path) else None,
            eos_ids=eos_ids,
        )
    except (ValueError, KeyError) as error:
        raise ConfigurationError(f"the tokenizer of {checkpoint.source} cannot be read: {error}") from error


def _context_length(config: ServeConfig, description: ModelDescription) -> int:
    own = description.context_length
    if config.context_length is None:
        return own
    if not 1 < config.context_length <= own:
        raise ConfigurationError(f"context_length is {config.context_length}; this model reads 2 to {own} tokens.")
    return config.context_length


def _template(config: ServeConfig, tokenizer: Tokenizer) -> ChatTemplate | None:
    if config.chat_template is not None:
        try:
            source = config.chat_template.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"the chat template {config.chat_template} cannot be read: {error}") from error
        return ChatTemplate.for_tokenizer(tokenizer, source)
    return None if tokenizer.chat_template is None else ChatTemplate.for_tokenizer(tokenizer)


def _checkpoint_interval(config: ServeConfig) -> int:
    return -(-CHECKPOINT_TOKENS // config.block_size) * config.block_size


def _name_of(model: str) -> str:
    """The name a model is served under: a catalogue or hub name as it is, a path by its last part."""
    path = Path(model)
    return path.stem if path.suffix == ".gguf" else path.name if path.exists() else model
