"""Several identical steps at once, for an executor that need not compute them.

Most steps of a quiet engine are alike: the same sequences, a token more each. A plan says for how many steps that will
hold if nobody comes (its `horizon`); an executor that only predicts time takes some of them in one go, and `commit`
replays the bookkeeping of all but the last one here. What comes out is what single steps would have given: the same
events at the same times, the same blocks, evictions and counters. `tests/pure/test_jump.py` holds it to that.
"""

from __future__ import annotations

from collections.abc import Sequence as Row

from headrace.core.events import TokenEvent
from headrace.core.plan import StepPlan
from headrace.core.result import EarlierStep
from headrace.engine.policies import Policy
from headrace.engine.state import Counters, EngineState


def horizon(plan: StepPlan, state: EngineState, most: int) -> int:
    """For how many steps, up to `most`, all running sequences decode a token each and nothing else happens.

    The caller has made sure that every span is one token, and that nobody who waits can be admitted before a running
    sequence ends. No sequence ends before the last of these steps, and memory surely suffices without a preemption.
    """
    if len(state.running) != len(plan.spans) or plan.pools:
        return 1
    for span, running in zip(plan.spans, state.running, strict=True):
        sequence = span.sequence
        if sequence is not running:  # admitted in this step: from the next on it has its place in the order
            return 1
        # In flight twice: an overlapped step. Not sampled: its end has come, or its token is scored only.
        if not span.is_sampled or span.num_scores or sequence.num_in_flight != 1 or sequence.num_sampling != 1:
            return 1
        request = sequence.request
        sampling = request.sampling
        if sampling.stop_token_ids or request.grammar is not None or sampling.num_logprobs is not None:
            return 1  # what is sampled decides how it goes on, or is told with each token
        remaining = sequence.limit - len(sequence.tokens)
        most = min(most, remaining)
    return state.memory.num_steps_within(plan.readout_sequences, most) if most > 1 else 1


def take_earlier(
    plan: StepPlan,
    earlier: Row[EarlierStep],
    *,
    state: EngineState,
    policy: Policy,
    counters: Counters,
) -> list[TokenEvent]:
    """What `commit`, and `schedule` after it, would have done in each of these steps."""
    sequences, num_steps = plan.readout_sequences, len(earlier)
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
    state.memory.advance(sequences, num_steps)
    for sequence in sequences if policy.counts_tokens else ():
        policy.served(sequence, 0, num_steps)
    counters.steps += num_steps
    counters.computed_tokens += num_steps * len(sequences)
    counters.generated_tokens += num_steps * len(sequences)
    return events
