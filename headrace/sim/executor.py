"""An executor that computes nothing: a step takes the time that a cost model predicts, on a clock of its own."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping

from headrace.core.clock import ManualClock
from headrace.core.plan import ReadoutKind, StepPlan
from headrace.core.result import EarlierStep, StepResult, TokenLogprob
from headrace.core.work import StepTimes, StepWork

NO_STEPS: tuple[EarlierStep, ...] = ()


class SimExecutor:
    """Plans run one after the other, each from its launch or the end of the one before, whichever is later.

    Asking for a result moves the clock to the end of the step. Where the plan allows it several steps are taken at
    once, up to the one during which the clock reaches `until_s`. A sampled token is made up: the same for all of a
    sequence, another for each, so that replies fill blocks of their own; and the last of a reply whose length is
    known here and not to the engine is `stop_token`.
    """

    def __init__(
        self, clock: ManualClock, times: StepTimes, vocab_size: int, lengths: Mapping[str, int] | None = None
    ) -> None:
        """`lengths`: request id -> tokens of each of its replies."""
        self.clock = clock
        self.times = times
        self.until_s = math.inf
        """When something else happens, which a jump must not run past: set by whoever drives the engine."""
        self.stop_token = vocab_size - 1
        self._vocab_size = vocab_size if lengths is None else vocab_size - 1
        self._lengths = lengths
        self._free_s = clock.now()
        """When the last launched step ends."""

    def launch(self, plan: StepPlan) -> _Pending:
        return _Pending(self, plan, StepWork.of(plan), self.clock.now())

    def run(self, plan: StepPlan, work: StepWork, launched_s: float) -> StepResult:
        clock, seconds = self.clock, self.times.seconds
        tokens = self._tokens(plan)
        compute_s = seconds(work)
        end_s = max(launched_s, self._free_s) + compute_s
        earlier: list[EarlierStep] = []
        chunks, chunk = plan.chunks, None
        for step in range(1, plan.horizon):
            if end_s >= self.until_s or (chunks is not None and (chunk := chunks.take(step)) is None):
                break
            earlier.append(EarlierStep(tokens, end_s))
            if len(plan.readout_rows) > len(tokens):  # a prompt's last chunk
                tokens = self._tokens(plan)
            compute_s = seconds(work.later(step, len(tokens), chunk))
            end_s += compute_s
        self._free_s = end_s
        clock.advance_to(end_s)
        no_logprobs: list[TokenLogprob | None] = [None] * len(tokens)
        pooled = [array("d")] * len(plan.pools)
        return StepResult(tokens, no_logprobs, compute_s, pooled=pooled, earlier=earlier or NO_STEPS)

    def _tokens(self, plan: StepPlan) -> list[int]:
        if ReadoutKind.SCORE in plan.readout_kinds:
            rows = zip(plan.readout_kinds, plan.readout_targets, plan.readout_sequences, strict=True)
            return [
                target if kind == ReadoutKind.SCORE else sequence.id % self._vocab_size
                for kind, target, sequence in rows
            ]
        size, lengths = self._vocab_size, self._lengths
        if lengths is None:
            return [sequence.id % size for sequence in plan.readout_sequences]
        ends = lengths.get
        return [
            self.stop_token if len(one.tokens) - one.num_prompt + 1 >= ends(one.request.id, math.inf) else one.id % size
            for one in plan.readout_sequences
        ]


class _Pending:
    __slots__ = ("_executor", "_launched_s", "_plan", "_work")

    def __init__(self, executor: SimExecutor, plan: StepPlan, work: StepWork, launched_s: float) -> None:
        self._executor = executor
        self._plan = plan
        self._work = work
        self._launched_s = launched_s

    def result(self) -> StepResult:
        return self._executor.run(self._plan, self._work, self._launched_s)
