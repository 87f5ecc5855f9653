"""The prefix tree: which full blocks are known, by content.

A node stands for one full block of tokens after one particular prefix. Its digest covers its parent's digest and its
tokens, and at the root a namespace (salt, adapter, numerics), so equal digests mean equal bits in the cache. What a
node holds, and what is evicted, is per cache group: a window group may have dropped the block that a full group keeps.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from hashlib import blake2b

from headrace.core.cache import NO_BLOCK
from headrace.memory.eviction import EvictionOrder, LeastRecentlyUsed
from headrace.memory.pool import BlockPool

Digest = bytes
DIGEST_BYTES = 16


def root_digest(salt: str, adapter: str, numerics: str) -> Digest:
    """The namespace all blocks of a chain live in. `numerics` names whatever else shapes the bits of a block:
    weights, KV format, kernel version, instruction set, sharding."""
    content = "\0".join((salt, adapter, numerics)).encode("utf-8", "surrogatepass")
    return blake2b(content, digest_size=DIGEST_BYTES).digest()


def child_digests(parent: Digest, tokens: Sequence[int], block_size: int) -> list[Digest]:
    """Of the whole blocks that `tokens` fill behind `parent`. About a microsecond per block."""
    content, num_bytes = array("i", tokens).tobytes(), 4 * block_size
    digests = []
    for start in range(0, len(content) - num_bytes + 1, num_bytes):
        parent = blake2b(parent + content[start : start + num_bytes], digest_size=DIGEST_BYTES).digest()
        digests.append(parent)
    return digests


class Node:
    """One full block of tokens; `blocks[g]` is where group g keeps it, or `NO_BLOCK`."""

    __slots__ = ("blocks", "digest", "num_children", "parent")

    def __init__(self, digest: Digest, parent: Node | None, num_groups: int) -> None:
        self.digest = digest
        self.parent = parent
        self.num_children = 0
        self.blocks = [NO_BLOCK] * num_groups


class PrefixTree:
    """Nodes by digest, and per group the idle blocks in the order of their eviction.

    A block in the tree is held by sequences or idle; idle blocks count as available memory.
    """

    __slots__ = ("_idle", "_node_of", "_nodes", "num_evictions", "num_groups")

    def __init__(self, num_groups: int, eviction_order: Callable[[], EvictionOrder] = LeastRecentlyUsed) -> None:
        self.num_groups = num_groups
        self._nodes: dict[Digest, Node] = {}
        self._node_of: list[dict[int, Node]] = [{} for _ in range(num_groups)]
        self._idle: list[EvictionOrder] = [eviction_order() for _ in range(num_groups)]
        self.num_evictions = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def depth(self, chain: Sequence[Digest], limit: int) -> int:
        """How many of the first `limit` blocks of the chain have nodes: those of its start, for a node has all its
        ancestors."""
        return bisect_left(range(limit), True, key=lambda index: chain[index] not in self._nodes)

    def block(self, digest: Digest, group: int) -> int:
        """The group's block with this content, or `NO_BLOCK`."""
        node = self._nodes.get(digest)
        return NO_BLOCK if node is None else node.blocks[group]

    def blocks(self, digests: Sequence[Digest], group: int) -> list[int]:
        """The group's blocks with these contents, all of which it has."""
        return [self._nodes[digest].blocks[group] for digest in digests]

    def contains(self, group: int, block: int) -> bool:
        return block in self._node_of[group]

    def num_idle(self, group: int) -> int:
        return len(self._idle[group])

    def put(self, chain: Sequence[Digest], index: int, group: int, block: int) -> int:
        """Make a held, computed block findable as block `index` of the chain. Returns the block that now is: another
        one if the content was there already."""
        node = self._nodes.get(chain[index]) or self._ensure(chain, index)
        known = node.blocks[group]
        if known != NO_BLOCK:
            return known
        node.blocks[group] = block
        self._node_of[group][block] = node
        return block

    def remove(self, group: int, block: int) -> bool:
        """Forget the block; True if it was idle and is therefore free now."""
        node = self._node_of[group].pop(block)
        node.blocks[group] = NO_BLOCK
        self._prune(node)
        if block in self._idle[group]:
            self._idle[group].remove(block)
            return True
        return False

    def set_idle(self, group: int, blocks: Sequence[int]) -> list[int]:
        """Nobody holds these any more. Returns those that the tree does not have: they are free."""
        node_of, add, free = self._node_of[group], self._idle[group].add, []
        for block in blocks:
            if block in node_of:
                add(block)
            else:
                free.append(block)
        return free

    def set_held(self, group: int, block: int) -> None:
        """The block, idle if the tree has it, is held again."""
        if block in self._idle[group]:
            self._idle[group].remove(block)

    def evict(self, group: int, count: int) -> list[int]:
        """Forget the group's idle blocks that go first, and return them. The caller has made sure there are so many."""
        node_of, pop, evicted = self._node_of[group], self._idle[group].pop, []
        for _ in range(count):
            block = pop()
            node = node_of.pop(block)
            node.blocks[group] = NO_BLOCK
            self._prune(node)
            evicted.append(block)
        self.num_evictions += count
        return evicted

    def _ensure(self, chain: Sequence[Digest], index: int) -> Node:
        """The node of `chain[index]`, made with its missing ancestors."""
        nodes, first, node = self._nodes, index - 1, None
        while first >= 0 and (node := nodes.get(chain[first])) is None:
            first -= 1
        for digest in chain[first + 1 : index + 1]:
            node = self._add(digest, node)
        assert node is not None
        return node

    def _add(self, digest: Digest, parent: Node | None) -> Node:
        node = Node(digest, parent, self.num_groups)
        self._nodes[digest] = node
        if parent is not None:
            parent.num_children += 1
        return node

    def _prune(self, node: Node | None) -> None:
        """Remove the node, and then its ancestors, as long as they hold nothing and lead nowhere."""
        while node is not None and node.num_children == 0 and node.blocks.count(NO_BLOCK) == self.num_groups:
            del self._nodes[node.digest]
            if node.parent is not None:
                node.parent.num_children -= 1
            node = node.parent

    def check(self, pools: Sequence[BlockPool], whole: Sequence[bool]) -> None:
        """`whole[g]`: group g's chains have no holes (it needs all blocks of a prefix)."""
        children: dict[Digest, int] = {}
        for digest, node in self._nodes.items():
            assert node.digest == digest
            if node.parent is not None:
                assert self._nodes.get(node.parent.digest) is node.parent, "a node outlived its parent"
                children[node.parent.digest] = children.get(node.parent.digest, 0) + 1
                for group in range(self.num_groups):
                    has_hole = node.blocks[group] != NO_BLOCK and node.parent.blocks[group] == NO_BLOCK
                    assert not (whole[group] and has_hole), "a block is kept that no hit can reach"
            assert node.num_children or any(b != NO_BLOCK for b in node.blocks), "an empty leaf was kept"
        for digest, node in self._nodes.items():
            assert node.num_children == children.get(digest, 0)
        for group, (node_of, idle, pool) in enumerate(zip(self._node_of, self._idle, pools, strict=True)):
            for block, node in node_of.items():
                assert node.blocks[group] == block
                assert (pool.references[block] == 0) == (block in idle), "idle means: in the tree, held by nobody"
            assert sum(node.blocks[group] != NO_BLOCK for node in self._nodes.values()) == len(node_of)
            assert len(idle) <= len(node_of)
