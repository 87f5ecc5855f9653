"""What a model remembers of the tokens it has read, and the copies that move it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class CacheKind(Enum):
    """What is kept, and hence what a prefix hit at position p needs (p a multiple of the block size)."""

    FULL = "full"
    """Keys and values of every token: a hit needs all blocks before p."""
    LATENT = "latent"
    """Compressed keys (MLA) of every token: hits as FULL, other bytes."""
    WINDOW = "window"
    """Keys and values of the last `window` tokens: a hit needs the blocks that hold p - window + 1 ... p - 1."""
    STATE = "state"
    """One recurrent state: a hit needs a checkpoint taken at exactly p."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that keep the same kind of memory and therefore share one block table.

    A block holds `block_size` tokens of all layers of the group; a STATE block holds one whole state, and
    `block_size` is then only the grid on which checkpoints may lie.
    """

    name: str
    kind: CacheKind
    block_size: int
    bytes_per_block: int
    window: int = 0
    """WINDOW: a query at position q reads keys at q - window + 1 ... q."""
    checkpoint_interval: int = 0
    """STATE: tokens between kept checkpoints, a multiple of `block_size`."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy one whole block of a group before the plan's tokens run."""

    group: int
    source: int
    target: int


NO_BLOCK = -1
"""In a block table: nothing here (freed behind a window, or the zero state before the first token)."""
