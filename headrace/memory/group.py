"""One cache group's blocks: how tables of its kind grow, are shared, and let go.

Both kinds answer the same questions: what does a hit need, how many blocks would growing take, grow, share, and what
becomes findable or free once tokens are computed. Every method is exact about `NO_BLOCK` and none looks at tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

from headrace.core.cache import NO_BLOCK, CacheGroup, CacheKind, Copy
from headrace.memory.pool import BlockPool
from headrace.memory.prefix_tree import Digest, PrefixTree

NEVER = 1 << 60  # a number of tokens


class BlockTable:
    """A sequence's blocks in one group. `blocks` is what plans carry (see `headrace.core.plan.Span`)."""

    __slots__ = ("blocks", "boundary", "first", "is_sealed", "retired", "spans", "trailing", "undrafted")

    def __init__(self) -> None:
        self.blocks = array("i")
        self.first = 0
        """Token blocks: index of the first one not yet given back behind the window."""
        self.retired: deque[tuple[int, int]] = deque()
        """Token blocks: (n, block) exchanged for the tree's, to drop when n tokens are computed: then no launched plan
        names the block any more."""
        # A STATE group's table only:
        self.is_sealed = False
        """The state being written is, or will be, a checkpoint: nobody may write over it."""
        self.spans: deque[tuple[int, int]] = deque()
        """Per launched span (block to drop when it returns, block that is then a checkpoint)."""
        self.trailing: tuple[Digest, int] | None = None
        """The checkpoint at the end of the reply so far, replaced by the next: what a next turn will hit."""
        self.undrafted: tuple[int, bool] | None = None
        """(State, is_sealed) before a span with drafts: what is gone back to if one of them is wrong."""
        self.boundary = 0
        """The last place in the tokens known at admission where a checkpoint may lie."""


class GroupMemory(ABC):
    """Pool and rules of one cache group; `index` is its place among the model's groups."""

    __slots__ = ("group", "index", "is_plain", "pool", "tree")

    def __init__(self, index: int, group: CacheGroup, num_blocks: int, tree: PrefixTree) -> None:
        self.index = index
        self.group = group
        self.is_plain = group.kind in (CacheKind.FULL, CacheKind.LATENT)
        self.pool = BlockPool(num_blocks)
        self.tree = tree

    @property
    def num_available(self) -> int:
        return self.pool.num_free + self.tree.num_idle(self.index)

    def take(self, count: int) -> list[int]:
        """Blocks held once each, evicting when none are free. The caller has made sure that they are available."""
        blocks = self.pool.take(count)
        if len(blocks) < count:
            evicted = self.tree.evict(self.index, count - len(blocks))
            self.pool.take_idle(evicted)
            blocks += evicted
        return blocks

    def hold(self, block: int) -> None:
        if self.pool.hold(block):
            self.tree.set_held(self.index, block)

    def drop(self, *blocks: int) -> None:
        if unheld := self.pool.drop(blocks):
            self.pool.give_back(self.tree.set_idle(self.index, unheld))

    @abstractmethod
    def last_hit(self, chain: Sequence[Digest], limit: int) -> int:
        """The largest p <= limit such that this group could continue after the first p blocks of the chain."""

    def keeps(self, table: BlockTable, position: int) -> bool:
        """Whether a hit at this block boundary becomes possible when the tokens before it are computed."""
        return True

    @abstractmethod
    def hit_blocks(self, chain: Sequence[Digest], num_hit: int) -> list[int]:
        """The blocks that a hit of `num_hit` blocks holds."""

    @abstractmethod
    def take_hit(self, chain: Sequence[Digest], num_hit: int, num_tokens: int) -> BlockTable:
        """A table that starts with a hit of `num_hit` blocks, of a sequence of which `num_tokens` are known."""

    def room(self, table: BlockTable) -> int:
        """Tokens up to which `grow` has nothing to do, as long as nobody else comes to share the table's last block."""
        return 0

    @abstractmethod
    def num_needed(self, table: BlockTable, start: int, end: int) -> int:
        """Blocks that `grow` would take."""

    @abstractmethod
    def grow(self, table: BlockTable, start: int, end: int) -> list[Copy]:
        """Make room to write tokens [start, end). The caller has made sure the blocks are available."""

    @abstractmethod
    def reserve_end(self, end: int, num_tokens: int) -> int:
        """Up to where to make room at admission, when a first span ends at `end` of `num_tokens` known tokens."""

    @abstractmethod
    def clip(self, table: BlockTable, start: int, count: int) -> int:
        """At most this many of the `count` tokens from `start` may go into one span."""

    @abstractmethod
    def share(self, table: BlockTable, end: int, num_spans: int) -> BlockTable:
        """A table for a fork that has tokens [0, end), of which the last `num_spans` spans are in flight."""

    @abstractmethod
    def computed(
        self, table: BlockTable, chain: Sequence[Digest], new: range, num_computed: int, num_scheduled: int
    ) -> int:
        """A span has returned and the `new` blocks of the chain are full: publish them, let go of what is not needed.

        Tokens [num_computed, num_scheduled) are in flight. Returns how many tokens must be computed before this has
        anything to do again, new full blocks aside.
        """

    @abstractmethod
    def release(self, table: BlockTable) -> None:
        """Give everything back. Nothing of the sequence is in flight."""

    @abstractmethod
    def num_required(self, num_tokens: int, max_span_tokens: int, depth: int) -> int:
        """Pool size with which one sequence of `num_tokens` can always finish alone."""

    @abstractmethod
    def references(self, table: BlockTable) -> list[int]:
        """Every reference the table holds (for `check`)."""


class TokenBlocks(GroupMemory):
    """FULL, LATENT and WINDOW groups: a block per `block_size` tokens. FULL is a window without end."""

    __slots__ = ()

    def _first_needed(self, position: int) -> int:
        """Index of the first block that a query at `position` reads."""
        window = self.group.window
        return max(0, position - window + 1) // self.group.block_size if window else 0

    def last_hit(self, chain: Sequence[Digest], limit: int) -> int:
        def is_missing(index: int) -> bool:
            return self.tree.block(chain[index], self.index) == NO_BLOCK

        if self.is_plain:  # a chain without holes
            return bisect_left(range(limit), True, key=is_missing)
        while limit:
            first = self._first_needed(limit * self.group.block_size)
            missing = next((index for index in range(limit - 1, first - 1, -1) if is_missing(index)), -1)
            if missing < 0:
                break
            limit = missing  # every hit between would need this block too
        return limit

    def hit_blocks(self, chain: Sequence[Digest], num_hit: int) -> list[int]:
        first = self._first_needed(num_hit * self.group.block_size)
        return self.tree.blocks(chain[first:num_hit], self.index)

    def take_hit(self, chain: Sequence[Digest], num_hit: int, num_tokens: int) -> BlockTable:
        table = BlockTable()
        found = self.hit_blocks(chain, num_hit)
        for block in found:
            self.hold(block)
        table.first = num_hit - len(found)
        table.blocks.extend([NO_BLOCK] * table.first)
        table.blocks.extend(found)
        return table

    def _copies_on_write(self, table: BlockTable, start: int) -> bool:
        """The block that `start` falls into is shared by a fork: it is copied before it is written."""
        index = start // self.group.block_size
        return index < len(table.blocks) and self.pool.references[table.blocks[index]] > 1

    def room(self, table: BlockTable) -> int:
        return len(table.blocks) * self.group.block_size

    def num_needed(self, table: BlockTable, start: int, end: int) -> int:
        num_missing = -(-end // self.group.block_size) - len(table.blocks)
        return max(0, num_missing) + self._copies_on_write(table, start)

    def grow(self, table: BlockTable, start: int, end: int) -> list[Copy]:
        copies = []
        if self._copies_on_write(table, start):
            index = start // self.group.block_size
            shared, (own,) = table.blocks[index], self.take(1)
            table.blocks[index] = own
            copies.append(Copy(self.index, shared, own))
            self.drop(shared)
        if (num_missing := -(-end // self.group.block_size) - len(table.blocks)) > 0:
            table.blocks.extend(self.take(num_missing))
        return copies

    def reserve_end(self, end: int, num_tokens: int) -> int:
        return end if self.group.window else num_tokens

    def clip(self, table: BlockTable, start: int, count: int) -> int:
        return count

    def share(self, table: BlockTable, end: int, num_spans: int) -> BlockTable:
        twin = BlockTable()
        twin.first = table.first
        twin.blocks = table.blocks[: -(-end // self.group.block_size)]
        for block in twin.blocks[twin.first :]:
            self.hold(block)
        return twin

    def computed(
        self, table: BlockTable, chain: Sequence[Digest], new: range, num_computed: int, num_scheduled: int
    ) -> int:
        blocks, size, window = table.blocks, self.group.block_size, self.group.window
        for index in new:
            own = blocks[index]
            known = self.tree.put(chain, index, self.index, own)
            if known != own:
                # Somebody published these tokens first, and equal digests mean equal bits: go on with that block. So a
                # FULL table's full blocks are the tree's, a chain in the tree has no holes, whoever holds a block of it
                # holds all before it, and eviction in order of release takes leaves only.
                self.hold(known)
                blocks[index] = known
                table.retired.append((num_scheduled, own))
        while table.retired and table.retired[0][0] <= num_computed:
            self.drop(table.retired.popleft()[1])
        if window:
            needed = min(self._first_needed(num_computed), len(blocks))
            for index in range(table.first, needed):
                self.drop(blocks[index])
                blocks[index] = NO_BLOCK
            table.first = max(table.first, needed)
        if table.retired:
            return table.retired[0][0]
        return (table.first + 1) * size + window - 1 if window else NEVER

    def release(self, table: BlockTable) -> None:
        assert not table.retired, "released in flight"
        self.drop(*reversed(table.blocks[table.first :]))

    def num_required(self, num_tokens: int, max_span_tokens: int, depth: int) -> int:
        size = self.group.block_size
        if not self.group.window:
            return -(-num_tokens // size)
        in_use = min(num_tokens, self.group.window + depth * max_span_tokens)
        return -(-in_use // size) + 2  # unaligned at both ends, and a copy-on-write

    def references(self, table: BlockTable) -> list[int]:
        return [*table.blocks[table.first :], *(block for _, block in table.retired)]


class StateBlocks(GroupMemory):
    """STATE groups: a block is a whole recurrent state. A span reads one and writes one, in place where it may.

    A state that is a checkpoint, or that a fork shares, is never written over: the next span writes elsewhere, so
    checkpoints and forks cost no copy. Checkpoints lie at multiples of `checkpoint_interval`, at the last block
    boundary of the tokens known at admission, and (one, moving) at the last block boundary of the reply.
    """

    __slots__ = ()

    def last_hit(self, chain: Sequence[Digest], limit: int) -> int:
        return next((p for p in range(limit, 0, -1) if self.tree.block(chain[p - 1], self.index) != NO_BLOCK), 0)

    def hit_blocks(self, chain: Sequence[Digest], num_hit: int) -> list[int]:
        return [self.tree.block(chain[num_hit - 1], self.index)] if num_hit else []

    def take_hit(self, chain: Sequence[Digest], num_hit: int, num_tokens: int) -> BlockTable:
        table = BlockTable()
        state = NO_BLOCK
        for state in self.hit_blocks(chain, num_hit):
            self.hold(state)
        table.blocks.extend((NO_BLOCK, state))
        table.is_sealed = True
        size = self.group.block_size
        table.boundary = (num_tokens - 1) // size * size
        return table

    def _is_in_place(self, table: BlockTable) -> bool:
        state = table.blocks[1]
        return state != NO_BLOCK and not table.is_sealed and self.pool.references[state] == 1

    def num_needed(self, table: BlockTable, start: int, end: int) -> int:
        return 0 if self._is_in_place(table) else 1

    def grow(self, table: BlockTable, start: int, end: int) -> list[Copy]:
        state = table.blocks[1]
        dropped = NO_BLOCK
        if self._is_in_place(table):
            table.blocks[0] = state
        else:
            dropped = state
            table.blocks[0], (table.blocks[1],) = state, self.take(1)
        size = self.group.block_size
        table.is_sealed = end % size == 0 and (self.keeps(table, end) or end - start == 1)
        table.spans.append((dropped, table.blocks[1] if table.is_sealed else NO_BLOCK))
        return []

    def keep_undrafted(self, table: BlockTable) -> None:
        """The next span has drafts: it writes its state elsewhere, for a state cannot be wound back."""
        table.undrafted = (table.blocks[1], table.is_sealed)
        table.is_sealed = True

    def withdraw(self, table: BlockTable) -> None:
        """There will be no such span after all: `grow` has not happened."""
        assert table.undrafted is not None
        _, table.is_sealed = table.undrafted

    def take_back(self, table: BlockTable) -> None:
        """The span with drafts, the only one in flight, has returned and does not count: as if it had not been."""
        assert table.undrafted is not None and len(table.spans) == 1
        table.spans.clear()
        self.drop(table.blocks[1])
        table.blocks[1], table.is_sealed = table.undrafted

    def keeps(self, table: BlockTable, position: int) -> bool:
        return position % self.group.checkpoint_interval == 0 or position == table.boundary

    def reserve_end(self, end: int, num_tokens: int) -> int:
        return end

    def clip(self, table: BlockTable, start: int, count: int) -> int:
        interval = self.group.checkpoint_interval
        stop = (start // interval + 1) * interval
        if start < table.boundary:
            stop = min(stop, table.boundary)
        return min(count, stop - start)

    def share(self, table: BlockTable, end: int, num_spans: int) -> BlockTable:
        twin = BlockTable()
        twin.blocks.extend((NO_BLOCK, table.blocks[1]))
        twin.is_sealed = table.is_sealed
        twin.boundary = table.boundary
        twin.spans.extend([(NO_BLOCK, NO_BLOCK)] * num_spans)
        if table.blocks[1] != NO_BLOCK:
            self.hold(table.blocks[1])
        return twin

    def computed(
        self, table: BlockTable, chain: Sequence[Digest], new: range, num_computed: int, num_scheduled: int
    ) -> int:
        dropped, sealed = table.spans.popleft()
        if sealed != NO_BLOCK:
            index = num_computed // self.group.block_size - 1
            is_new = index < len(chain) and self.tree.put(chain, index, self.index, sealed) == sealed
            if is_new and not self.keeps(table, num_computed):
                self._forget_trailing(table)
                table.trailing = (chain[index], sealed)
        if dropped != NO_BLOCK:
            self.drop(dropped)
        return 0  # every span's return is awaited

    def _forget_trailing(self, table: BlockTable) -> None:
        if table.trailing is None:
            return
        digest, block = table.trailing
        if self.tree.block(digest, self.index) == block and self.tree.remove(self.index, block):
            self.pool.give_back((block,))

    def release(self, table: BlockTable) -> None:
        assert not table.spans, "released in flight"
        if table.blocks[1] != NO_BLOCK:
            self.drop(table.blocks[1])

    def num_required(self, num_tokens: int, max_span_tokens: int, depth: int) -> int:
        return depth + 1

    def references(self, table: BlockTable) -> list[int]:
        held = [table.blocks[1], *(dropped for dropped, _ in table.spans)]
        return [block for block in held if block != NO_BLOCK]
