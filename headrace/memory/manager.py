"""All memory of one engine: the groups, the prefix tree, and each sequence's tables.

Allocation is one transaction: `admit` and `grow` either do all they say or return None and change nothing.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from headrace.core.cache import CacheGroup, CacheKind, Copy
from headrace.core.errors import ConfigurationError
from headrace.core.sequence import Sequence
from headrace.memory.group import BlockTable, GroupMemory, StateBlocks, TokenBlocks
from headrace.memory.prefix_tree import Digest, PrefixTree, child_digest, root_digest


@dataclass(frozen=True, slots=True)
class GroupStats:
    """Blocks of one cache group: used + cached + free = num_blocks."""

    name: str
    num_blocks: int
    num_used: int
    num_cached: int
    """Held by nobody, kept for a later hit, given up when needed."""
    num_free: int


class SequenceMemory:
    """What the manager keeps of one running sequence."""

    __slots__ = ("block_arrays", "chain", "claimed", "num_published", "tables")

    def __init__(self, tables: tuple[BlockTable, ...], chain: list[Digest], num_published: int) -> None:
        self.tables = tables
        self.block_arrays: tuple[array, ...] = tuple(table.blocks for table in tables)
        self.chain = chain
        """Digests of the sequence's full blocks, as far as they were needed."""
        self.num_published = num_published
        """Blocks of the chain that have been offered to the tree."""
        self.claimed = range(0)
        """Blocks of the chain that this sequence has announced to compute."""


class MemoryManager:
    """Block tables for sequences, prefix hits, copy-on-write and eviction, over one or more cache groups."""

    def __init__(self, groups: tuple[CacheGroup, ...], num_blocks: tuple[int, ...], numerics: str = "") -> None:
        if not groups or len({group.block_size for group in groups}) != 1:
            raise ConfigurationError(f"cache groups must share one block size, not {[g.block_size for g in groups]}")
        self.block_size = groups[0].block_size
        self.tree = PrefixTree(len(groups))
        self.groups: tuple[GroupMemory, ...] = tuple(
            (StateBlocks if group.kind is CacheKind.STATE else TokenBlocks)(index, group, count, self.tree)
            for index, (group, count) in enumerate(zip(groups, num_blocks, strict=True))
        )
        self._numerics = numerics
        self._of: dict[int, SequenceMemory] = {}
        self._chains: dict[int, list[Digest]] = {}
        """Digests of waiting sequences, so that looking again costs no hashing."""
        self._computing: dict[Digest, int] = {}
        """Blocks that a running sequence is about to compute, and which sequence."""

    def capacity_tokens(self, max_span_tokens: int, depth: int) -> int:
        """Longest sequence that can always finish alone. Raises `ConfigurationError` if not even a short one can."""
        longest = 1 << 40
        for memory in self.groups:
            group = memory.group
            if group.kind is CacheKind.STATE or group.window:
                required = memory.num_required(longest, max_span_tokens, depth)
                if memory.pool.num_blocks < required:
                    raise ConfigurationError(
                        f"cache group {group.name!r} has {memory.pool.num_blocks} blocks; with steps of "
                        f"{max_span_tokens} tokens and depth {depth} it needs {required}. "
                        "Give it more memory or make the step budget smaller."
                    )
            else:
                longest = min(longest, memory.pool.num_blocks * self.block_size)
        return longest

    # --- prefix hits -----------------------------------------------------------------------------------------------

    def match(self, sequence: Sequence) -> int:
        """Tokens a prefix hit would bring: the longest p, in whole blocks, that satisfies every group, and that
        leaves at least the last token to compute. No side effect on blocks."""
        if sequence.needs_scores:
            return 0  # a hit has no logits
        limit = (sequence.num_tokens - 1) // self.block_size
        chain = self._chain_of(sequence, limit)
        if limit and not self.tree.find(chain[0]):
            return 0
        possible = [memory.hits(chain, limit) for memory in self.groups]
        return self.block_size * next(p for p in range(limit, -1, -1) if all(hits[p] for hits in possible))

    def is_being_computed(self, sequence: Sequence) -> bool:
        """The block after the sequence's hit is in flight elsewhere: waiting a step is cheaper than computing it."""
        if sequence.needs_scores or not self._computing:
            return False
        limit = (sequence.num_tokens - 1) // self.block_size
        next_block = self.match(sequence) // self.block_size
        return next_block < limit and self._chain_of(sequence, limit)[next_block] in self._computing

    def _chain_of(self, sequence: Sequence, num_blocks: int) -> list[Digest]:
        memory = self._of.get(sequence.id)
        chain = memory.chain if memory else self._chains.setdefault(sequence.id, [])
        self._extend_chain(sequence, chain, num_blocks)
        return chain

    def _extend_chain(self, sequence: Sequence, chain: list[Digest], num_blocks: int) -> None:
        if len(chain) >= num_blocks:
            return
        request, size = sequence.request, self.block_size
        parent = chain[-1] if chain else root_digest(request.cache_salt, request.adapter, self._numerics)
        for index in range(len(chain), num_blocks):
            parent = child_digest(parent, sequence.tokens[index * size : (index + 1) * size])
            chain.append(parent)

    # --- transactions ----------------------------------------------------------------------------------------------

    def admit(self, sequence: Sequence, max_tokens: int, headroom: int) -> tuple[int, list[Copy]] | None:
        """Take the prefix hit and room for all known tokens (behind a window: for the first span).

        Sets `num_computed` to the hit. Returns the length of the first span (at most `max_tokens`) and its copies,
        or None if that would leave fewer than `headroom` blocks available in a group (then the hit's blocks only count
        as used just now).
        """
        hit = self.match(sequence)
        num_hit = hit // self.block_size
        chain = self._chain_of(sequence, sequence.num_tokens // self.block_size)
        tables = []
        for memory in self.groups:
            tables.append(memory.take_hit(chain, num_hit, sequence.num_tokens))
        count = min(sequence.num_tokens - hit, max_tokens)
        for memory, table in zip(self.groups, tables, strict=True):
            count = memory.clip(table, hit, count)
        ends = [memory.reserve_end(hit + count, sequence.num_tokens) for memory in self.groups]
        if any(
            memory.num_needed(table, hit, end) + headroom > memory.num_available
            for memory, table, end in zip(self.groups, tables, ends, strict=True)
        ):
            for memory, table in zip(self.groups, tables, strict=True):
                memory.release(table)
            return None
        copies: list[Copy] = []
        for memory, table, end in zip(self.groups, tables, ends, strict=True):
            copies += memory.grow(table, hit, end)
        kept = self._of[sequence.id] = SequenceMemory(tuple(tables), chain, num_hit)
        self._chains.pop(sequence.id, None)
        kept.claimed = range(num_hit, len(chain))
        for digest in chain[num_hit:]:
            self._computing.setdefault(digest, sequence.id)
        sequence.num_computed = hit
        return count, copies

    def clip(self, sequence: Sequence, count: int) -> int:
        """At most this many of the sequence's next `count` tokens may go into one span."""
        start = sequence.num_scheduled
        for memory, table in zip(self.groups, self._of[sequence.id].tables, strict=True):
            count = memory.clip(table, start, count)
        return count

    def grow(self, sequence: Sequence, count: int) -> list[Copy] | None:
        """Room to write the sequence's next `count` tokens: the copies to make first, or None."""
        start = sequence.num_scheduled
        end = start + count
        tables = self._of[sequence.id].tables
        for memory, table in zip(self.groups, tables, strict=True):
            if memory.num_needed(table, start, end) > memory.num_available:
                return None
        copies: list[Copy] = []
        for memory, table in zip(self.groups, tables, strict=True):
            copies += memory.grow(table, start, end)
        return copies

    def tables(self, sequence: Sequence) -> tuple[array, ...]:
        return self._of[sequence.id].block_arrays

    def fork(self, parent: Sequence, child: Sequence, num_spans: int) -> None:
        """Share the parent's blocks of [0, child.num_scheduled) with the child, of which the last `num_spans` spans
        are in flight. Whoever writes first into a shared block copies it."""
        origin = self._of[parent.id]
        end = child.num_scheduled
        tables = tuple(
            memory.share(table, end, num_spans) for memory, table in zip(self.groups, origin.tables, strict=True)
        )
        chain = origin.chain[: child.num_tokens // self.block_size]
        self._of[child.id] = SequenceMemory(tables, chain, min(origin.num_published, len(chain)))

    def computed(self, sequence: Sequence) -> None:
        """One span of the sequence has returned and `num_computed` has advanced: publish the blocks it filled."""
        kept = self._of[sequence.id]
        num_full = min(sequence.num_computed, sequence.num_tokens) // self.block_size
        if num_full > len(kept.chain):
            self._extend_chain(sequence, kept.chain, num_full)
        for memory, table in zip(self.groups, kept.tables, strict=True):
            memory.computed(table, kept.chain, kept.num_published, sequence.num_computed)
        if num_full > kept.num_published:
            self._unclaim(sequence, kept, num_full)
            kept.num_published = num_full

    def release(self, sequence: Sequence) -> None:
        """Give back all blocks; what was published stays findable until evicted. Nothing is in flight."""
        kept = self._of.pop(sequence.id)
        self._unclaim(sequence, kept, kept.claimed.stop)
        for memory, table in zip(self.groups, kept.tables, strict=True):
            memory.release(table)

    def forget(self, sequence: Sequence) -> None:
        """A waiting sequence has ended."""
        self._chains.pop(sequence.id, None)

    def _unclaim(self, sequence: Sequence, kept: SequenceMemory, stop: int) -> None:
        for digest in kept.chain[kept.claimed.start : min(stop, kept.claimed.stop)]:
            if self._computing.get(digest) == sequence.id:
                del self._computing[digest]
        kept.claimed = range(max(kept.claimed.start, min(stop, kept.claimed.stop)), kept.claimed.stop)

    # --- seen from outside -----------------------------------------------------------------------------------------

    def holds(self, sequence: Sequence) -> bool:
        return sequence.id in self._of

    def stats(self) -> tuple[GroupStats, ...]:
        return tuple(
            GroupStats(
                name=memory.group.name,
                num_blocks=memory.pool.num_blocks,
                num_used=memory.pool.num_blocks - memory.num_available,
                num_cached=self.tree.num_idle(memory.index),
                num_free=memory.pool.num_free,
            )
            for memory in self.groups
        )

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Every invariant of pools, tree and tables; `sequences` are all that should hold memory. O(everything)."""
        assert {sequence.id for sequence in sequences} == set(self._of), "memory outlived its sequence"
        self.tree.check(
            [memory.pool for memory in self.groups],
            [memory.group.kind in (CacheKind.FULL, CacheKind.LATENT) for memory in self.groups],
        )
        for index, memory in enumerate(self.groups):
            memory.pool.check()
            counts = Counter(block for kept in self._of.values() for block in memory.references(kept.tables[index]))
            for block, references in enumerate(memory.pool.references):
                assert references == counts[block], f"block {block} of group {index} leaked"
            num_held = sum(1 for references in memory.pool.references if references)
            assert num_held + memory.num_available == memory.pool.num_blocks, f"blocks of group {index} are lost"
        claimed = {
            digest for kept in self._of.values() for digest in kept.chain[kept.claimed.start : kept.claimed.stop]
        }
        assert set(self._computing) <= claimed, "a block is announced by nobody"
