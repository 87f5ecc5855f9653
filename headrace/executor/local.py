"""The executor of one process: batch inputs, copies, one Program run, sampling."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.backends.inputs import BatchInputs
from headrace.core.cache import Copy
from headrace.core.grammar import Matcher
from headrace.core.plan import ReadoutKind, StepPlan
from headrace.core.result import StepResult, TokenLogprob
from headrace.executor.constraints import follow, mask_of, matcher_at
from headrace.executor.history import history_at
from headrace.executor.sampler import SampleRow, sample, token_logprob


class Backend(Protocol):
    """A loaded program and its cache."""

    @property
    def numerics(self) -> str:
        """Names whatever shapes the bits of a block besides the weights: kernels, instruction set, format."""
        ...

    def apply(self, copies: Iterable[Copy]) -> None:
        """Copy whole blocks of the cache, in order."""
        ...

    def run(self, inputs: BatchInputs) -> Iterator[tuple[slice, NDArray[np.float32]]]:
        """Compute the step now; logits [rows, vocab] come in tiles of readouts, each valid until the next."""
        ...

    def hidden(self, first: int, count: int) -> NDArray[np.float32]:
        """Hidden states [count, width] of rows of the step that ran last: what the head multiplies by its matrix."""
        ...


class Finished:
    """A step that was computed in `launch`."""

    __slots__ = ("_result",)

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        return self._result


def pooled_sum(hidden: NDArray[np.float32]) -> array[float]:
    return array("d", hidden.sum(axis=0, dtype=np.float64).tobytes())


class LocalExecutor:
    """Computes each plan in `launch`, on the caller's thread.

    With depth 2 the plans are those of an overlapped run (tokens in flight are looked up here); nothing overlaps.
    """

    def __init__(self, backend: Backend, vocab_size: int) -> None:
        """`vocab_size`: tokens the tokenizer knows. Many checkpoints pad their vocabulary; those ids are never read."""
        self._backend = backend
        self._vocab_size = vocab_size
        self._last_tokens: list[int] = []

    @property
    def backend(self) -> Backend:
        return self._backend

    def launch(self, plan: StepPlan) -> Finished:
        start_s = time.perf_counter()
        inputs = BatchInputs.from_plan(plan, self._last_tokens)
        self._backend.apply(plan.copies)
        tokens: list[int] = []
        logprobs: list[TokenLogprob | None] = []
        matchers: dict[int, Matcher] = {}
        for rows, logits in self._backend.run(inputs):
            for readout, row_logits in zip(range(rows.start, rows.stop), logits[:, : self._vocab_size], strict=True):
                token, logprob = self._read(plan, inputs, readout, row_logits, matchers)
                tokens.append(token)
                logprobs.append(logprob)
        self._last_tokens = tokens
        forced, errors = follow(matchers, plan.readout_sequences, tokens) if matchers else (None, None)
        pooled = [pooled_sum(self._backend.hidden(pool.first_row, pool.count)) for pool in plan.pools]
        return Finished(StepResult(tokens, logprobs, time.perf_counter() - start_s, forced, errors, pooled))

    @staticmethod
    def _read(
        plan: StepPlan,
        inputs: BatchInputs,
        readout: int,
        logits: NDArray[np.float32],
        matchers: dict[int, Matcher],
    ) -> tuple[int, TokenLogprob | None]:
        sequence = plan.readout_sequences[readout]
        params = sequence.request.sampling
        kind = ReadoutKind(plan.readout_kinds[readout])
        if kind is ReadoutKind.SCORE:
            target = plan.readout_targets[readout]
            return target, token_logprob(logits, target, sequence.request.prompt_top)
        row = plan.readout_rows[readout]
        position = plan.positions[row]
        history = history_at(sequence, inputs, row) if params.has_penalties or params.has_dry else None
        allowed = None
        if sequence.request.grammar is not None:
            matcher = matchers[readout] = matcher_at(sequence, position + 1, int(inputs.token_ids[row]))
            mask = mask_of(matcher, sequence, position + 1, len(logits))
            allowed = np.unpackbits(mask.view(np.uint8), bitorder="little", count=len(logits)).astype(bool)
        token = sample(logits, SampleRow(params, sequence.choice, position + 1, sequence.num_prompt, history, allowed))
        logprob = None if params.num_logprobs is None else token_logprob(logits, token, params.num_logprobs)
        return token, logprob
