"""The bytes of the cache as NumPy arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike, NDArray

from headrace.core.cache import CacheGroup, Copy
from headrace.program.cache import StateEntry
from headrace.program.program import Program

Array = NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class StoredKeys:
    """Keys [num_blocks, block_size, kv_heads, key_width] and values of one attention op.

    `values` is None where the values are part of the keys (latent attention).
    """

    keys: Array
    values: Array | None


class KVStore:
    """Storage of every (group, entry) of a program's cache.

    Attention entries have the store's dtype, states are float32. Blocks start as zeros, and the operating
    system gives a page only when it is written.
    """

    def __init__(
        self,
        program: Program,
        groups: Sequence[CacheGroup],
        num_blocks: Sequence[int],
        dtype: DTypeLike = np.float32,
    ) -> None:
        """`num_blocks` per group. Raises `ValueError` when the groups are not the program's."""
        if not len(groups) == len(num_blocks) == len(program.cache):
            raise ValueError(
                f"the program keeps {len(program.cache)} cache groups, but {len(groups)} groups and "
                f"{len(num_blocks)} block counts were given; make the groups with cache_groups(program, ...)."
            )
        self.block_sizes = tuple(group.block_size for group in groups)
        self.num_blocks = tuple(num_blocks)
        self.attention: dict[tuple[int, int], StoredKeys] = {}
        self.states: dict[tuple[int, int], NDArray[np.float32]] = {}
        for g, (group, spec, blocks) in enumerate(zip(groups, program.cache, num_blocks, strict=True)):
            for e, entry in enumerate(spec.entries):
                if isinstance(entry, StateEntry):
                    self.states[g, e] = np.zeros((blocks, *entry.shape), np.float32)
                    continue
                shape = (blocks, group.block_size, entry.kv_heads)
                self.attention[g, e] = StoredKeys(
                    np.zeros((*shape, entry.key_width), dtype),
                    np.zeros((*shape, entry.value_width), dtype) if entry.value_width else None,
                )

    def arrays(self, group: int) -> list[Array]:
        """Every array of a group, block index first."""
        stored = [kv for (g, _), kv in self.attention.items() if g == group]
        found: list[Array] = [kv.keys for kv in stored]
        found += [kv.values for kv in stored if kv.values is not None]
        found += [state for (g, _), state in self.states.items() if g == group]
        return found

    def apply(self, copies: Iterable[Copy]) -> None:
        """Copy whole blocks, in order: a later copy may read what an earlier one wrote."""
        for copy in copies:
            for blocks in self.arrays(copy.group):
                blocks[copy.target] = blocks[copy.source]

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for g in range(len(self.num_blocks)) for array in self.arrays(g))
