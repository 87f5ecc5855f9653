"""Hit rates of the prefix tree on the Mooncake traces (512-token blocks), with a cache without end and with small ones.

    python -m benchmarks.prefix_hits mooncake_conversation.jsonl mooncake_synthetic.jsonl

Request by request in the order of the file, one at a time: what hits, then all blocks are computed, published and given
back. A block of the trace is one token here (block size 1): its id is its content. The rate is hit blocks over all
blocks. Beside the tree stands a flat LRU over block ids, which counts every known id as a hit, whether or not what is
before it is known too, and touches a request's blocks in order.
"""

from __future__ import annotations

import sys
import time
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

from headrace.core.cache import CacheGroup, CacheKind
from headrace.core.request import Request
from headrace.core.sequence import Sequence
from headrace.memory.manager import MemoryManager
from headrace.sim.traces import TraceRow, read_trace

SIZES = (1_000, 3_000, 10_000, 30_000, 50_000)
GROUP = CacheGroup("blocks", CacheKind.FULL, block_size=1, bytes_per_block=1)


def tree_hits(rows: Iterable[TraceRow], num_blocks: int) -> tuple[int, int]:
    """(hit blocks, all blocks) of the engine's memory with a pool of `num_blocks`.

    A prompt goes on behind its last block by a token that is never computed, since a hit leaves at least one to do.
    Raises `ValueError` for a request that does not fit into the pool.
    """
    memory = MemoryManager((GROUP,), (num_blocks + 1,))  # and that token's block
    num_hit = num_all = 0
    for number, row in enumerate(rows):
        blocks = len(row.block_ids)
        sequence = Sequence(number, Request(str(number), (*row.block_ids, 0)), 0, 0.0, blocks + 2)
        if memory.admit(sequence, blocks + 1, 0) is None:
            raise ValueError(f"request {number} has {blocks} blocks; the pool holds {num_blocks}")
        num_hit += sequence.num_computed
        num_all += blocks
        sequence.num_computed = blocks
        memory.computed(sequence)
        memory.release(sequence)
        memory.forget(sequence)
    return num_hit, num_all


def flat_hits(rows: Iterable[TraceRow], num_blocks: int) -> tuple[int, int]:
    """The same of a least-recently-used set of ids."""
    known: OrderedDict[int, None] = OrderedDict()
    num_hit = num_all = 0
    for row in rows:
        for block in row.block_ids:
            num_all += 1
            if block in known:
                num_hit += 1
                known.move_to_end(block)
            else:
                known[block] = None
                if len(known) > num_blocks:
                    known.popitem(last=False)
    return num_hit, num_all


def num_distinct(rows: Iterable[TraceRow]) -> int:
    return len({block for row in rows for block in row.block_ids})


def main() -> None:
    for path in map(Path, sys.argv[1:]):
        rows = read_trace(path)
        print(f"{path.stem}: {len(rows):,} requests, {num_distinct(rows):,} different blocks")
        for size in (*SIZES, num_distinct(rows)):
            begin = time.perf_counter()
            hit, count = tree_hits(rows, size)
            took_s = time.perf_counter() - begin
            flat, _ = flat_hits(rows, size)
            print(f"  {size:>8,} blocks: tree {hit / count:6.2%}, flat LRU {flat / count:6.2%}  ({took_s:.1f} s)")


if __name__ == "__main__":
    main()
