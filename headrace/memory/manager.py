"""All memory of one engine: the groups, the prefix tree, and each sequence's tables.

Allocation is one transaction: `admit` and `grow` either do all they say or return None and change nothing.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Row
from dataclasses import dataclass
from heapq import heapify, heapreplace

from headrace.core.cache import CacheGroup, CacheKind, Copy
from headrace.core.errors import ConfigurationError
from headrace.core.sequence import Sequence
from headrace.memory.group import BlockTable, GroupMemory, StateBlocks, TokenBlocks
from headrace.memory.prefix_tree import Digest, PrefixTree, child_digests, root_digest

Room = tuple[int, Iterable[Copy], tuple[array, ...]]
"""Room for a span: its number of tokens, the copies to make first, and the tables to find it by (see `Span.tables`)."""


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
    """What the manager keeps of one running sequence. `room` and `quiet_until` let most steps pass it by."""

    __slots__ = (
        "block_arrays",
        "chain",
        "claimed",
        "num_published",
        "pairs",
        "quiet_until",
        "room",
        "sparse",
        "tables",
    )

    def __init__(
        self,
        groups: tuple[GroupMemory, ...],
        tables: tuple[BlockTable, ...],
        chain: list[Digest],
        num_published: int,
    ) -> None:
        self.tables = tables
        self.pairs = tuple(zip(groups, tables, strict=True))
        self.sparse = tuple((memory, table) for memory, table in self.pairs if isinstance(memory, StateBlocks))
        """The pairs that can be hit at some block boundaries only, and whose state moves with every span."""
        self.block_arrays: tuple[array, ...] = tuple(table.blocks for table in tables)
        self.chain = chain
        """Digests of the sequence's full blocks, as far as they were needed."""
        self.num_published = num_published
        """Blocks of the chain that have been offered to the tree."""
        self.claimed = range(0)
        """Blocks of the chain that this sequence has announced to compute."""
        self.room = 0
        """Tokens up to which `grow` has nothing to do."""
        self.quiet_until = 0
        """Number of computed tokens up to which `computed` has nothing to do."""


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
        """Digests of the full blocks of every sequence that has not ended, as far as they were needed: hashed once."""
        self._computing: dict[Digest, tuple[int, int]] = {}
        """Blocks that a running sequence is about to compute: (its id, length in blocks of the shortest prefix with the
        block that others will be able to hit once that sequence has computed it)."""

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

    def expect(self, sequence: Sequence) -> None:
        """The sequence will ask for memory: hash its tokens now, on its arrival, and not inside a step."""
        self._chain_of(sequence, sequence.num_tokens // self.block_size)

    def match(self, sequence: Sequence) -> int:
        """Tokens a prefix hit would bring: the longest p, in whole blocks, that satisfies every group, and that
        leaves at least the last token to compute. No side effect on blocks."""
        if sequence.needs_scores:
            return 0  # a hit has no logits
        limit = (sequence.num_tokens - 1) // self.block_size
        chain = self._chain_of(sequence, limit)
        hit, last = self.tree.depth(chain, limit), -1
        while hit != last:  # until no group shortens it
            last = hit
            for memory in self.groups:
                hit = memory.last_hit(chain, hit)
        return hit * self.block_size

    def is_being_computed(self, sequence: Sequence) -> bool:
        """A running sequence is about to make a longer hit possible: waiting for it is cheaper than computing too."""
        if sequence.needs_scores or not self._computing:
            return False
        limit = (sequence.num_tokens - 1) // self.block_size
        next_block = self.match(sequence) // self.block_size
        chain = self._chains[sequence.id]
        if next_block >= limit or chain[next_block] not in self._computing:
            return False
        owner, end = self._computing[chain[next_block]]
        return end <= limit and self._of[owner].chain[end - 1] == chain[end - 1]

    def _chain_of(self, sequence: Sequence, num_blocks: int) -> list[Digest]:
        """Digests of at least the first `num_blocks` blocks, which are full."""
        chain = self._chains.setdefault(sequence.id, [])
        if len(chain) < num_blocks:
            request, size = sequence.request, self.block_size
            parent = chain[-1] if chain else root_digest(request.cache_salt, request.adapter, self._numerics)
            chain += child_digests(parent, sequence.tokens[len(chain) * size : num_blocks * size], size)
        return chain

    # --- transactions ----------------------------------------------------------------------------------------------

    def admit(self, sequence: Sequence, max_tokens: int, headroom: int) -> Room | None:
        """Take the prefix hit and room for all known tokens (behind a window: for the first span).

        Sets `num_computed` to the hit. Returns the room of the first span, of at most `max_tokens`, or None if that
        would leave fewer than `headroom` blocks available in a group (then the hit's blocks only count as used just
        now).
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
        kept = self._of[sequence.id] = SequenceMemory(self.groups, tuple(tables), chain, num_hit)
        if not kept.sparse:
            kept.room = min([memory.room(table) for memory, table in kept.pairs])
        if not sequence.request.is_batch:  # which computes when it can: nobody may wait for that
            self._claim(sequence, kept, num_hit)
        sequence.num_computed = hit
        return count, copies, kept.block_arrays

    def grow_for_drafts(self, sequence: Sequence, count: int) -> Room | None:
        """`grow`, for a span with drafts: `take_back` can undo it as far as recurrent states go."""
        states = self._of[sequence.id].sparse
        for memory, table in states:
            memory.keep_undrafted(table)
        room = self.grow(sequence, count)
        if room is None:
            for memory, table in states:
                memory.withdraw(table)
        return room

    def take_back(self, sequence: Sequence) -> bool:
        """The sequence's span with drafts has returned, and some are wrong. Where tokens have blocks, wrong ones are
        written over. A state is gone back to the one before the span, which must be computed again as far as it
        was right: then this returns True, and `computed` is not to be called for it."""
        states = self._of[sequence.id].sparse
        for memory, table in states:
            memory.take_back(table)
        return bool(states)

    def grow(self, sequence: Sequence, count: int) -> Room | None:
        """Room to write the sequence's next tokens, at most `count` of them in one span; None if there is none."""
        kept = self._of[sequence.id]
        start = sequence.num_computed + sequence.num_in_flight
        if start + count <= kept.room:
            return count, (), kept.block_arrays
        if count > 1:
            for memory, table in kept.pairs:
                count = memory.clip(table, start, count)
        end = start + count
        for memory, table in kept.pairs:
            num_needed = memory.num_needed(table, start, end)
            if num_needed and num_needed > memory.num_available:
                return None
        copies: list[Copy] = []
        for memory, table in kept.pairs:
            copies += memory.grow(table, start, end)
        if not kept.sparse:
            kept.room = min([memory.room(table) for memory, table in kept.pairs])
        return count, copies, kept.block_arrays

    def has_room_after(self, sequence: Sequence, releasing: Iterable[Sequence], headroom: int) -> bool:
        """Whether `admit` would find its blocks if these gave back theirs. A guess: a hit of the sequence's own needs
        fewer, blocks that others hold too are not freed, and groups that keep only a window are not looked at."""
        num_needed = -(-sequence.num_tokens // self.block_size) + headroom
        released = list(releasing)
        for index, memory in enumerate(self.groups):
            if memory.is_plain:
                num_freed = sum(len(self._of[other.id].tables[index].blocks) for other in released)
                if num_needed > memory.num_available + num_freed:
                    return False
        return True

    @property
    def capacity_blocks(self) -> int | None:
        """Blocks that whole contexts share, at most; None where no group keeps them."""
        return min((memory.pool.num_blocks for memory in self.groups if memory.is_plain), default=None)

    def fork(self, parent: Sequence, child: Sequence, num_spans: int) -> None:
        """Share the parent's blocks of [0, child.num_scheduled) with the child, of which the last `num_spans` spans
        are in flight. Whoever writes first into a shared block copies it."""
        origin = self._of[parent.id]
        end = child.num_scheduled
        tables = tuple(
            memory.share(table, end, num_spans) for memory, table in zip(self.groups, origin.tables, strict=True)
        )
        chain = self._chains[child.id] = origin.chain[: child.num_tokens // self.block_size]
        self._of[child.id] = SequenceMemory(self.groups, tables, chain, min(origin.num_published, len(chain)))
        origin.room = 0

    def computed(self, sequence: Sequence) -> None:
        """One span of the sequence has returned and `num_computed` has advanced: publish the blocks it filled."""
        kept = self._of[sequence.id]
        num_computed, size = sequence.num_computed, self.block_size
        if num_computed < kept.quiet_until:
            return
        num_full = min(num_computed, len(sequence.tokens)) // size
        chain = self._chain_of(sequence, num_full)
        new, num_scheduled = range(kept.num_published, num_full), num_computed + sequence.num_in_flight
        kept.quiet_until = (num_full + 1) * size
        for memory, table in kept.pairs:
            kept.quiet_until = min(kept.quiet_until, memory.computed(table, chain, new, num_computed, num_scheduled))
        if new:
            kept.num_published = num_full
            if kept.claimed and self._is_hit_place(kept, num_full):
                self._unclaim(sequence, kept, num_full)

    def num_steps_within(self, growing: Row[tuple[Sequence, int]], most: int) -> int:
        """For so many steps, at most `most`, each sequence surely finds room for a token more, from the number of its
        tokens that is given; a step for which it has it already counts. 1 where recurrent states make every step an
        event."""
        if any(memory.group.kind is CacheKind.STATE for memory in self.groups):
            return 1
        size = self.block_size
        for index, memory in enumerate(self.groups):
            num_available = memory.num_available
            while most > 1 and len(growing) * (most // size + 1) > num_available:  # else there is plenty
                missing = [
                    -(-(start + most) // size) - len(self._of[one.id].block_arrays[index]) for one, start in growing
                ]
                if sum(filter(lambda count: count > 0, missing)) <= num_available:
                    break
                most //= 2
        return most

    def has_room_for(self, sequence: Sequence, num_tokens: int) -> bool:
        """So many of its tokens have their blocks already, and nobody shares one that it will write."""
        return self._of[sequence.id].room >= num_tokens

    def advance(self, paths: Row[tuple[Sequence, Row[int]]], num_steps: int) -> None:
        """`num_steps` times over: a step of all these sequences returns, and the next finds its room.

        Each comes with its path: the tokens computed before all that, after each of these steps, and when the one that
        is then under way will have returned.

        As `computed` and then `grow` for each in turn, step after step, in the same order, since who is first takes the
        free block and the other one evicts; but only where they have something to do, at the edges of blocks.
        `num_steps_within` or `has_room_for` has promised room.
        """
        kepts = [self._of[sequence.id] for sequence, _ in paths]
        due = []  # (step after which, 0: computed or 1: grow, order)
        for order, (kept, (sequence, path)) in enumerate(zip(kepts, paths, strict=True)):
            sequence.num_in_flight = 0
            last = path[num_steps]
            if kept.quiet_until <= last:
                due.append((max(1, bisect_left(path, kept.quiet_until)), 0, order))
            if kept.room <= last:
                due.append((max(1, bisect_left(path, kept.room)), 1, order))
        heapify(due)
        while due and due[0][0] <= num_steps:
            step, kind, order = due[0]
            kept, (sequence, path) = kepts[order], paths[order]
            sequence.num_computed = path[step]
            if kind:
                room = self.grow(sequence, 1)
                assert room is not None and not room[1], "room was promised, and a block of its own"
                until = kept.room
            else:
                self.computed(sequence)
                until = kept.quiet_until
            heapreplace(due, (bisect_left(path, until, step + 1), kind, order))
        for sequence, path in paths:
            sequence.num_computed, sequence.num_in_flight = path[num_steps], path[num_steps + 1] - path[num_steps]

    def release(self, sequence: Sequence) -> None:
        """Give back all blocks; what was published stays findable until evicted. Nothing is in flight."""
        kept = self._of.pop(sequence.id)
        self._unclaim(sequence, kept, kept.claimed.stop)
        for memory, table in zip(self.groups, kept.tables, strict=True):
            memory.release(table)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended, and holds nothing."""
        self._chains.pop(sequence.id, None)

    # --- announcements: a prefix being computed is shared too ------------------------------------------------------

    def _is_hit_place(self, kept: SequenceMemory, num_blocks: int) -> bool:
        """Whether others can hit the sequence's first `num_blocks` blocks once it has computed them."""
        position = num_blocks * self.block_size
        return not kept.sparse or all(memory.keeps(table, position) for memory, table in kept.sparse)

    def _claim(self, sequence: Sequence, kept: SequenceMemory, num_hit: int) -> None:
        """Announce the blocks from `num_hit` on, as far as others will be able to hit them."""
        stop = end = 0
        for index in range(len(kept.chain) - 1, num_hit - 1, -1):
            if self._is_hit_place(kept, index + 1):
                end = index + 1
                stop = stop or end
            if end:
                known = self._computing.get(kept.chain[index])
                if known is None or end < known[1]:  # whoever makes the shorter wait
                    self._computing[kept.chain[index]] = (sequence.id, end)
        kept.claimed = range(num_hit, max(num_hit, stop))

    def _unclaim(self, sequence: Sequence, kept: SequenceMemory, stop: int) -> None:
        start, stop = kept.claimed.start, min(stop, kept.claimed.stop)
        for digest in kept.chain[start:stop]:
            if digest in self._computing and self._computing[digest][0] == sequence.id:
                del self._computing[digest]
        kept.claimed = range(max(start, stop), kept.claimed.stop)

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

    def check(self, sequences: Iterable[Sequence], waiting: Iterable[Sequence] = ()) -> None:
        """Every invariant of pools, tree and tables; `sequences` are all that should hold memory, `waiting` those that
        may come to. O(everything)."""
        holding = {sequence.id for sequence in sequences}
        assert holding == set(self._of), "memory outlived its sequence"
        assert set(self._chains) == holding | {sequence.id for sequence in waiting}, "digests outlived their sequence"
        for kept in self._of.values():
            for memory, table in kept.pairs:
                published = table.blocks[table.first : kept.num_published] if memory.is_plain else ()
                assert all(self.tree.contains(memory.index, block) for block in published), "a full block is unknown"
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
        assert all(owner in self._of for owner, _ in self._computing.values())
