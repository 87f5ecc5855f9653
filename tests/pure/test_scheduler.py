"""What the scheduler promises, one behaviour at a time (random schedules are in test_schedules.py)."""

from __future__ import annotations

import inspect

import pytest

from headrace.core.cache import CacheGroup, CacheKind
from headrace.core.errors import ConfigurationError, InvalidRequest, Overloaded
from headrace.core.sampling import SamplingParams
from headrace.core.sequence import FinishReason
from headrace.engine.scheduler import Scheduler

from .build import FULL, drain, request, small_engine


def test_schedule_reads_as_the_policy():
    """The one function that must fit on a screen and a half."""
    assert len(inspect.getsource(Scheduler.schedule).splitlines()) <= 80


def test_a_long_prompt_does_not_freeze_a_stream():
    """CASES: "big prompt freezes other slots' generation". Every step while the long prompt is computed, in chunks of
    what the stream leaves, also brings the stream's next token."""
    engine = small_engine(budget=8)
    engine.submit(request("stream", [1, 2], max_tokens=30))
    engine.step()
    engine.submit(request("long", range(60), max_tokens=1))
    for _ in range(8):
        events = engine.step()
        assert [event.request_id for event in events if event.tokens] == ["stream"]
    assert {event.request_id for event in engine.step()} == {"stream", "long"}  # 60 tokens in chunks of 7


def test_a_second_identical_prompt_computes_only_the_rest():
    engine = small_engine()
    engine.submit(request("a", range(30), max_tokens=1))
    drain(engine)
    computed = engine.stats().computed_tokens
    engine.submit(request("b", range(30), max_tokens=1))
    (event,) = drain(engine)
    assert event.num_cached == 28  # seven whole blocks of four
    assert engine.stats().computed_tokens - computed == 2


def test_identical_prompts_together_compute_the_prefix_once():
    """A prefix being computed is shared too: the others wait for it instead of computing it again."""
    engine = small_engine(num_blocks=(128,), budget=16)
    for i in range(8):
        engine.submit(request(f"r{i}", range(50), max_tokens=1))
    events = drain(engine)
    assert engine.stats().computed_tokens == 50 + 7 * 2
    assert [event.num_cached for event in events] == [0] + [48] * 7


def test_another_salt_shares_nothing():
    engine = small_engine()
    engine.submit(request("a", range(30), max_tokens=1, cache_salt="x"))
    drain(engine)
    engine.submit(request("b", range(30), max_tokens=1, cache_salt="y"))
    engine.submit(request("c", range(30), max_tokens=1, cache_salt="x"))
    cached = {event.request_id: event.num_cached for event in drain(engine)}
    assert cached == {"b": 0, "c": 28}


def test_choices_share_their_prompt():
    engine = small_engine(max_running=4)
    engine.submit(request("a", range(30), max_tokens=3, num_choices=4))
    events = drain(engine)
    assert sorted({event.choice for event in events}) == [0, 1, 2, 3]
    # The prompt once, and two tokens more per choice (the last one sampled is never computed).
    assert engine.stats().computed_tokens == 30 + 4 * 2


def test_the_next_turn_hits_the_reply_too():
    """A reply's full blocks are published as they fill: a chat that resends its history computes only what is new."""
    engine = small_engine()
    engine.submit(request("turn 1", range(10), max_tokens=9))
    reply = [token for event in drain(engine) for token in event.tokens]
    history = [*range(10), *reply]
    engine.submit(request("turn 2", [*history, 7, 7], max_tokens=1))
    (event,) = drain(engine)
    assert event.num_cached == 16  # 18 tokens were computed: four whole blocks


def test_recurrent_states_are_checkpointed_where_turns_end():
    """CASES: "hybrid/SWA/recurrent models re-process everything each turn"."""
    state = CacheGroup("state", CacheKind.STATE, block_size=4, bytes_per_block=1, checkpoint_interval=64)
    window = CacheGroup("window", CacheKind.WINDOW, block_size=4, bytes_per_block=1, window=6)
    for groups, sizes in (((state,), (8,)), ((state, window), (8, 32)), ((window,), (32,))):
        engine = small_engine(groups, sizes)
        engine.submit(request("turn 1", range(10), max_tokens=9))
        reply = [token for event in drain(engine) for token in event.tokens]
        engine.submit(request("turn 2", [*range(10), *reply, 7, 7], max_tokens=1))
        (event,) = drain(engine)
        assert event.num_cached == 16, groups
        engine.submit(request("turn 1 again", range(10), max_tokens=1))
        (event,) = drain(engine)
        assert event.num_cached == 8, groups


def test_a_full_queue_refuses_with_retry_after():
    engine = small_engine(max_queue=1, max_running=1)
    engine.submit(request("runs", range(4)))
    engine.step()
    engine.submit(request("waits", range(4)))
    with pytest.raises(Overloaded, match="max_queue") as refused:
        engine.submit(request("refused", range(4)))
    assert refused.value.retry_after_s
    assert {event.request_id for event in drain(engine)} == {"runs", "waits"}


def test_what_can_never_fit_is_refused_at_submit():
    engine = small_engine(num_blocks=(5,), context_length=1000)
    with pytest.raises(InvalidRequest, match="holds 20 tokens; the prompt has 18 and max_tokens asks for 3"):
        engine.submit(request("a", range(18), max_tokens=3))
    engine = small_engine(context_length=8192, num_blocks=(4096,))
    with pytest.raises(InvalidRequest) as refused:
        engine.submit(request("b", [1] * 8170, max_tokens=64))
    assert refused.value.code == "context_length_exceeded"
    assert str(refused.value) == (
        "this model reads at most 8192 tokens; the prompt has 8170 and max_tokens asks for 64 more. "
        "Shorten the prompt or ask for at most 22."
    )
    assert not engine.has_work


def test_a_reply_without_a_limit_ends_where_the_pool_does():
    engine = small_engine(num_blocks=(5,))
    engine.submit(request("a", range(4), max_tokens=None))
    events = drain(engine)
    assert sum(len(event.tokens) for event in events) == 16
    assert events[-1].finish_reason is FinishReason.LENGTH


def test_a_pool_too_small_for_a_window_is_an_error_at_start():
    window = CacheGroup("window", CacheKind.WINDOW, block_size=4, bytes_per_block=1, window=100)
    with pytest.raises(ConfigurationError, match="needs 31"):
        small_engine((window,), (20,))


def test_abort_frees_within_the_call():
    engine = small_engine()
    engine.submit(request("a", range(30), max_tokens=50, num_choices=3))
    for _ in range(4):
        engine.step()
    assert engine.stats().groups[0].num_used > 0
    engine.abort("a")
    assert not engine.has_work and engine.stats().groups[0].num_used == 0
    assert engine.step() == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", -1),
        ("min_p", 2.0),
        ("presence_penalty", 3.0),
        ("repetition_penalty", 0.0),
        ("max_tokens", -1),
        ("logit_bias", ((1, float("inf")),)),
        ("seed", 2**70),
    ],
)
def test_bad_parameters_are_named_with_their_value(field, value):
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(**{field: value})
    assert refused.value.param == field
    assert str(value) in refused.value.message


def test_eviction_takes_the_least_recently_used_tail():
    engine = small_engine((FULL,), (8,), max_running=1)
    for id, start in (("a", 0), ("b", 100)):
        engine.submit(request(id, range(start, start + 14), max_tokens=1))  # three full blocks kept of each
        drain(engine)
    engine.submit(request("a again", range(14), max_tokens=1))
    assert drain(engine)[0].num_cached == 12
    engine.submit(request("c", range(200, 214), max_tokens=1))  # needs two blocks more than are free: b's tail goes
    drain(engine)
    engine.submit(request("a last", range(14), max_tokens=1))
    assert drain(engine)[0].num_cached == 12
    engine.submit(request("b again", range(100, 114), max_tokens=1))
    assert drain(engine)[0].num_cached == 4
