"""What one step does: parallel arrays over its tokens and its readouts."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from headrace.core.cache import Copy
from headrace.core.sequence import Sequence


class ReadoutKind(IntEnum):
    """What is read from the model's output at a row."""

    SAMPLE = 0
    """Sample the next token of the readout's sequence."""
    SCORE = 1
    """The logprob of a given target token."""


@dataclass(slots=True)
class Span:
    """`count` consecutive tokens of a sequence, from its position `start`; their rows begin at `first_row`."""

    sequence: Sequence
    start: int
    count: int
    first_row: int
    tables: tuple[array, ...]
    """Per cache group, the block ids of the sequence: entry i holds tokens [i * block_size, (i + 1) * block_size).
    A STATE group's table is (block to read the state from, block to write it to); see `NO_BLOCK`.
    These are the live tables: an executor reads them in `launch` and not later."""
    first_readout: int = 0
    """Its readouts lie together: `num_scores` SCOREs, then, if `is_sampled`, a SAMPLE of the sequence and of each
    rider, or with drafts `1 + num_drafts` SAMPLEs of the sequence."""
    num_scores: int = 0
    is_sampled: bool = False
    riders: tuple[Sequence, ...] = ()
    """Sequences forked off this one in this step: the same tokens count as theirs."""
    num_drafts: int = 0
    """The last rows of the span are guesses at tokens that the sequence does not have yet; the row before them and each
    of them has a SAMPLE. A guess is right when the row before it samples it: `commit` keeps the rows up to the first
    wrong one, so what comes out is what a step for each token would have sampled. Such a sequence has nothing else in
    flight, and no riders."""
    unsplittable: bool = False
    """The executor must compute all tokens of the span in one pass (bidirectional attention)."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Rows of a sequence whose hidden states are summed up. They are no readouts: no logits are made of them."""

    sequence: Sequence
    first_row: int
    count: int


class Chunks(Protocol):
    """How a prompt is read, and its reply begun, by the steps that one plan stands for."""

    step_budget: int | None
    """Of the latest step asked for, if it has read the prompt."""

    def take(self, step: int) -> tuple[int, int] | None:
        """(Start, count) of the tokens that the plan's `step`th step reads, the first one being 0. None: the plan does
        not stand for that step. Steps are asked for in turn, each only if it will be taken: where it is the prompt's
        last one, the plan gets a readout for it, behind the others."""
        ...


class StepPlan:
    """Tokens to compute and rows to read out, in the order of the spans.

    Per token (row): `token_ids`, `positions`, `parents`. An id below zero, -1 - r, stands for the token that
    readout r of the previous plan samples (overlapped steps). `parents` is the row of the token that precedes
    this one within the step, or `IN_CACHE` when that is the last token before the span: a chain by default, a tree
    when drafts are verified. Rows lie in the cache at start + (row - first_row), whatever their position.

    Per readout: `readout_rows`, `readout_kinds`, `readout_targets` (SCORE: the token id), `readout_sequences`.
    """

    IN_CACHE = -1

    __slots__ = (
        "budget",
        "chunks",
        "copies",
        "has_drafts",
        "has_unknown",
        "horizon",
        "num_drafts",
        "parents",
        "pools",
        "positions",
        "readout_kinds",
        "readout_rows",
        "readout_sequences",
        "readout_targets",
        "spans",
        "step",
        "token_ids",
    )

    def __init__(self, step: int, budget: int) -> None:
        self.step = step
        self.budget = budget
        """Tokens this plan may still take up."""
        self.spans: list[Span] = []
        self.token_ids = array("i")
        self.positions = array("i")
        self.parents = array("i")
        self.readout_rows = array("i")
        self.readout_kinds = array("b")
        self.readout_targets = array("i")
        self.readout_sequences: list[Sequence] = []
        self.copies: list[Copy] = []
        self.pools: list[Pool] = []
        self.has_drafts = False
        """Some span is a tree. Whoever gives a row another parent than the row before it sets this; a chain of drafts
        does not."""
        self.has_unknown = False
        """Some token is in flight: its id is below zero."""
        self.num_drafts = 0
        """Rows that are guesses: see `Span.num_drafts`."""
        self.horizon = 1
        """Steps this plan may stand for if nobody comes or is aborted: the plans that would follow differ from it in
        nothing but that each sequence has a token more, and one that reads its prompt the next of `chunks`. Only an
        executor that asked for it makes use of it."""
        self.chunks: Chunks | None = None

    @property
    def is_empty(self) -> bool:
        return not self.spans

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def add_readout(self, row: int, kind: ReadoutKind, sequence: Sequence, target: int = -1) -> int:
        """Index of the new readout."""
        index = len(self.readout_rows)
        self.readout_rows.append(row)
        self.readout_kinds.append(kind)
        self.readout_targets.append(target)
        self.readout_sequences.append(sequence)
        return index
