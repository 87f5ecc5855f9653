"""`best_of`: more candidates are computed than are returned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranking:
    """Of each prompt's `num_candidates` choices the `num_kept` of highest mean logprob per token, the best first."""

    num_candidates: int
    num_kept: int

    def best(self, candidates: Mapping[int, T], mean_logprobs: Mapping[int, float]) -> dict[int, T]:
        """The kept ones under their new numbers. Of equals the one sampled first."""
        kept: dict[int, T] = {}
        for first in range(0, len(candidates), self.num_candidates):
            of_prompt = range(first, first + self.num_candidates)
            for choice in sorted(of_prompt, key=lambda choice: -mean_logprobs[choice])[: self.num_kept]:
                kept[len(kept)] = candidates[choice]
        return kept
