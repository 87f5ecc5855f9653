"""How many blocks of each cache group fit into a number of bytes."""

from __future__ import annotations

from headrace.core.cache import CacheGroup, CacheKind
from headrace.core.errors import ConfigurationError


def blocks_within(
    groups: tuple[CacheGroup, ...],
    num_bytes: int,
    *,
    context_length: int,
    max_running: int,
    max_step_tokens: int,
    depth: int,
) -> tuple[int, ...]:
    """Blocks per group, using at most `num_bytes` and no more than `max_running` full contexts need.

    FULL and LATENT groups get the same number of blocks, n. WINDOW groups get what all running sequences need at once
    and a quarter of n more, kept for prefix hits (beside no FULL group: n). STATE groups get the states being written
    and a checkpoint for each interval of n blocks. n is as large as possible.

    Raises `ConfigurationError` if not even one block of everything fits, naming the least number of bytes.
    """

    def sizes(n: int) -> tuple[int, ...]:
        has_full = any(group.kind in (CacheKind.FULL, CacheKind.LATENT) for group in groups)
        result = []
        for group in groups:
            if group.kind is CacheKind.STATE:
                per_checkpoint = group.checkpoint_interval // group.block_size
                result.append(max_running * (depth + 1) + n // per_checkpoint)
            elif group.window:
                least = -(-(group.window + depth * max_step_tokens) // group.block_size) + 2
                running = max_running * -(-group.window // group.block_size)
                result.append(least + min(n, running + n // 4 if has_full else n))
            else:
                result.append(n)
        return tuple(result)

    def cost(n: int) -> int:
        return sum(count * group.bytes_per_block for count, group in zip(sizes(n), groups, strict=True))

    if cost(1) > num_bytes:
        raise ConfigurationError(
            f"{num_bytes:,} bytes of KV memory hold no block; this model needs at least {cost(1):,} with "
            f"{max_running} running sequences. Raise --kv-memory or lower --max-running."
        )
    low, high = 1, max_running * -(-context_length // groups[0].block_size)
    while low < high:
        middle = (low + high + 1) // 2
        if cost(middle) <= num_bytes:
            low = middle
        else:
            high = middle - 1
    return sizes(low)
