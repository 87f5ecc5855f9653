"""Drafts copied from the sequence itself."""

from __future__ import annotations

from array import array

from headrace.core.sequence import Sequence

PAIR = 2  # tokens that an earlier place must share at least
MOST_COMPARED = 16  # tokens by which places are told apart: longer matches count as this long
MOST_PLACES = 8  # looked at in one lookup, the latest first
MOST_INDEXED = 1024  # tokens indexed in one lookup (0.3 ms): a long prompt takes several, which find nothing yet


class _Index:
    """Where each pair of tokens occurred last, and before that.

    `links[p]`, for 0 <= p <= tokens indexed, is the largest q < p with tokens[q-2:q] == tokens[p-2:p], or 0: places
    before which the same pair stands form a list, latest first. A dictionary entry and an int per token at most,
    about 200 bytes: less than a hundredth of the cache's.
    """

    __slots__ = ("last", "links")

    def __init__(self) -> None:
        self.last: dict[tuple[int, int], int] = {}
        self.links = array("i", (0, 0))

    def read(self, tokens: list[int]) -> bool:
        """Index more of the tokens. True when that is all of them."""
        last, links = self.last, self.links
        first = len(links)
        stop = min(len(tokens) + 1, first + MOST_INDEXED)
        pairs = zip(tokens[first - PAIR : stop - PAIR], tokens[first - 1 : stop - 1], strict=True)
        for end, pair in enumerate(pairs, first):
            links.append(last.get(pair, 0))
            last[pair] = end
        return stop == len(tokens) + 1


class PromptLookup:
    """Proposes what followed the last tokens where they occurred before, in the prompt or in the reply.

    Of the latest places that share at least a pair with the end, the one that shares the most tokens; of equals the
    latest. Where the continuation runs into the end of what is known it goes on with itself, as loops do. (Saxena,
    Prompt Lookup Decoding, 2023; Yang et al., Inference with Reference, 2023.) A lookup costs a few microseconds.
    """

    def __init__(self) -> None:
        self._indices: dict[int, _Index] = {}

    def propose(self, sequence: Sequence, max_tokens: int) -> tuple[int, ...]:
        index = self._indices.get(sequence.id)
        if index is None:
            index = self._indices[sequence.id] = _Index()
        tokens = sequence.tokens
        num_tokens = len(tokens)
        if not index.read(tokens) or num_tokens < PAIR:
            return ()
        place, longest = 0, 0
        candidate = index.links[num_tokens]
        for _ in range(MOST_PLACES):
            if not candidate:
                break
            length = PAIR
            most = min(MOST_COMPARED, candidate)
            while length < most and tokens[candidate - length - 1] == tokens[num_tokens - length - 1]:
                length += 1
            if length > longest:
                place, longest = candidate, length
                if length == MOST_COMPARED:
                    break
            candidate = index.links[candidate]
        if not place:
            return ()
        drafts = tokens[place : place + max_tokens]
        period = num_tokens - place
        while len(drafts) < max_tokens:
            drafts.append(drafts[-period])
        return tuple(drafts)

    def forget(self, sequence: Sequence) -> None:
        self._indices.pop(sequence.id, None)

    @property
    def num_indexed(self) -> int:
        """Sequences it remembers."""
        return len(self._indices)
