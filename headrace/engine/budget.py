"""How many tokens one step may compute."""

from __future__ import annotations

import math
from typing import Protocol

from headrace.core.plan import StepPlan
from headrace.core.sequence import Sequence
from headrace.engine.state import EngineState


class TokenBudget(Protocol):
    max_tokens: int
    """No step's budget is larger."""

    def tokens(self, state: EngineState, now: float) -> int: ...

    def observe(self, plan: StepPlan, compute_s: float) -> None:
        """A step has taken so long."""
        ...


class FixedBudget:
    """The same number each step."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens

    def tokens(self, state: EngineState, now: float) -> int:
        return self.max_tokens

    def observe(self, plan: StepPlan, compute_s: float) -> None:
        pass


class PacedBudget:
    """Prompts are read at the pace of the streams beside them.

    Where sequences are generating, a step that also reads prompts takes at most `target_s`, or without one `STRETCH`
    times as long as a step of the streams alone. Where none is, it takes up to `max_tokens`. What a step takes is
    learnt from steps:

        seconds(streams m, prompt tokens n) = streams_s + token_s * (m - num_streams) + token_s * n + pair_s * pairs

    `pairs` are the (query, key) pairs of the prompt tokens: late in a long prompt they are most of the cost.
    `streams_s` and `num_streams` are those of the latest steps without prompts and move a tenth of the way with each.
    `token_s` and `pair_s` are the least squares of relative errors in steps with prompts, the latest twenty or so. A
    step counts as at most twice what was expected of it, since a machine with other work has slow steps of its own.
    """

    STRETCH = 2.5
    """Below 3, so that steps stay within three times the usual in spite of errors."""
    LEAST = 16
    """Prompt tokens that a step may always read: all requests go on."""
    MOVE = 0.1
    FORGET = 0.95
    RIDGE = 0.01
    """Pull to the former coefficients: steps that are all alike do not tell tokens from pairs."""
    SLACK, SPREAD = 1.25, 3.0
    """Steps aim lower once `SPREAD` times the mean error would take them past `SLACK` times their target."""

    def __init__(self, max_tokens: int, target_s: float | None = None) -> None:
        self.max_tokens = max_tokens
        self.target_s = target_s
        self._streams_s: float | None = None
        self._num_streams = 0
        self._token_s: float | None = None
        self._pair_s = 0.0
        self._products = (0.0, 0.0, 0.0)
        """Of tokens by tokens, tokens by pairs, pairs by pairs."""
        self._targets = (0.0, 0.0)
        self._error = 0.0
        """Mean absolute relative error of predictions made before their step was seen."""

    def tokens(self, state: EngineState, now: float) -> int:
        if self._token_s is None or (self._streams_s is None and self.target_s is None):
            return self.max_tokens
        num_streams, first = 0, None
        for sequence in state.running:
            if sequence.num_computed >= sequence.num_prompt:
                num_streams += 1
            elif first is None:
                first = sequence
        if not num_streams:
            return self.max_tokens
        alone_s = self._seconds(num_streams)
        target_s = self.STRETCH * alone_s if self.target_s is None else self.target_s
        aim_s = target_s * min(1.0, self.SLACK / (1 + self.SPREAD * self._error))
        num_prompt = max(self.LEAST, self._affordable(aim_s - alone_s, first))
        return min(self.max_tokens, num_streams + num_prompt)

    def observe(self, plan: StepPlan, compute_s: float) -> None:
        if plan.num_drafts:
            return  # neither the streams alone nor prompts
        num_prompt = plan.num_tokens - len(plan.spans)
        if not num_prompt:  # a token for each
            # The move is from what was known of steps with so many streams.
            known = None if self._streams_s is None else self._seconds(len(plan.spans))
            self._streams_s, self._num_streams = self._moved(known, compute_s), len(plan.spans)
            return
        num_streams = num_tokens = num_pairs = 0
        for span in plan.spans:
            count = span.count
            if count == 1:
                num_streams += 1
            else:
                num_tokens += count
                num_pairs += count * span.start + count * (count + 1) // 2
        before_s = self._seconds(num_streams) if num_streams else 0.0
        if self._token_s is not None:
            expected_s = before_s + self._token_s * num_tokens + self._pair_s * num_pairs
            compute_s = min(compute_s, 2 * expected_s)
            self._error += self.MOVE * (abs(compute_s - expected_s) / expected_s - self._error)
        if compute_s > before_s:
            self._learn(num_tokens, num_pairs, compute_s - before_s, compute_s)

    def seconds(self, num_prompt: int, num_streams: int, context: int) -> float:
        """As a `StepCost`: of what steps have taken. A prompt is read from its start; what streams read is taken to be
        what it was in those."""
        prompt_s = (self._token_s or 0.0) * num_prompt + self._pair_s * num_prompt * (num_prompt + 1) / 2
        return prompt_s + (self._seconds(num_streams) if num_streams else 0.0)

    def _affordable(self, spare_s: float, first: Sequence | None) -> int:
        """Prompt tokens n, read from where `first` stands, with token_s * n + pair_s * (n * start + n^2 / 2) = spare_s;
        without one, from the start of a prompt."""
        assert self._token_s is not None
        if spare_s <= 0:
            return 0
        start = 0 if first is None else first.num_computed + first.num_in_flight
        linear, square = self._token_s + self._pair_s * (start + 0.5), self._pair_s / 2
        # The root in the form that holds for square = 0 as well.
        return math.floor(min(self.max_tokens, 2 * spare_s / (linear + math.sqrt(linear**2 + 4 * square * spare_s))))

    def _learn(self, num_tokens: int, num_pairs: int, share_s: float, compute_s: float) -> None:
        """`share_s`: of a step of `compute_s`, what its prompt tokens took."""
        if self._token_s is None:
            self._token_s = share_s / num_tokens
        keep, weight = self.FORGET, 1 / compute_s**2
        tt, tp, pp = self._products
        st, sp = self._targets
        tt = keep * tt + weight * num_tokens * num_tokens
        tp = keep * tp + weight * num_tokens * num_pairs
        pp = keep * pp + weight * num_pairs * num_pairs
        st = keep * st + weight * num_tokens * share_s
        sp = keep * sp + weight * num_pairs * share_s
        self._products, self._targets = (tt, tp, pp), (st, sp)
        more, ridge = 1 + self.RIDGE, self.RIDGE
        right_t, right_p = st + ridge * tt * self._token_s, sp + ridge * pp * self._pair_s
        determinant = more * more * tt * pp - tp * tp
        token_s = (more * pp * right_t - tp * right_p) / determinant
        pair_s = (more * tt * right_p - tp * right_t) / determinant
        if pair_s < 0:
            token_s, pair_s = st / tt, 0.0
        elif token_s < 0:
            token_s, pair_s = 0.0, sp / pp
        self._token_s, self._pair_s = token_s, pair_s

    def _seconds(self, num_streams: int) -> float:
        """Of streams alone; before any such step was seen, as if they were prompt tokens."""
        more_s = (self._token_s or 0.0) * (num_streams - self._num_streams)
        if self._streams_s is None:
            return more_s
        return max(self._streams_s + more_s, self._streams_s / 4)

    def _moved(self, known: float | None, seen: float) -> float:
        return seen if known is None else known + self.MOVE * (min(seen, 2 * known) - known)
