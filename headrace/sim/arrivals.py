"""When requests are due in an open loop."""

from __future__ import annotations

import random


def poisson(rate_per_s: float, count: int, seed: int) -> tuple[float, ...]:
    """`count` arrivals of a Poisson process, in seconds from the start of a run; the first one at 0."""
    draw = random.Random(f"{seed} arrivals")
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + draw.expovariate(rate_per_s))
    return tuple(times)
