"""What goes back to a client after a step."""

from __future__ import annotations

from array import array
from typing import NamedTuple

from headrace.core.result import TokenLogprob
from headrace.core.sequence import FinishReason


class TokenEvent(NamedTuple):  # made for every token: half the price of a frozen dataclass
    """New tokens of one choice. The last event of a choice has a `finish_reason`, and may bring no token."""

    request_id: str
    choice: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    """One per token where the request asked for them."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """Of prompt tokens 1, 2, ... in order; comes in pieces, before the first token."""
    finish_reason: FinishReason | None = None
    num_cached: int = 0
    """Prompt tokens found in the prefix tree at admission."""
    time_s: float = 0.0
    queued_s: float = 0.0
    """From the request's arrival to its admission."""
    error: str | None = None
    """With the finish reason ERROR: what went wrong, for the client."""
    pooled: array[float] | None = None
    """Sum of hidden states of prompt tokens; comes in pieces that add up, before the end."""
    num_drafts: int = 0
    """Drafts verified in this step: the tokens but one are those that were right."""
