"""What `headrace inspect` tells of a model and of the machine: numbers here, their looks in `cli`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.core.cache import CacheGroup, CacheKind
from headrace.core.errors import ConfigurationError
from headrace.memory.manager import MemoryManager
from headrace.models.loaders.checkpoint import open_checkpoint
from headrace.models.registry import describe
from headrace.program.cache import CacheSpec
from headrace.program.program import Program
from headrace.server import system
from headrace.server.build import KV_FORMATS, ServeConfig, cache_of


@dataclass(frozen=True, slots=True)
class FormatShare:
    name: str
    num_tensors: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GroupReport:
    """One cache group. A state is kept per sequence, everything else per token (at most `window` of them)."""

    name: str
    kind: str
    num_layers: int
    window: int
    bytes_per_token: int
    """0 for states."""
    bytes_per_sequence: int
    """0 but for states."""

    def bytes_at(self, num_tokens: int) -> int:
        """Cache bytes of one sequence of `num_tokens`."""
        kept = min(num_tokens, self.window) if self.window else num_tokens
        return self.bytes_per_sequence + self.bytes_per_token * kept


@dataclass(frozen=True, slots=True)
class CacheReport:
    """The cache that `headrace serve` would allocate."""

    kv_format: str
    num_bytes: int
    num_tokens: int
    """Tokens of all sequences together; 0 where the model keeps only windows and states."""
    longest_tokens: int
    """Longest sequence that can be served."""
    num_full_sequences: int
    """Sequences of the whole context at once, `max_running` at most."""


@dataclass(frozen=True, slots=True)
class ModelReport:
    path: Path
    architecture: str
    num_parameters: int
    num_bytes: int
    """Of the weights as stored."""
    context_length: int
    vocab_size: int
    formats: tuple[FormatShare, ...]
    groups: tuple[GroupReport, ...]
    memory_bytes: int
    """What this process may use now."""
    cache: CacheReport | None
    """What `headrace serve` would give the cache here; None: not even one sequence fits."""

    @property
    def fits(self) -> bool:
        """Beside the cache there is room for the weights. The native backend keeps them about as large as stored."""
        return self.cache is not None and self.num_bytes + self.cache.num_bytes <= self.memory_bytes


def report_model(path: Path, config: ServeConfig | None = None) -> ModelReport:
    """Reads headers only. `config`: as it would be served; by default as `headrace serve` does without options.

    Raises `CheckpointError`, `ConfigurationError`.
    """
    config = config or ServeConfig()
    checkpoint = open_checkpoint(path)
    description = describe(checkpoint)
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        counts[tensor.format.name] += 1
        sizes[tensor.format.name] += tensor.nbytes
    return ModelReport(
        path=path,
        architecture=description.architecture,
        num_parameters=description.num_parameters,
        num_bytes=checkpoint.num_bytes,
        context_length=description.context_length,
        vocab_size=description.vocab_size,
        formats=tuple(FormatShare(name, counts[name], num_bytes) for name, num_bytes in sizes.most_common()),
        groups=tuple(_group(spec, KV_FORMATS[config.kv_format]) for spec in description.program.cache),
        memory_bytes=system.memory_bytes()[1],
        cache=_cache(config, description.program, description.context_length),
    )


def _cache(config: ServeConfig, program: Program, context_length: int) -> CacheReport | None:
    try:
        groups, num_blocks = cache_of(config, program, context_length)
        capacity = MemoryManager(groups, num_blocks, "").capacity_tokens(config.max_step_tokens, config.depth)
    except ConfigurationError:
        return None
    longest = min(capacity, context_length)
    tokens = [
        count * group.block_size
        for group, count in zip(groups, num_blocks, strict=True)
        if group.kind in (CacheKind.FULL, CacheKind.LATENT)
    ]
    return CacheReport(
        kv_format=config.kv_format,
        num_bytes=sum(count * group.bytes_per_block for group, count in zip(groups, num_blocks, strict=True)),
        num_tokens=min(tokens, default=0),
        longest_tokens=longest,
        num_full_sequences=_num_full_sequences(config, groups, num_blocks, context_length),
    )


def _num_full_sequences(
    config: ServeConfig, groups: Sequence[CacheGroup], num_blocks: Sequence[int], context_length: int
) -> int:
    most = config.max_running
    for group, count in zip(groups, num_blocks, strict=True):
        if group.kind is CacheKind.STATE:
            each = config.depth + 1
        elif group.window:
            each = -(-min(context_length, group.window) // group.block_size) + 1  # it may begin inside a block
        else:
            each = -(-context_length // group.block_size)
        most = min(most, count // each)
    return most


def _group(spec: CacheSpec, element_bytes: int) -> GroupReport:
    is_state = spec.kind is CacheKind.STATE
    num_bytes = spec.bytes_per_block(1, element_bytes)
    return GroupReport(
        name=spec.name,
        kind=spec.kind.value,
        num_layers=len(spec.entries),
        window=spec.window,
        bytes_per_token=0 if is_state else num_bytes,
        bytes_per_sequence=num_bytes if is_state else 0,
    )
