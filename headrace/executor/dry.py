"""DRY ("don't repeat yourself"): a token is penalised for continuing a stretch that the text has said before.

The penalty of p-e-w's sampler (text-generation-webui): a token that came after an earlier copy of the last n tokens
loses `dry_multiplier * dry_base ** (n - dry_allowed_length)` where n is at least `dry_allowed_length`; of several
copies the longest counts. No copy reaches over a breaker, and a breaker is never penalised.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from headrace.core.sampling import SamplingParams

MOST_EXPONENT = 200.0
"""Of e: further repetition adds nothing to a penalty that no logit survives, and the number stays finite."""


def dry_penalties(history: Sequence[int], params: SamplingParams) -> dict[int, float]:
    """Token -> what its logit loses, for the token after `history`. O(tokens looked at)."""
    recent = history[-params.dry_range :] if params.dry_range else history
    growth = math.log(params.dry_base)
    most = int(MOST_EXPONENT / growth) if growth > 0 else len(recent)
    return {
        token: params.dry_multiplier * params.dry_base ** min(length - params.dry_allowed_length, most)
        for token, length in repeats(recent, params.dry_breakers, params.dry_allowed_length).items()
        if token not in params.dry_breakers
    }


def repeats(tokens: Sequence[int], breakers: frozenset[int], shortest: int = 1) -> dict[int, int]:
    """Token -> the longest ending of `tokens` that it came after before, of at least `shortest` tokens.

    The Z-function (Gusfield 1997) of the reversed tokens: `matches[k]` of them from k on equal the first ones. Where
    nothing matches, the next place worth a look is found by `index`.
    """
    longest = next((i for i, token in enumerate(reversed(tokens)) if token in breakers), len(tokens))
    found: dict[int, int] = {}
    if longest < max(shortest, 1):  # often: a breaker is never far in most texts
        return found
    reversed_ = list(reversed(tokens))
    num_tokens, first = len(reversed_), reversed_[0]
    matches = [0] * num_tokens
    left = right = 0  # [left, right) equals the first right - left: the one that reaches farthest
    k = 1
    while k < num_tokens:
        length = 0
        if k < right:
            length = min(matches[k - left], right - k)
        else:
            try:
                k = reversed_.index(first, k)
            except ValueError:
                break
        if k + length >= right:
            while length < longest and k + length < num_tokens and reversed_[length] == reversed_[k + length]:
                length += 1
            left, right = k, k + length
        matches[k] = length
        if length >= shortest:
            token = reversed_[k - 1]
            found[token] = max(found.get(token, 0), length)
        k += 1
    return found
