"""Several steps of one kind at once, for an executor that need not compute them.

Most steps are like the one before: the same sequences, a token more each, and maybe one that reads its prompt, takes
what they leave of the budget and then is one of them. A plan says for how many steps that will hold if nobody comes
(its `horizon`). An executor that only predicts time takes some of them in one go, and `commit` replays the bookkeeping
of all but the last here. What comes out is what single steps would have given: the same events at the same times, the
same blocks, evictions and counters. `tests/pure/test_jump.py` holds it to that.
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

    The prompt's last one is among them if what it leaves is of use to nobody; and if nobody may start, the tokens of
    the reply come behind it, one in a step.
    """

    def __init__(self, plan: StepPlan, span: Span, budget: TokenBudget, *, may_start: bool) -> None:
        self.span = span
        self.path = [span.start, span.start + span.count]
        """Tokens computed before the first step, and after each that was asked for."""
        self.streams = [stream for stream in plan.spans if stream is not span]
        self.step_budget: int | None = None
        self._num_keys = sum([stream.start for stream in self.streams])
        self._plan = plan
        self._budget = budget
        self._may_start = may_start

    def take(self, step: int) -> tuple[int, int] | None:
        start, sequence = self.path[-1], self.span.sequence
        if start >= sequence.num_prompt:
            return self._reply(start)
        num_streams, num_left = len(self.streams), sequence.num_prompt - start
        step_budget = self._budget.beside(num_streams, self._num_keys + step * num_streams, start)
        count = step_budget - num_streams
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

    def _reply(self, start: int) -> tuple[int, int] | None:
        """The token at `start` has been sampled; another one is, if the reply may have it."""
        sequence = self.span.sequence
        if self._may_start or not _is_plain(sequence) or start + 2 > sequence.limit:
            return None
        self.step_budget = None
        self.path.append(start + 1)
        return start, 1

    def _sample(self) -> None:
        """The step is the prompt's last. Rows are nobody's concern who takes several steps at once."""
        span, sequence = self.span, self.span.sequence
        span.is_sampled = True
        span.first_readout = sequence.readout = self._plan.add_readout(span.first_row, ReadoutKind.SAMPLE, sequence)
        sequence.num_sampling += 1


def look_ahead(plan: StepPlan, state: EngineState, budget: TokenBudget, most: int, *, may_start: bool) -> None:
    """Set the plan's horizon, at most `most`: for how many steps all running sequences go on as they do in this one,
    each with a token or, at most one of them, with a chunk of its prompt first, and nothing else happens.

    `may_start`: somebody waits, and will start when the others leave some of the budget. All that is decided stays
    decided, the caller has made sure, until somebody comes, starts or ends. No sequence ends before the last of these
    steps, and memory surely suffices without a preemption.
    """
    if len(state.running) != len(plan.spans) or plan.pools or (may_start and plan.budget > 0):
        return
    if state.waiting and plan.spans[-1].sequence.request.is_batch:  # who gives way to those who wait, as soon as it can
        return
    reader: Span | None = None
    growing = []  # (sequence, tokens from which on it has one more in each step)
    for span, running in zip(plan.spans, state.running, strict=True):
        sequence = span.sequence
        if sequence is not running:  # admitted in this step: from the next on it has its place in the order
            return
        if span.count > 1:
            if reader is not None or not _reads_on(span, plan, state, may_start=may_start):
                return
            reader = span
            growing.append((sequence, sequence.num_prompt))
            continue
        # In flight twice: an overlapped step. Not sampled: its end has come, or its token is scored only.
        if not span.is_sampled or span.num_scores or sequence.num_in_flight != 1 or sequence.num_sampling != 1:
            return
        if not _is_plain(sequence):
            return
        most = min(most, sequence.limit - len(sequence.tokens))
        growing.append((sequence, sequence.num_computed))
    if most <= 1:
        return
    plan.horizon = state.memory.num_steps_within(growing, most)
    if reader is not None:
        plan.chunks = Reading(plan, reader, budget, may_start=may_start)


def _is_plain(sequence: Sequence) -> bool:
    """How it goes on is not decided by what is sampled, and nothing but the token is told."""
    request = sequence.request
    sampling = request.sampling
    return not sampling.stop_token_ids and request.grammar is None and sampling.num_logprobs is None


def _reads_on(span: Span, plan: StepPlan, state: EngineState, *, may_start: bool) -> bool:
    """The prompt has its memory already, and either has taken all that was left and will do so in the next step, or
    ends here and becomes a stream."""
    sequence = span.sequence
    if sequence.num_to_score or not state.memory.has_room_for(sequence, sequence.num_prompt):
        return False
    if span.start + span.count < sequence.num_prompt:
        return plan.budget == 0
    return span.is_sampled and not span.riders and not may_start and sequence.num_prompt == sequence.num_tokens


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
    num_steps, num_streams = len(earlier), len(streams)
    heads = with_reader = _heads(plan.spans)
    if reading is not None:
        heads = [head for head, span in zip(heads, plan.spans, strict=True) if span is not reading.span]
    events: list[TokenEvent] = []
    add, new, event_type = events.append, tuple.__new__, TokenEvent
    for tokens, end_s in earlier:
        for append, id, choice, num_cached, queued_s, readout in with_reader if len(tokens) > num_streams else heads:
            token = tokens[readout]
            append(token)
            fields = (id, choice, (token,), (), (), None, num_cached, end_s, queued_s, None, None, 0)
            add(new(event_type, fields))
    paths: list[tuple[Sequence, Row[int]]] = []
    for span in plan.spans:
        path = range(span.start, span.start + num_steps + 2)
        paths.append((span.sequence, reading.path if reading is not None and span is reading.span else path))
    state.memory.advance(paths, num_steps)
    if policy.counts_tokens:
        for span in streams:
            policy.served(span.sequence, 0, num_steps)
        if reading is not None:
            policy.served(reading.span.sequence, 0, len(events) - num_steps * num_streams)
    counters.steps += num_steps
    counters.computed_tokens += sum([path[-1] - path[1] for _, path in paths])
    counters.generated_tokens += len(events)
    if reading is not None:
        start, end = reading.path[-2:]
        reading.span.start, reading.span.count = start, end - start
    return events


def _heads(spans: Row[Span]) -> list[tuple]:
    """What the events of a sequence have in common, and where its token is."""
    heads = []
    for span in spans:
        one = span.sequence
        heads.append((one.tokens.append, one.request_id, one.choice, one.num_cached, one.queued_s, span.first_readout))
    return heads
