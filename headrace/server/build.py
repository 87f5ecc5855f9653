"""The one place that composes the parts of an engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headrace.backends.kv_store import KVStore
from headrace.backends.native import _native
from headrace.backends.native.model import NativeModel
from headrace.backends.reference.model import ReferenceModel
from headrace.backends.reference.runner import ReferenceRunner
from headrace.core.cache import CacheGroup
from headrace.core.clock import WallClock
from headrace.core.errors import ConfigurationError
from headrace.core.protocols import Drafter, Executor
from headrace.engine.composition import SchedulingConfig, make_scheduler
from headrace.engine.costs import LearntCosts, StepCosts
from headrace.engine.engine import Engine
from headrace.engine.limits import Limits
from headrace.engine.speculative.prompt_lookup import PromptLookup
from headrace.executor.local import Backend, LocalExecutor
from headrace.executor.native import NativeExecutor
from headrace.executor.sizing import blocks_within
from headrace.memory.manager import MemoryManager
from headrace.models.catalogue import DEFAULT_MODEL
from headrace.models.fetch import resolve
from headrace.models.loaders.checkpoint import Checkpoint, open_checkpoint
from headrace.models.progress import Progress, no_progress
from headrace.models.registry import ModelDescription, describe, open_weights
from headrace.models.weights import Weights
from headrace.program.cache import cache_groups
from headrace.program.program import Program
from headrace.server import system
from headrace.server.step_costs import starting_cost_model
from headrace.text.chat_template import ChatTemplate
from headrace.text.grammar.compiler import GrammarCompiler
from headrace.text.tokenizer import Tokenizer
from headrace.text.tools.base import Format
from headrace.text.tools.reasoning import Thinking
from headrace.text.tools.registry import format_named, format_of, thinking_of

log = logging.getLogger("headrace")

CHECKPOINT_TOKENS = 256  # between kept recurrent states: a hit recomputes at most this much
KV_MEMORY_SHARE = 0.25  # of the memory that is free at start, unless told otherwise
TOUCHED_BYTES = 512 << 20
"""Of the KV pool that the system is made to give in idle moments after the start, ahead of use."""
KV_FORMATS = {"f16": 2, "f32": 4}
"""Bytes of a number in the cache."""
ACTIVATIONS = ("mixed", "int8", "int16")
DRAFTERS: dict[str, type[Drafter]] = {"prompt-lookup": PromptLookup}
KV_DTYPES = {"f16": np.float16, "f32": np.float32}


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
    max_step_tokens: int = 160
    """Tokens of one step: about a tenth of a second of prompts on a small machine. With 256, throughput was 3 % higher
    and the median time to a first token 1.6 times as long (128 in, 64 out, concurrency 16)."""
    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)
    """Who is served when."""
    max_queue: int = 256
    depth: int = 1
    chat_template: Path | None = None
    """Takes the place of the model's own."""
    tool_format: str | None = None
    """How the model writes tool calls (`headrace.text.tools.registry.FORMATS`); None: as its template shows."""
    served_model_name: str | None = None
    backend: str = "native"
    """native: C++ on the CPU; reference: NumPy, float32, slow."""
    threads: int | None = None
    """Of the native backend. None: the cores this process may use."""
    isa: str = ""
    """Instruction set of the native backend; empty: the best this processor has."""
    kv_format: str = "f16"
    """Keys and values in the cache: f16 or f32."""
    activations: str = "mixed"
    """Inputs of quantized products in the native backend: int8 with the largest numbers of a row in float (mixed),
    int8, or int16, nearer to float32 at half the speed of long prompts."""
    speculate: str | None = None
    """prompt-lookup: drafts are copied from what the prompt and the reply have said before, and verified: fewer steps
    for replies that repeat, and no other replies."""

    @property
    def num_threads(self) -> int:
        """Of the native backend."""
        return self.threads or system.usable_cores()[0]

    @property
    def instruction_set(self) -> str:
        """Of the native backend."""
        return self.isa or _native.isas()[0]


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
    grammars: GrammarCompiler
    """For replies that have to follow something."""
    tool_format: Format | None = None
    """How the model writes tool calls; None: its template knows no tools, and they are told in words."""
    thinking: Thinking | None = None
    """The marks of the model's reasoning, if it has any."""
    count_threads: Callable[[], tuple[int, int]] | None = None
    """Of the native backend: all, and those that took part in the latest step."""

    @property
    def vocab_size(self) -> int:
        """Token ids that can be read: those of tokenizer and embedding alike. Either may have more."""
        return min(self.tokenizer.vocab_size, self.description.vocab_size)

    @property
    def hidden_size(self) -> int:
        """Numbers of an embedding."""
        program = self.description.program
        return program.widths[program.head[0].output]

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a reply."""
        return frozenset(token for token in self.tokenizer.eos_ids if token < self.vocab_size)


def build(config: ServeConfig, progress: Progress | None = None, *, constrains: bool = False) -> Deployment:
    """Fetch, load and compose. Raises `HeadraceError` of one kind or another for whatever does not fit.

    `constrains`: grammars will be wanted, so their compiler gets ready beside the packing of weights; whoever calls its
    `prepare` waits for that.
    """
    _check(config)
    progress = progress or no_progress
    path = resolve(config.model, progress)
    checkpoint = open_checkpoint(path)
    description = describe(checkpoint)
    context_length = _context_length(config, description)
    tokenizer = load_tokenizer(checkpoint, description)
    template = _template(config, tokenizer)
    vocab_size = min(tokenizer.vocab_size, description.vocab_size)
    grammars = GrammarCompiler(tokenizer, vocab_size)
    weights = open_weights(checkpoint, description.program)
    for name in weights.unused:
        log.warning("tensor %s of %s is not used by architecture %s", name, path.name, description.architecture)
    groups, num_blocks = cache_of(config, description.program, context_length)
    backend = load_backend(
        config,
        description.program,
        weights,
        groups,
        num_blocks,
        context_length=context_length,
        progress=progress,
        before_packing=grammars.prepare_meanwhile if constrains else None,
    )
    if isinstance(backend, NativeModel):
        backend.touch_cache_meanwhile(TOUCHED_BYTES)
    engine = compose(
        config,
        backend,
        groups,
        num_blocks,
        costs=LearntCosts(starting_cost_model(config, description.program, weights.num_bytes)),
        context_length=context_length,
        vocab_size=vocab_size,
        numerics=f"{checkpoint.digest()}/{backend.numerics}",
    )
    checkpoint.forget_pages()  # every backend has its own copy of the weights by now
    return Deployment(
        engine=engine,
        tokenizer=tokenizer,
        template=template,
        name=config.served_model_name or _name_of(config.model),
        context_length=context_length,
        description=description,
        grammars=grammars,
        tool_format=_tool_format(config, template),
        thinking=None if template is None else thinking_of(template.source),
        count_threads=(lambda: backend.threads) if isinstance(backend, NativeModel) else None,
    )


def load_backend(
    config: ServeConfig,
    program: Program,
    weights: Weights,
    groups: tuple[CacheGroup, ...],
    num_blocks: tuple[int, ...],
    *,
    context_length: int,
    progress: Progress = no_progress,
    before_packing: Callable[[], None] | None = None,
) -> Backend | NativeModel:
    """The program with its weights and a cache of `num_blocks` per group, in the backend that the config names.
    `before_packing`: see `NativeModel`."""
    if config.backend == "reference":
        if before_packing is not None:
            before_packing()
        store = KVStore(program, groups, num_blocks, dtype=KV_DTYPES[config.kv_format])
        return ReferenceRunner(ReferenceModel.load(program, weights, progress), store)
    if config.backend == "native":
        return NativeModel(
            program,
            weights,
            groups,
            num_blocks,
            max_tokens=config.max_step_tokens,
            context_length=context_length,
            num_threads=config.num_threads,
            kv_f16=config.kv_format == "f16",
            activations=config.activations,
            isa=config.isa,
            progress=progress,
            before_packing=before_packing,
        )
    raise ConfigurationError(f"backend is {config.backend!r}; it must be 'native' or 'reference'.")


def compose(
    config: ServeConfig,
    backend: Backend | NativeModel,
    groups: tuple[CacheGroup, ...],
    num_blocks: tuple[int, ...],
    *,
    context_length: int,
    vocab_size: int,
    numerics: str,
    costs: StepCosts | None = None,
) -> Engine:
    """Memory, scheduler and executor around a loaded backend. `num_blocks` per cache group. `costs`: of steps; None:
    they are learnt, from nothing."""
    memory = MemoryManager(groups, num_blocks, numerics)
    capacity = memory.capacity_tokens(config.max_step_tokens, config.depth)
    if capacity < context_length:
        log.warning("the KV pool holds %d tokens of a context of %d: longer requests get 400", capacity, context_length)
    limits = Limits(context_length, capacity, config.max_queue, config.max_running, vocab_size)
    drafter = None if config.speculate is None else DRAFTERS[config.speculate]()
    scheduler = make_scheduler(config.scheduling, memory, limits, config.max_step_tokens, costs=costs, drafter=drafter)
    executor: Executor = (
        NativeExecutor(backend, vocab_size, overlapped=config.depth > 1)
        if isinstance(backend, NativeModel)
        else LocalExecutor(backend, vocab_size)
    )
    return Engine(scheduler, executor, WallClock(), config.depth)


def cache_of(
    config: ServeConfig, program: Program, context_length: int
) -> tuple[tuple[CacheGroup, ...], tuple[int, ...]]:
    """The cache groups of a program and the blocks each gets. Raises `ConfigurationError` for too little memory."""
    groups = cache_groups(
        program,
        config.block_size,
        element_bytes=KV_FORMATS[config.kv_format],
        checkpoint_interval=_checkpoint_interval(config),
    )
    kv_bytes = config.kv_memory_bytes
    if kv_bytes is None:
        kv_bytes = int(system.memory_bytes()[1] * KV_MEMORY_SHARE)
    return groups, blocks_within(
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


def _check(config: ServeConfig) -> None:
    """What can be seen before a model is fetched. Raises `ConfigurationError`."""
    for name, known in (
        ("backend", ("native", "reference")),
        ("kv_format", tuple(KV_FORMATS)),
        ("activations", ACTIVATIONS),
        ("isa", _isas(config)),
    ):
        if known and getattr(config, name) not in known:
            allowed = ", ".join(map(repr, known))
            raise ConfigurationError(f"{name} is {getattr(config, name)!r}; it must be one of {allowed}.")
    if config.backend == "reference" and config.activations != "mixed":
        raise ConfigurationError("activations are float32 in the reference backend; leave the setting out.")
    if config.speculate is not None and config.speculate not in DRAFTERS:
        allowed = ", ".join(map(repr, DRAFTERS))
        raise ConfigurationError(f"speculate is {config.speculate!r}; it must be one of {allowed}, or None.")
    if config.threads is not None and config.threads < 1:
        raise ConfigurationError(f"threads is {config.threads}; it must be at least 1.")


def _isas(config: ServeConfig) -> tuple[str, ...]:
    """Instruction sets to choose from; none where none was chosen."""
    if config.backend != "native" or not config.isa:
        return ()
    return tuple(_native.isas())


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


def _tool_format(config: ServeConfig, template: ChatTemplate | None) -> Format | None:
    if config.tool_format is not None:
        return format_named(config.tool_format)
    return None if template is None else format_of(template.source)


def _checkpoint_interval(config: ServeConfig) -> int:
    return -(-CHECKPOINT_TOKENS // config.block_size) * config.block_size


def _name_of(model: str) -> str:
    """The name a model is served under: a catalogue or hub name as it is, a path by its last part."""
    path = Path(model)
    return path.stem if path.suffix == ".gguf" else path.name if path.exists() else model
