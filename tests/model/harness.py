"""Runs one sequence through a backend with hand-made plans."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from headrace.backends.inputs import BatchInputs
from headrace.backends.kv_store import KVStore
from headrace.backends.reference import ReferenceModel
from headrace.core.cache import NO_BLOCK, CacheKind
from headrace.core.plan import ReadoutKind, Span, StepPlan
from headrace.models.loaders.checkpoint import open_checkpoint
from headrace.models.registry import describe, open_weights
from headrace.program.cache import cache_groups


def load(path: Path | str) -> ReferenceModel:
    checkpoint = open_checkpoint(path)
    program = describe(checkpoint).program
    weights = open_weights(checkpoint, program)
    assert weights.unused == ()
    return ReferenceModel.load(program, weights)


def make_store(model: ReferenceModel, num_blocks: int, block_size: int = 16) -> KVStore:
    groups = cache_groups(model.program, block_size, checkpoint_interval=block_size)
    return KVStore(model.program, groups, [num_blocks] * len(groups))


class OneSequence:
    """A sequence that computes tokens in the chunks it is told to; its blocks lie scattered in the pool."""

    def __init__(
        self,
        model: ReferenceModel,
        max_tokens: int = 256,
        *,
        store: KVStore | None = None,
        blocks: Sequence[int] | None = None,
    ) -> None:
        self.model = model
        num_blocks = -(-max_tokens // 16)
        self.store = store or make_store(model, num_blocks + 1)
        # Backwards, and block 0 unused: a table of rising blocks would hide mistakes.
        self.blocks = list(range(num_blocks, 0, -1)) if blocks is None else list(blocks)
        self.num_computed = 0

    def tables(self) -> tuple[array, ...]:
        state = self.blocks[0]
        states = array("i", [state if self.num_computed else NO_BLOCK, state])
        kinds = [spec.kind for spec in self.model.program.cache]
        return tuple(states if kind is CacheKind.STATE else array("i", self.blocks) for kind in kinds)

    def add_to(self, plan: StepPlan, tokens: Sequence[int], readout_rows: Iterable[int]) -> None:
        """A span of the plan that computes `tokens`; `readout_rows` count from the span's first row."""
        first_row = plan.num_tokens
        sequence: Any = SimpleNamespace()
        plan.spans.append(Span(sequence, self.num_computed, len(tokens), first_row, self.tables()))
        plan.token_ids.extend(tokens)
        plan.positions.extend(range(self.num_computed, self.num_computed + len(tokens)))
        plan.parents.extend([StepPlan.IN_CACHE, *range(first_row, first_row + len(tokens) - 1)])
        for row in readout_rows:
            plan.add_readout(first_row + row, ReadoutKind.SAMPLE, sequence)
        self.num_computed += len(tokens)

    def compute(self, tokens: Sequence[int]) -> np.ndarray:
        """Log-probabilities [tokens, vocab] of what follows each token."""
        return np.concatenate([logprobs for _, logprobs in self.tiles(tokens, range(len(tokens)))])

    def tiles(self, tokens: Sequence[int], readout_rows: Sequence[int]) -> Iterator[tuple[Sequence[int], np.ndarray]]:
        """(rows, log-probabilities [rows, vocab]) piece by piece: all at once may not fit."""
        plan = StepPlan(step=0, budget=0)
        self.add_to(plan, tokens, readout_rows)
        for readouts, logits in self.model.run(BatchInputs.from_plan(plan), self.store):
            yield readout_rows[readouts], log_softmax(logits)


def compute_together(parts: Sequence[tuple[OneSequence, Sequence[int]]]) -> list[np.ndarray]:
    """One step of several sequences of one store; log-probabilities of each."""
    plan = StepPlan(step=0, budget=0)
    for sequence, tokens in parts:
        sequence.add_to(plan, tokens, range(len(tokens)))
    first, _ = parts[0]
    tiles = first.model.run(BatchInputs.from_plan(plan), first.store)
    logprobs = log_softmax(np.concatenate([logits for _, logits in tiles]))
    return np.split(logprobs, np.cumsum([len(tokens) for _, tokens in parts])[:-1])


def in_chunks(sequence: OneSequence, tokens: Sequence[int], size: int) -> np.ndarray:
    return np.concatenate([sequence.compute(tokens[i : i + size]) for i in range(0, len(tokens), size)])


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def prompt_logprobs(logprobs: np.ndarray, ids: Sequence[int]) -> np.ndarray:
    """Of ids[1:], each after those before it."""
    return logprobs[np.arange(len(ids) - 1), ids[1:]]
