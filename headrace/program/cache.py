"""What a program keeps per token or per sequence, and the groups the memory manager sees."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.core.cache import CacheGroup, CacheKind
from headrace.core.errors import ConfigurationError
from headrace.program.recurrent_ops import STATE_BYTES

if TYPE_CHECKING:
    from headrace.program.program import Program


@dataclass(frozen=True, slots=True)
class AttentionEntry:
    """Keys and values of one layer. Value width 0: the values are part of the keys (latent attention)."""

    kv_heads: int
    key_width: int
    value_width: int

    @property
    def width(self) -> int:
        """Numbers per token."""
        return self.kv_heads * (self.key_width + self.value_width)


@dataclass(frozen=True, slots=True)
class StateEntry:
    """The state of one recurrent op."""

    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """Ops that keep the same kind of memory over the same window and hence share block tables."""

    name: str
    kind: CacheKind
    window: int
    entries: tuple[AttentionEntry | StateEntry, ...]

    def bytes_per_block(self, block_size: int, element_bytes: int) -> int:
        """Bytes of one block of all entries; a state block holds one state in float32."""
        return sum(
            STATE_BYTES * entry.size if isinstance(entry, StateEntry) else block_size * element_bytes * entry.width
            for entry in self.entries
        )


def cache_groups(
    program: Program, block_size: int, element_bytes: int = 4, checkpoint_interval: int = 0
) -> tuple[CacheGroup, ...]:
    """The cache groups of a program, in the order of the ops' group indices.

    `checkpoint_interval` (tokens) is for recurrent states; raises `ConfigurationError` when there are some
    and it is not a positive multiple of `block_size`.
    """
    groups = []
    for spec in program.cache:
        is_state = spec.kind is CacheKind.STATE
        if is_state and (checkpoint_interval <= 0 or checkpoint_interval % block_size):
            raise ConfigurationError(
                f"checkpoint_interval is {checkpoint_interval}; a model with recurrent states needs "
                f"a positive multiple of the block size, {block_size}."
            )
        groups.append(
            CacheGroup(
                name=spec.name,
                kind=spec.kind,
                block_size=block_size,
                bytes_per_block=spec.bytes_per_block(block_size, element_bytes),
                window=spec.window,
                checkpoint_interval=checkpoint_interval if is_state else 0,
            )
        )
    return tuple(groups)
