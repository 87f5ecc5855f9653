"""What one API call may ask for; checked at the edge, before anything is tokenized."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Caps per call. Defaults are generous for people and small enough that no single call can hurt the others."""

    max_choices: int = 16
    """`n`. The engine refuses more than can run at once."""
    max_logprobs: int = 20
    """`top_logprobs` (chat) and `logprobs` (completions)."""
    max_stops: int = 16
    """`stop`, and `dry_sequence_breakers`."""
    max_stop_chars: int = 256
    max_logit_bias: int = 1024
    max_prompts: int = 64
    """Prompts in one completions call."""
    max_inputs: int = 256
    """Texts in one embeddings call."""
    max_body_bytes: int = 8 << 20
