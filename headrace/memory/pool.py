"""The blocks of one cache group, and how many sequences hold each."""

from __future__ import annotations

from array import array
from collections.abc import Iterable


class BlockPool:
    """A block is free (in `_free`), held (references > 0), or idle (no references, kept by the prefix tree).

    The pool knows references and free blocks; whether an unheld block stays idle is the caller's decision
    (`drop` tells when the last reference went, `give_back` frees). All operations are O(1) per block.
    """

    __slots__ = ("_free", "num_blocks", "references")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.references = array("i", bytes(4 * num_blocks))
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the block used last is still warm

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, most: int) -> list[int]:
        """Free blocks, held once each: `most` of them, or as many as there are."""
        begin = max(0, len(self._free) - most)
        taken = self._free[begin:]
        del self._free[begin:]
        taken.reverse()
        self.take_idle(taken)
        return taken

    def take_idle(self, blocks: list[int]) -> None:
        """Hold blocks once each that nobody holds and that are not free."""
        references = self.references
        for block in blocks:
            references[block] = 1

    def hold(self, block: int) -> bool:
        """True when nobody held the block before."""
        self.references[block] += 1
        return self.references[block] == 1

    def drop(self, blocks: Iterable[int]) -> list[int]:
        """Those that nobody holds any more."""
        references, unheld = self.references, []
        for block in blocks:
            left = references[block] = references[block] - 1
            if not left:
                unheld.append(block)
        return unheld

    def give_back(self, blocks: Iterable[int]) -> None:
        self._free.extend(blocks)

    def check(self) -> None:
        free = set(self._free)
        assert len(free) == len(self._free), "a block was freed twice"
        assert all(self.references[block] == 0 for block in free), "a free block is held"
        assert all(count >= 0 for count in self.references), "a block was dropped more often than held"
