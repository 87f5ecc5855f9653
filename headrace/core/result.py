"""What one step produced."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of a token under the raw distribution, and the most probable tokens beside it."""

    token: int
    logprob: float
    rank: int = 0
    """Tokens that are strictly more probable; 0 is the argmax."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob), most probable first."""


class EarlierStep(NamedTuple):
    """A step that was taken on the way to the one that a result is of."""

    tokens: list[int]
    """Parallel to the readouts that the plan has had until then."""
    end_s: float
    """When it ended, on the engine's clock."""


class StepResult(NamedTuple):
    """Parallel to the plan's readouts. SAMPLE: the token sampled; SCORE: the target."""

    tokens: list[int]
    logprobs: list[TokenLogprob | None]
    """Present for SCORE and where the sequence asked for logprobs."""
    compute_s: float = 0.0
    """Time the executor spent on the step."""
    forced: Mapping[int, tuple[int, ...]] | None = None
    """Readout -> tokens that have to follow the one sampled, since its grammar allows nothing else."""
    errors: Mapping[int, str] | None = None
    """Readout -> why its sequence cannot go on; its token means nothing."""
    pooled: Sequence[array[float]] = ()
    """Parallel to the plan's pools: the sum of the hidden states, float64."""
    earlier: Sequence[EarlierStep] = ()
    """Where the executor has taken several of the steps that the plan stands for, up to its `horizon`: those before the
    last one, which all else here is of."""
