"""Grammars at the sampler: what a row may choose from, and what then has to follow."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from headrace.core.grammar import Matcher
from headrace.core.sequence import Sequence

Mask = NDArray[np.uint32]
"""[words]: bit id % 32 of word id // 32."""


def words_of(vocab_size: int) -> int:
    return -(-vocab_size // 32)


def matcher_at(sequence: Sequence, position: int, last_token: int) -> Matcher:
    """The sequence's matcher when the token at `position` is to be sampled.

    `last_token`, the one before, may be one that the scheduler does not know yet (depth 2).
    """
    matcher = sequence.matcher
    if matcher is None:
        assert sequence.request.grammar is not None
        matcher = sequence.matcher = sequence.request.grammar.start()
    first = sequence.num_prompt + matcher.num_read
    if first < position:
        matcher.read([*sequence.tokens[first : position - 1], last_token])
    return matcher


def mask_of(matcher: Matcher, sequence: Sequence, position: int, vocab_size: int) -> Mask:
    """Everything where the matcher has failed: the row's token is thrown away.

    Stop tokens are out while the reply is shorter than `min_tokens`, unless there is nothing else.
    """
    num_words = words_of(vocab_size)
    mask = np.frombuffer(matcher.allowed(), np.uint32)[:num_words]
    if matcher.error is not None:
        return np.full(num_words, 0xFFFFFFFF, np.uint32)
    params = sequence.request.sampling
    if position - sequence.num_prompt < params.min_tokens:
        longer = mask.copy()
        for token in params.stop_token_ids:
            longer[token // 32] &= ~np.uint32(1 << token % 32)
        if longer.any():
            return longer
    return mask


def follow(
    matchers: Mapping[int, Matcher], sequences: SequenceOf[Sequence], tokens: SequenceOf[int]
) -> tuple[dict[int, tuple[int, ...]], dict[int, str]]:
    """After sampling: (readout -> the tokens that have to come next, readout -> why it cannot go on).

    Where logprobs are wanted each token is sampled, since each needs the logits before it.
    """
    forced, errors = {}, {}
    for readout, matcher in matchers.items():
        params, token = sequences[readout].request.sampling, tokens[readout]
        if matcher.error is None and token >= 0 and token not in params.stop_token_ids:
            matcher.read((token,))
            if matcher.error is None and params.num_logprobs is None and (then := matcher.forced()):
                forced[readout] = then
        if matcher.error is not None:
            errors[readout] = matcher.error
    return forced, errors
