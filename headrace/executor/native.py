"""The executor of the native backend: a plan becomes arrays, one native call computes and samples."""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache

import numpy as np

from headrace.backends.inputs import BatchInputs
from headrace.backends.native.model import NUMBERS, NativeModel, Readouts
from headrace.core.grammar import Matcher
from headrace.core.plan import ReadoutKind, StepPlan
from headrace.core.protocols import Pending
from headrace.core.randomness import uniform
from headrace.core.result import StepResult, TokenLogprob
from headrace.core.sequence import Sequence
from headrace.executor.constraints import Mask, follow, mask_of, matcher_at, words_of
from headrace.executor.dry import dry_penalties
from headrace.executor.history import history_at
from headrace.executor.local import Finished, pooled_sum
from headrace.executor.sampler import xtc_threshold


class NativeExecutor:
    """Runs plans one after the other: in `launch` itself, or overlapped, on a thread of its own."""

    def __init__(self, model: NativeModel, vocab_size: int, *, overlapped: bool) -> None:
        """`vocab_size`: tokens the tokenizer knows; a checkpoint's padding beyond them is never read."""
        self._model = model
        self._vocab_size = vocab_size
        self._thread = ThreadPoolExecutor(1, "headrace-step") if overlapped else None
        self._last_tokens: list[int] = []
        # Of its own: another engine of this process may run a step at the same time.
        self._plain_readouts = lru_cache(maxsize=16)(_plain_readouts)

    @property
    def backend(self) -> NativeModel:
        return self._model

    def launch(self, plan: StepPlan) -> Pending:
        step = _Step(plan)
        if self._thread is None:
            return Finished(self._run(step))
        future: Future[StepResult] = self._thread.submit(self._run, step)
        return future

    def _run(self, step: _Step) -> StepResult:
        start_s = time.perf_counter()
        inputs = step.inputs.with_previous(self._last_tokens) if step.has_unknown else step.inputs
        self._model.apply(step.copies)
        matchers: dict[int, Matcher] = {}
        asking = [
            readout
            for readout, (kind, sequence) in enumerate(zip(step.kinds, step.sequences, strict=True))
            if kind != SAMPLE or not sequence.is_plain
        ]
        if asking:
            readouts = _readouts(step, asking, inputs, self._vocab_size, matchers)
        else:
            readouts = self._plain_readouts(len(step.sequences), self._vocab_size)
        self._model.step(inputs, readouts)
        tokens = readouts.tokens.tolist()
        forced, errors = follow(matchers, step.sequences, tokens) if matchers else (None, None)
        if tokens and min(tokens) < 0:
            errors = (errors or {}) | {readout: NO_TOKEN for readout, token in enumerate(tokens) if token < 0}
            tokens = [max(token, 0) for token in tokens]  # a plan under way may name it
        self._last_tokens = tokens
        pooled = []
        if step.pools:
            pooled = [pooled_sum(self._model.hidden(pool.first_row, pool.count)) for pool in step.pools]
        return StepResult(tokens, _logprobs(readouts), time.perf_counter() - start_s, forced, errors, pooled)


class _Step:
    """What a step needs of its plan, copied: the plan's tables go on changing."""

    __slots__ = ("copies", "has_unknown", "inputs", "kinds", "pools", "rows", "sequences", "targets")

    def __init__(self, plan: StepPlan) -> None:
        self.inputs = BatchInputs.from_plan(plan)
        self.has_unknown = plan.has_unknown
        self.copies = plan.copies
        self.kinds = plan.readout_kinds
        self.targets = plan.readout_targets
        self.sequences = plan.readout_sequences
        self.rows = plan.readout_rows
        self.pools = plan.pools


def _readouts(
    step: _Step, asking: list[int], inputs: BatchInputs, vocab_size: int, matchers: dict[int, Matcher]
) -> Readouts:
    """What to ask: more than the largest logit in the readouts `asking`. `matchers` gets those of the readouts that
    have one."""
    count = len(step.sequences)
    plain = _plain_readouts(count, vocab_size)
    masks: list[Mask] = []
    numbers, max_top = plain.numbers, -1
    lists, kinds = _IdLists(), step.kinds
    for readout in asking:
        sequence = step.sequences[readout]
        request = sequence.request
        params = request.sampling
        if kinds[readout] == SAMPLE:
            row = step.rows[readout]
            position = int(inputs.positions[row]) + 1
            if request.grammar is not None:
                matcher = matchers[readout] = matcher_at(sequence, position, int(inputs.token_ids[row]))
                plain.mask_rows[readout] = len(masks)
                masks.append(mask_of(matcher, sequence, position, vocab_size))
            if not params.is_greedy:
                draw = uniform(params.seed, sequence.choice, position)
                numbers[readout, :5] = (params.temperature, params.top_k, params.top_p, params.min_p, draw)
                if params.typical_p < 1.0 or params.xtc_probability > 0.0:
                    numbers[readout, 8:] = (params.typical_p, xtc_threshold(params, sequence.choice, position))
            penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
            numbers[readout, 5:8] = penalties
            lists.skip_to(readout)
            history = history_at(sequence, inputs, row) if params.has_penalties or params.has_dry else ()
            lists.add_of(sequence, position, history, vocab_size)
            wanted = -1 if params.num_logprobs is None else params.num_logprobs
        else:
            wanted = sequence.request.prompt_top
        plain.num_top[readout] = wanted
        max_top = max(max_top, wanted)
    lists.skip_to(count)
    width = max(max_top, 0)
    return replace(
        plain,
        targets=np.array(step.targets, np.int32),
        ids=np.array(lists.ids, np.int32),
        values=np.array(lists.values, np.float64),
        starts=np.array(lists.starts, np.int32),
        masks=np.array(masks) if masks else plain.masks,
        top_ids=np.zeros((count, width), np.int32),
        top_logprobs=np.zeros((count, width)),
        has_logprobs=max_top >= 0,
    )


def _plain_readouts(count: int, vocab_size: int) -> Readouts:
    """Of a step whose rows are all plain, as nearly all are. An executor uses them again: one step runs at a time, and
    its tokens are read before the next."""
    return Readouts(
        vocab_size=vocab_size,
        targets=np.full(count, -1, np.int32),
        num_top=np.full(count, -1, np.int32),
        numbers=np.zeros((count, len(NUMBERS))),
        ids=np.empty(0, np.int32),
        values=np.empty(0),
        starts=np.zeros(NUM_LISTS * count + 1, np.int32),
        mask_rows=np.full(count, -1, np.int32),
        masks=np.empty((0, words_of(vocab_size)), np.uint32),
        tokens=np.empty(count, np.int32),
        logprobs=np.zeros(count),
        ranks=np.zeros(count, np.int32),
        top_ids=np.zeros((count, 0), np.int32),
        top_logprobs=np.zeros((count, 0)),
        has_logprobs=False,
    )


NUM_LISTS = 4
NO_TOKEN = "no token can be sampled: the model's numbers are not finite, or nothing is allowed"
SAMPLE = int(ReadoutKind.SAMPLE)  # looking up an enum's member takes 0.1 us


class _IdLists:
    """Lists of (id, value), one after the other, as `Readouts` wants them."""

    def __init__(self) -> None:
        self.ids = array("i")
        self.values = array("d")
        self.starts = array("i", [0])

    def skip_to(self, readout: int) -> None:
        """The lists of all readouts before this one that have none yet are empty."""
        num_missing = NUM_LISTS * readout + 1 - len(self.starts)
        self.starts.extend(array("i", [len(self.ids)]) * num_missing)

    def add(self, ids: Collection[int] = (), values: Collection[float] | None = None) -> None:
        self.ids.extend(ids)
        self.values.extend(values if values is not None else (0.0,) * len(ids))
        self.starts.append(len(self.ids))

    def add_of(self, sequence: Sequence, position: int, history: SequenceOf[int], vocab_size: int) -> None:
        """A sampled row's four: ids seen, ids of the reply with their counts, biased ids, banned ids. `history`: the
        tokens before `position`; only needed with penalties and DRY."""
        params = sequence.request.sampling
        if params.has_penalties:
            generated = Counter(history[sequence.num_prompt :])
            self.add(set(history))
            self.add(generated.keys(), generated.values())
        else:
            self.add()
            self.add()
        biases = params.logit_bias
        if params.has_dry:
            dry = dry_penalties(history, params)
            biases = (*((token, -penalty) for token, penalty in dry.items()), *biases)
        self.add([token for token, _ in biases], [bias for _, bias in biases])
        # As in the reference sampler, a ban that would leave no token does not hold. A grammar's mask has it already.
        is_early = position - sequence.num_prompt < params.min_tokens and sequence.request.grammar is None
        self.add(params.stop_token_ids if is_early and len(params.stop_token_ids) < vocab_size else ())


def _logprobs(readouts: Readouts) -> list[TokenLogprob | None]:
    if not readouts.has_logprobs:
        return [None] * len(readouts.tokens)
    result: list[TokenLogprob | None] = []
    for index, num_top in enumerate(readouts.num_top.tolist()):
        if num_top < 0:
            result.append(None)
            continue
        top = zip(
            readouts.top_ids[index, :num_top].tolist(), readouts.top_logprobs[index, :num_top].tolist(), strict=True
        )
        result.append(
            TokenLogprob(
                int(readouts.tokens[index]), float(readouts.logprobs[index]), int(readouts.ranks[index]), tuple(top)
            )
        )
    return result
