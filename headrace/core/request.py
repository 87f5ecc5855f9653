"""What a client asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from headrace.core.grammar import Grammar
from headrace.core.sampling import SamplingParams


class Pooling(Enum):
    """What an embedding is made of: the hidden states of the prompt's tokens, or of the last one."""

    MEAN = "mean"
    LAST = "last"


@dataclass(frozen=True, slots=True)
class Request:
    """One request, frozen at submit. Times are seconds of the engine's clock."""

    id: str
    prompt: tuple[int, ...]
    """Token ids; the boundary between prompt and reply stays here even when the request is resumed."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    num_choices: int = 1
    """Replies sampled from one prompt (`n`): the prompt is computed once and its blocks are shared."""
    score_prompt: bool = False
    """Also report the logprob of every prompt token; such a request takes no prefix hit, for a hit has no logits."""
    num_prompt_top: int | None = None
    """With `score_prompt`, also of so many most probable tokens at each place; None: as many as of sampled tokens."""
    pooling: Pooling | None = None
    """The prompt's hidden states are summed up; nothing is sampled (`max_tokens` 0), no logits are computed, and no
    prefix hit is taken, for a hit has no hidden states."""
    resumed: tuple[int, ...] = ()
    """Tokens of the reply that exist already (a request moved from a failed or draining replica); one choice only.
    They count towards `max_tokens` and are fewer; none is a stop token."""
    grammar: Grammar | None = field(default=None, repr=False)
    """What every reply has to follow."""
    tenant: str = ""
    priority: int = 0
    """Smaller is more urgent."""
    is_batch: bool = False
    """Of batch class: served from what others leave of each step, and first to give way."""
    deadline_s: float | None = None
    """When the reply should be complete."""
    adapter: str = ""
    cache_salt: str = ""
    """Prefixes are shared only between requests with the same salt (and adapter)."""

    @property
    def prompt_top(self) -> int:
        """Most probable tokens to report beside each scored one."""
        return (self.sampling.num_logprobs or 0) if self.num_prompt_top is None else self.num_prompt_top
