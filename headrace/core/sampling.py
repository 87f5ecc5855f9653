"""How the next token of a sequence is chosen."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from headrace.core.errors import InvalidRequest

GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of one request's sampling, validated once here.

    The order of operations is fixed: penalties, DRY, logit bias, the request's grammar, mask of `stop_token_ids` while
    fewer than `min_tokens` are generated, temperature, top-k, typical-p, top-p, min-p, XTC. A temperature below
    `GREEDY_BELOW` is greedy (the most probable token, the smallest id among equals): dividing by it would only
    overflow. The mask never takes the last token that is left. Reported logprobs are of the raw distribution, before
    all of these.

    Raises `InvalidRequest` naming the parameter, its value and the allowed range.
    """

    max_tokens: int | None = None
    """Most tokens to generate; None: until the context (or the KV pool) is full."""
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    """Keep the tokens whose surprise is closest to the entropy, as many as sum to this (Meister et al. 2022)."""
    xtc_probability: float = 0.0
    """How often "exclude top choices" (p-e-w) is applied: whether at a position is a pure function of the seed."""
    xtc_threshold: float = 0.1
    """It drops all tokens of at least this probability but the least probable of them."""
    dry_multiplier: float = 0.0
    """0: no DRY penalty; see `headrace.executor.dry`."""
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    """Repeats of fewer tokens cost nothing."""
    dry_range: int = 0
    """Most tokens looked back; 0: all."""
    dry_breakers: frozenset[int] = frozenset()
    """Tokens that no repeat reaches over."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, value added to its logit), each id once."""
    seed: int = 0
    """Randomness is a pure function of (seed, choice index, position): see `headrace.core.randomness`."""
    stop_token_ids: frozenset[int] = frozenset()
    """Generation ends after one of these; the model's end-of-sequence ids are among them unless ignored. Any
    iterable of ids may be given."""
    num_logprobs: int | None = None
    """None: none; 0: of the sampled token; k: also of the k most probable tokens."""
    is_plain: bool = field(init=False, repr=False, compare=False)
    """Greedy, and nothing but the logits decides: no penalty, bias or early mask, and no logprobs wanted."""

    def __post_init__(self) -> None:
        def require(ok: bool, name: str, allowed: str) -> None:
            if not ok:
                value = getattr(self, name)
                raise InvalidRequest("invalid_value", f"{name} is {value!r}; it must be {allowed}.", param=name)

        require(self.max_tokens is None or self.max_tokens >= 0, "max_tokens", "at least 0")
        require(self.min_tokens >= 0, "min_tokens", "at least 0")
        require(_within(self.temperature, 0.0, 100.0), "temperature", "between 0 and 100")
        require(self.top_k >= 0, "top_k", "at least 0 (0 keeps all tokens)")
        require(_within(self.top_p, 0.0, 1.0) and self.top_p > 0, "top_p", "above 0 and at most 1")
        require(_within(self.min_p, 0.0, 1.0), "min_p", "between 0 and 1")
        require(_within(self.typical_p, 0.0, 1.0) and self.typical_p > 0, "typical_p", "above 0 and at most 1")
        require(_within(self.xtc_probability, 0.0, 1.0), "xtc_probability", "between 0 and 1")
        require(
            _within(self.xtc_threshold, 0.0, 1.0) and self.xtc_threshold > 0, "xtc_threshold", "above 0 and at most 1"
        )
        require(_within(self.dry_multiplier, 0.0, 100.0), "dry_multiplier", "between 0 and 100")
        require(_within(self.dry_base, 1.0, 10.0), "dry_base", "between 1 and 10")
        require(self.dry_allowed_length >= 1, "dry_allowed_length", "at least 1")
        require(self.dry_range >= 0, "dry_range", "at least 0 (0 looks at all tokens)")
        require(_within(self.presence_penalty, -2.0, 2.0), "presence_penalty", "between -2 and 2")
        require(_within(self.frequency_penalty, -2.0, 2.0), "frequency_penalty", "between -2 and 2")
        require(
            _within(self.repetition_penalty, 0.01, 100.0),
            "repetition_penalty",
            "between 0.01 and 100",
        )
        require(all(math.isfinite(bias) for _, bias in self.logit_bias), "logit_bias", "finite numbers")
        require(-(2**63) <= self.seed < 2**64, "seed", "a 64-bit integer")
        require(self.num_logprobs is None or self.num_logprobs >= 0, "num_logprobs", "at least 0, or None")
        object.__setattr__(self, "stop_token_ids", frozenset(self.stop_token_ids))  # asked once per token: no lists
        object.__setattr__(self, "dry_breakers", frozenset(self.dry_breakers))
        shaped = (
            self.has_penalties or self.has_dry or self.logit_bias or self.min_tokens or self.num_logprobs is not None
        )
        object.__setattr__(self, "is_plain", self.is_greedy and not shaped)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def has_dry(self) -> bool:
        return self.dry_multiplier != 0.0


def _within(value: float, low: float, high: float) -> bool:
    return low <= value <= high  # False for NaN
