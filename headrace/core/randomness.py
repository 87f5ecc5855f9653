"""Counter-based randomness: a number is a pure function of (seed, choice, position).

Nothing is drawn from a stream, so batch mates, preemption, migration and speculation cannot shift it.
"""

from __future__ import annotations

import secrets

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_UNIT = 1.0 / (1 << 53)


def mix(value: int) -> int:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014): a bijection of 64-bit integers with full avalanche."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def uniform(seed: int, choice: int, position: int) -> float:
    """A float64 in [0, 1) with 53 random bits for the token at `position` of choice `choice`."""
    return (_state(seed, choice, position) >> 11) * _UNIT


def coin(seed: int, choice: int, position: int) -> float:
    """A second such number for the same token, independent of `uniform`'s: the next of its generator."""
    return (mix((_state(seed, choice, position) + _GOLDEN) & _MASK) >> 11) * _UNIT


def _state(seed: int, choice: int, position: int) -> int:
    state = mix(((seed & _MASK) + _GOLDEN) & _MASK)
    state = mix((state + _GOLDEN * (choice + 1)) & _MASK)
    return mix((state + _GOLDEN * (position + 1)) & _MASK)


def draw_seed() -> int:
    """A seed for a request that brought none: from here on its randomness is fixed."""
    return secrets.randbits(63)
