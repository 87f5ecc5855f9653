"""Several steps of one kind at once, for an executor that need not compute them.

Most steps are like the one before: the same sequences, a token more each, and maybe one that reads its prompt and
takes what they leave of the budget. A plan says for how many steps that will hold if nobody comes (its `horizon`). An
executor that only predicts time takes some of them in one go, and `commit` replays the bookkeeping of all but the last
here. What comes out is what single steps would have given: the same events at the same times, the same blocks,
evictions and counters. `tests/pure/test_jump.py` holds it to that.
"""

from __future__ import annotations

from collections.abc import Sequence as Row

from headrace.core.events import TokenEvent
from headrace.core.plan import ReadoutKind, Span, StepPlan
from headrace.core.result import EarlierStep
from headrace.core.sequence import Sequence
from headrace.engine.budget import TokenBudget
from headrace.engine.policies import Policy
from headrace.engine.state import Counters, EngineState


class Reading:
    """The chunks of a prompt, each of what the budget of its step leaves beside streams: `headrace.core.plan.Chunks`.

    The prompt's last one is among them if what it leaves is of use to nobody.
    """

    def __init__(self, plan: StepPlan, span: Span, budget: TokenBudget, *, may_start: bool) -> None:
        self.span = span
        self.path = [span.start, span.start + span.count]
        """Tokens computed before the first step, and after each that was asked for."""
        self.streams = [stream for stream in plan.spans if stream is not span]
        self.step_budget = 0
        self._num_keys = sum([stream.start for stream in self.streams])
        self._plan = plan
        self._budget = budget
        self._may_start = may_start

    def take(self, step: int) -> tuple[int, int] | None:
        start, num_streams, sequence = self.path[-1], len(self.streams), self.span.sequence
        step_budget = self._budget.beside(num_streams, self._num_keys + step * num_streams, start)
        count, num_left = step_budget - num_streams, sequence.num_prompt - start
        if count < 2 or num_left < 2:
            return None
        if num_left <= count:
            has_more = bool(sequence.unborn) or not sequence.num_prompt == sequence.num_tokens < sequence.limit
            if has_more or (num_left < count and self._may_start):
                return None
            count = num_left
            self._sample()
        self.step_budget = step_budget
        self.path.append(start + count)
        return start, count

    def _sample(self) -> None:
        """The step is the prompt's last. Rows are nobody's concern who takes several steps at once."""
        span, sequence = self.span, self.span.sequence
        span.is_sampled = True
        span.first_readout = sequence.readout = self._plan.add_readout(span.first_row, ReadoutKind.SAMPLE, sequence)
        sequence.num_sampling += 1


def look_ahead(plan: StepPlan, state: EngineState, budget: TokenBudget, most: int, *, may_start: bool) -> None:
    """Set the plan's horizon, at most `most`: for how many steps all running sequences go on as they do in this one,
    each with a token or, at most one of them, with a chunk of its prompt, and nothing else happens.

    `may_start`: somebody waits, and will start when the others leave some of the budget. All that is decided stays
    decided, the caller has made sure, until somebody comes, starts or ends. No sequence ends before the last of these
    steps, and memory surely suffices without a preemption.
    """
    if len(state.running) != len(plan.spans) or plan.pools or (may_start and plan.budget > 0):
        return
    if state.waiting and plan.spans[-1].sequence.request.is_batch:  # who gives way to those who wait, as soon as it can
        return
    reader: Span | None = None
    for span, running in zip(plan.spans, state.running, strict=True):
        sequence = span.sequence
        if sequence is not running:  # admitted in this step: from the next on it has its place in the order
            return
        if span.count > 1:
            if reader is not None or not _reads_on(span, plan, state):
                return
            reader = span
            continue
        # In flight twice: an overlapped step. Not sampled: its end has come, or its token is scored only.
        if not span.is_sampled or span.num_scores or sequence.num_in_flight != 1 or sequence.num_sampling != 1:
            return
        request = sequence.request
        sampling = request.sampling
        if sampling.stop_token_ids or request.grammar is not None or sampling.num_logprobs is not None:
            return  # what is sampled decides how it goes on, or is told with each token
        remaining = sequence.limit - len(sequence.tokens)
        most = min(most, remaining)
    if most <= 1:
        return
    plan.horizon = state.memory.num_steps_within(plan.readout_sequences, most)
    if reader is not None:
        plan.chunks = Reading(plan, reader, budget, may_start=may_start)


def _reads_on(span: Span, plan: StepPlan, state: EngineState) -> bool:
    """The prompt has taken all that was left, will do so in the next step, and has its memory already."""
    sequence = span.sequence
    if plan.budget > 0 or span.start + span.count >= sequence.num_prompt or sequence.num_to_score:
        return False
    return state.memory.has_room_for(sequence, sequence.num_prompt)


def take_earlier(
    plan: StepPlan,
    earlier: Row[EarlierStep],
    *,
    state: EngineState,
    policy: Policy,
    counters: Counters,
) -> list[TokenEvent]:
    """What `commit`, and `schedule` after it, would have done in each of these steps. The plan becomes the last one."""
    reading = plan.chunks
    assert reading is None or isinstance(reading, Reading)
    streams = plan.spans if reading is None else reading.streams
    sequences, num_steps = [span.sequence for span in streams], len(earlier)
    heads = [
        (sequence.tokens.append, sequence.request_id, sequence.choice, sequence.num_cached, sequence.queued_s)
        for sequence in sequences
    ]
    events: list[TokenEvent] = []
    add, new, event_type = events.append, tuple.__new__, TokenEvent
    for tokens, end_s in earlier:
        for (append, id, choice, num_cached, queued_s), token in zip(heads, tokens, strict=True):
            append(token)
            fields = (id, choice, (token,), (), (), None, num_cached, end_s, queued_s, None, None, 0)
            add(new(event_type, fields))
    paths: list[tuple[Sequence, Row[int]]] = []
    for span in plan.spans:
        path = range(span.start, span.start + num_steps + 2)
        paths.append((span.sequence, reading.path if reading is not None and span is reading.span else path))
    state.memory.advance(paths, num_steps)
    for sequence in sequences if policy.counts_tokens else ():
        policy.served(sequence, 0, num_steps)
    counters.steps += num_steps
    counters.computed_tokens += sum([path[-1] - path[1] for _, path in paths])
    counters.generated_tokens += num_steps * len(sequences)
    if reading is not None:
        start, end = reading.path[-2:]
        reading.span.start, reading.span.count = start, end - start
    return events
