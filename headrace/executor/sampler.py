"""From logits to tokens: the reference sampler, one row at a time, obviously right.

Order of operations (see `SamplingParams`): penalties, DRY, logit bias, what the grammar allows, mask of the stop tokens
while fewer than `min_tokens` are generated (unless it would leave no token), temperature, top-k, typical-p, top-p,
min-p, XTC. Ties go
to the smaller token id everywhere. The token is the inverse of the cumulative distribution, over the kept tokens in
order of their ids, at one counter-based uniform number.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.core.randomness import coin, uniform
from headrace.core.result import TokenLogprob
from headrace.core.sampling import SamplingParams
from headrace.executor.dry import dry_penalties

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SampleRow:
    """What sampling one row depends on besides its logits."""

    params: SamplingParams
    choice: int
    position: int
    """Of the token to be sampled."""
    num_prompt: int
    history: list[int] | None
    """The sequence's tokens before `position`; only needed with penalties and DRY."""
    allowed: NDArray[np.bool_] | None = None
    """[vocab]: what the request's grammar allows."""


def sample(logits: Floats, row: SampleRow) -> int:
    """The next token. `logits` [vocab] are not changed."""
    adjusted = adjust(logits, row)
    if row.params.is_greedy:
        return int(adjusted.argmax())  # the first of equals
    threshold = xtc_threshold(row.params, row.choice, row.position)
    kept, probabilities = distribution(adjusted, row.params, threshold)
    cumulative = np.cumsum(probabilities)
    target = uniform(row.params.seed, row.choice, row.position) * cumulative[-1]
    index = int(np.searchsorted(cumulative, target, side="right"))
    return int(kept[min(index, len(kept) - 1)])


def adjust(logits: Floats, row: SampleRow) -> NDArray[np.float64]:
    """Logits after penalties, DRY, bias, grammar and the mask of early stops.

    The repetition penalty (Keskar et al. 2019) sees prompt and reply; presence and frequency penalties (OpenAI) see the
    reply only.
    """
    params = row.params
    adjusted = logits.astype(np.float64)
    if params.has_penalties:
        assert row.history is not None
        seen = np.unique(np.array(row.history, np.int64))
        values = adjusted[seen]
        adjusted[seen] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
        generated, counts = np.unique(np.array(row.history[row.num_prompt :], np.int64), return_counts=True)
        adjusted[generated] -= params.presence_penalty + params.frequency_penalty * counts
    if params.has_dry:
        assert row.history is not None
        for token, penalty in dry_penalties(row.history, params).items():
            adjusted[token] -= penalty
    for token, bias in params.logit_bias:
        adjusted[token] += bias
    if row.allowed is not None:
        adjusted[~row.allowed] = -np.inf
    if params.stop_token_ids and row.position - row.num_prompt < params.min_tokens:
        masked = adjusted.copy()
        masked[list(params.stop_token_ids)] = -np.inf
        if masked.max() > -np.inf:  # else stop tokens are all there is
            return masked
    return adjusted


def xtc_threshold(params: SamplingParams, choice: int, position: int) -> float:
    """The probability from which on XTC drops tokens for the token at `position`; 0 where it drops none."""
    if params.xtc_probability == 0.0 or coin(params.seed, choice, position) >= params.xtc_probability:
        return 0.0
    return params.xtc_threshold


def distribution(
    adjusted: NDArray[np.float64], params: SamplingParams, xtc: float = 0.0
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """(token ids in rising order, their unnormalised probabilities) that temperature and filters keep. `xtc`: see
    `xtc_threshold`.

    Each filter looks at the distribution the filter before it left. typical-p keeps the smallest set of tokens whose
    surprise is closest to the entropy and whose probabilities sum to at least `typical_p`; top-p keeps the smallest
    set of most probable tokens whose probabilities sum to at least `top_p`; min-p what has at least `min_p` times the
    largest probability. XTC drops what has at least the probability `xtc`, but for the least probable of these.
    """
    scaled = (adjusted - adjusted.max()) / params.temperature  # the largest is 0: exp cannot overflow
    kept = np.arange(len(scaled))
    if 0 < params.top_k < len(kept):
        kept = _largest(scaled, params.top_k)
    weights = np.exp(scaled[kept])
    if params.typical_p < 1.0:
        chosen = _typical(weights, params.typical_p)
        kept, weights = kept[chosen], weights[chosen]
    if params.top_p < 1.0:
        order = np.argsort(-weights, kind="stable")
        sums = np.cumsum(weights[order])
        count = int(np.searchsorted(sums, params.top_p * sums[-1], side="left")) + 1
        chosen = np.sort(order[:count])
        kept, weights = kept[chosen], weights[chosen]
    if params.min_p > 0.0:
        likely = weights >= params.min_p * weights.max()
        kept, weights = kept[likely], weights[likely]
    if xtc > 0.0:
        top = np.flatnonzero(weights >= xtc * weights.sum())
        least = top[weights[top] == weights[top].min(initial=np.inf)][-1:]  # of equals the largest id
        kept, weights = np.delete(kept, np.setdiff1d(top, least)), np.delete(weights, np.setdiff1d(top, least))
    return kept, weights


def _typical(weights: NDArray[np.float64], mass: float) -> NDArray[np.int64]:
    """Places, rising, of the locally typical set (Meister et al. 2022)."""
    possible = np.flatnonzero(weights)
    probabilities = weights[possible] / weights.sum()
    surprise = -np.log(probabilities)
    entropy = (probabilities * surprise).sum()
    order = possible[np.argsort(np.abs(surprise - entropy), kind="stable")]
    sums = np.cumsum(weights[order])
    count = int(np.searchsorted(sums, mass * sums[-1], side="left")) + 1
    return np.sort(order[:count])


def _largest(values: NDArray[np.float64], k: int) -> NDArray[np.int64]:
    """Indices of the k largest values, in rising order; among equals the first ones."""
    threshold = np.partition(values, -k)[-k]
    above = np.flatnonzero(values > threshold)
    equal = np.flatnonzero(values == threshold)[: k - len(above)]
    return np.sort(np.concatenate((above, equal)))


def token_logprob(logits: Floats, token: int, num_top: int) -> TokenLogprob:
    """Logprob and rank of `token`, and the `num_top` most probable tokens, under the raw distribution."""
    wide = logits.astype(np.float64)
    peak = wide.max()
    log_sum = peak + np.log(np.exp(wide - peak).sum())
    top: tuple[tuple[int, float], ...] = ()
    if num_top:
        largest = _largest(wide, min(num_top, len(wide)))
        ordered = largest[np.argsort(-wide[largest], kind="stable")]
        top = tuple((int(t), float(wide[t] - log_sum)) for t in ordered)
    return TokenLogprob(
        token=token,
        logprob=float(wide[token] - log_sum),
        rank=int(np.count_nonzero(wide > wide[token])),
        top=top,
    )
