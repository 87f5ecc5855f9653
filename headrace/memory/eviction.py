"""Which idle block goes first when a pool is empty."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol


class EvictionOrder(Protocol):
    """An order over the idle blocks of one group."""

    def add(self, block: int) -> None:
        """The block's last reference went just now."""
        ...

    def remove(self, block: int) -> None: ...

    def pop(self) -> int:
        """Remove and return the block to evict."""
        ...

    def __len__(self) -> int: ...

    def __contains__(self, block: int) -> bool: ...


class LeastRecentlyUsed:
    """The block whose last reference went longest ago. O(1).

    Only leaves go, without looking for them: whoever holds a block of a chain holds all before it, and gives them
    back tail first, so a block always stands before its prefix in this order.
    """

    __slots__ = ("_blocks",)

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def add(self, block: int) -> None:
        self._blocks[block] = None

    def remove(self, block: int) -> None:
        del self._blocks[block]

    def pop(self) -> int:
        return self._blocks.popitem(last=False)[0]

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        return block in self._blocks
