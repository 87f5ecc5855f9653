"""What `headrace inspect` tells of a model and of the machine: numbers here, their looks in `cli`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from headrace.models.loaders.checkpoint import open_checkpoint
from headrace.models.registry import describe
from headrace.program.cache import CacheSpec
from headrace.server import system

ELEMENT_BYTES = 4
"""The reference backend keeps weights, keys and values in float32."""


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

    @property
    def bytes_at_context(self) -> int:
        """Cache bytes of one sequence of the whole context."""
        return sum(group.bytes_at(self.context_length) for group in self.groups)

    @property
    def loaded_bytes(self) -> int:
        """Of the weights in memory."""
        return ELEMENT_BYTES * self.num_parameters

    @property
    def bytes_left(self) -> int:
        """Memory left for the cache beside the weights; negative: the weights do not fit."""
        return self.memory_bytes - self.loaded_bytes

    @property
    def num_full_sequences(self) -> int:
        """How many sequences of the whole context fit."""
        return max(0, self.bytes_left) // max(1, self.bytes_at_context)

    @property
    def num_tokens(self) -> int:
        """Cached tokens that fit, all sequences together; windows and states not counted in their favour."""
        per_token = sum(group.bytes_per_token for group in self.groups)
        return max(0, self.bytes_left) // per_token if per_token else 0


def report_model(path: Path) -> ModelReport:
    """Reads headers only. Raises `CheckpointError`, `ConfigurationError`."""
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
        groups=tuple(_group(spec) for spec in description.program.cache),
        memory_bytes=system.memory_bytes()[1],
    )


def _group(spec: CacheSpec) -> GroupReport:
    is_state = spec.kind.value == "state"
    num_bytes = spec.bytes_per_block(1, ELEMENT_BYTES)
    return GroupReport(
        name=spec.name,
        kind=spec.kind.value,
        num_layers=len(spec.entries),
        window=spec.window,
        bytes_per_token=0 if is_state else num_bytes,
        bytes_per_sequence=num_bytes if is_state else 0,
    )
