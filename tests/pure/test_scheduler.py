"""What the scheduler promises, one behaviour at a time (random schedules are in test_schedules.py)."""

from __future__ import annotations

import inspect

import pytest

from headrace.core.cache import CacheGroup, CacheKind
from headrace.core.errors import ConfigurationError, InternalError, InvalidRequest, Overloaded
from headrace.core.request import Pooling, Request
from headrace.core.sampling import SamplingParams
from headrace.core.sequence import FinishReason
from headrace.engine.gates import Gates, Verdict
from headrace.engine.scheduler import Scheduler
from headrace.memory import manager

from .build import FULL, VOCAB_SIZE, drain, request, small_engine
from .checking_executor import hidden, prefix_hash

WINDOW = CacheGroup("window", CacheKind.WINDOW, block_size=4, bytes_per_block=1, window=6)
STATE = CacheGroup("state", CacheKind.STATE, block_size=4, bytes_per_block=1, checkpoint_interval=64)
GROUPS = ((FULL,), (WINDOW,), (STATE,), (FULL, WINDOW), (FULL, STATE), (FULL, WINDOW, STATE))


def names(groups) -> str:
    return "+".join(group.name for group in groups)


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


@pytest.mark.parametrize("num_prompt", [50, 61, 64])
@pytest.mark.parametrize("budget", [8, 10, 16])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("groups", GROUPS, ids=names)
def test_identical_prompts_together_compute_the_prefix_once(groups, depth, budget, num_prompt):
    """A prefix being computed is shared too: the others wait for it instead of computing it again. With recurrent
    states they stopped waiting after the first chunk, for its blocks were full, though nobody could hit them before the
    next checkpoint (8 x 61 tokens: up to 232 were computed)."""
    engine = small_engine(groups, (200,) * len(groups), budget=budget, depth=depth)
    for i in range(8):
        engine.submit(request(f"r{i}", range(num_prompt), max_tokens=1))
    events = drain(engine)
    cached = (num_prompt - 1) // 4 * 4
    assert engine.stats().computed_tokens == num_prompt + 7 * (num_prompt - cached)
    assert [event.num_cached for event in events] == [0] + [cached] * 7


def test_nobody_waits_for_a_checkpoint_beyond_the_common_part():
    """A long prompt's next checkpoint is no use to one that leaves its text before it: both are computed together."""
    engine = small_engine((STATE,), (20,), budget=50)
    engine.submit(request("long", range(60), max_tokens=1))
    engine.step()
    engine.submit(request("other", [*range(20), 70, 71], max_tokens=1))
    engine.step()
    assert engine.stats().num_running == 2
    drain(engine)


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


@pytest.mark.parametrize("num_prompt", [14, 16])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("groups", GROUPS, ids=names)
@pytest.mark.parametrize("before", ["nothing", "the same", "scored", "a longer one"])
def test_the_next_turn_hits_whatever_was_cached_before(before, groups, depth, num_prompt):
    """A sequence that computed a block which was in the tree already (the last block of a prompt is always computed,
    scored prompts are whole, and a hit ends where the least of the groups' does) published nothing after it: the next
    turn hit 16 of 32 tokens where the first reply's next turn had hit 28."""
    engine = small_engine(groups, (100,) * len(groups), depth=depth)
    prompt = range(num_prompt)
    if before == "the same":
        engine.submit(request("before", prompt, max_tokens=6, seed=1))
    elif before == "scored":
        engine.submit(request("before", prompt, max_tokens=6, seed=1, score_prompt=True))
    elif before == "a longer one":
        engine.submit(request("before", range(40), max_tokens=1))
    drain(engine)
    engine.submit(request("turn 1", prompt, max_tokens=13, seed=2, score_prompt=before == "the same"))
    reply = [token for event in drain(engine) for token in event.tokens]
    engine.submit(request("turn 2", [*prompt, *reply, 7, 7], max_tokens=1))
    (event,) = drain(engine)
    assert event.num_cached == (num_prompt + 12) // 4 * 4  # the last token sampled was never computed


def test_equal_blocks_are_kept_once():
    """Who computes what the tree holds already goes on with the tree's block and gives its own back."""
    engine = small_engine(max_running=2)
    for i in range(2):
        engine.submit(request(f"r{i}", range(16), max_tokens=30, score_prompt=True))
    for _ in range(8):
        engine.step()
    first, second = (kept.tables[0].blocks for kept in engine.scheduler.state.memory._of.values())
    assert first[:4] == second[:4]
    drain(engine)


def test_no_step_hashes_a_prompt(monkeypatch):
    """Fifty prompts of 8,000 tokens, all hits, were admitted in one step that spent 131 ms, most of it on digests.
    These are made on arrival, and not again after a preemption."""
    engine = small_engine((FULL,), (16,), budget=16, max_running=2)
    hashed = []
    original = manager.child_digests
    monkeypatch.setattr(
        manager,
        "child_digests",
        lambda parent, tokens, size: hashed.append(len(tokens)) or original(parent, tokens, size),
    )
    engine.submit(request("a", range(20), max_tokens=30))
    engine.submit(request("b", range(100, 128), max_tokens=20))
    assert hashed == [20, 28]
    drain(engine)
    assert engine.stats().preemptions > 0
    assert hashed[2:] and all(count == 4 for count in hashed[2:])  # the reply's blocks, one at a time
    assert sum(hashed) <= 20 + 28 + 30 + 20


@pytest.mark.parametrize("bad", [-1, VOCAB_SIZE])
@pytest.mark.parametrize("field", ["prompt", "resumed", "stop_token_ids", "logit_bias"])
def test_ids_outside_the_vocabulary_are_refused(field, bad):
    """An id below zero in a plan is a token in flight: a prompt with one read another sequence's sample."""
    engine = small_engine()
    fields = {"prompt": (1, 2), "resumed": ()} | ({field: (3, bad)} if field in ("prompt", "resumed") else {})
    sampling = SamplingParams(
        max_tokens=4,
        stop_token_ids=frozenset({5, bad} if field == "stop_token_ids" else ()),
        logit_bias=((bad, 1.0),) if field == "logit_bias" else (),
    )
    with pytest.raises(InvalidRequest, match=f"{field} has the token id {bad}; ids are 0 to 99999") as refused:
        engine.submit(Request("a", sampling=sampling, **fields))
    assert refused.value.param == field
    assert not engine.has_work


@pytest.mark.parametrize(
    ("resumed", "fields", "param"),
    [
        ((5, 6, 7), {"max_tokens": 3}, "resumed"),
        ((5, 6, 7, 8), {"max_tokens": 3}, "resumed"),
        ((5, 6), {"max_tokens": 9, "stop_token_ids": frozenset({5})}, "resumed"),
        ((5,) * 17, {"max_tokens": None}, "prompt"),
        ((5,) * 17, {"max_tokens": 18}, "prompt"),
    ],
)
def test_a_resumed_reply_has_something_left_to_generate(resumed, fields, param):
    """One that had reached max_tokens, or the end of the context, was accepted and broke invariants or spun."""
    engine = small_engine(context_length=20)
    with pytest.raises(InvalidRequest) as refused:
        engine.submit(Request("a", (1, 2, 3), SamplingParams(**fields), resumed=resumed))
    assert refused.value.param == param
    assert not engine.has_work


def test_a_resumed_reply_goes_on_where_it_was():
    engine = small_engine()
    engine.submit(request("whole", range(9), max_tokens=10))
    reply = [token for event in drain(engine) for token in event.tokens]
    engine.submit(request("rest", range(9), max_tokens=10, resumed=tuple(reply[:6])))
    assert [token for event in drain(engine) for token in event.tokens] == reply[6:]


def test_work_that_cannot_be_launched_is_an_error_and_not_a_spin():
    class Closed:
        def ask(self, sequence, state, now):
            return Verdict.STOP

    engine = small_engine()
    engine.scheduler.gates = Gates([Closed()])
    assert [engine.step() for _ in range(5)] == [[]] * 5  # nothing to do
    engine.submit(request("a", range(4)))
    with pytest.raises(InternalError, match=r"0 running, 1 waiting.*Sequence\(a/0 waiting: 4 tokens"):
        for _ in range(10):
            assert engine.step() == []


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_a_fork_ends_with_its_parent(reason):
    """With a step under way a fork begins when that has returned. If the parent's last token came with it, the fork
    went on behind a stop token."""
    engine = small_engine(depth=2)
    engine.submit(request("a", range(5), max_tokens=12))
    reply = [token for event in drain(engine) for token in event.tokens]
    end = next(i for i in range(3, 12) if reply[i] not in reply[:i])
    if reason is FinishReason.STOP:
        sampling = SamplingParams(max_tokens=20, stop_token_ids=frozenset({reply[end]}))
    else:
        sampling = SamplingParams(max_tokens=end + 1)
    engine.submit(Request("b", tuple(range(5)), sampling))
    received = 0
    while received < end:
        received += sum(len(event.tokens) for event in engine.step())
    child = engine.fork("b", 0)
    grandchild = engine.fork("b", child)
    events = drain(engine)
    assert [(event.choice, event.tokens, event.finish_reason) for event in events] == [
        (0, (reply[end],), reason),
        (child, (), reason),
        (grandchild, (), reason),
    ]


def test_a_fork_of_a_fork_that_has_not_begun_has_all_tokens():
    """It began with the prompt alone."""
    engine = small_engine(depth=2)
    engine.submit(request("a", range(5), max_tokens=12))
    received = 0
    while received < 4:
        received += sum(len(event.tokens) for event in engine.step())
    children = {engine.fork("a", 0)}
    children.add(engine.fork("a", max(children)))
    events = drain(engine)
    for child in children:
        assert sum(len(event.tokens) for event in events if event.choice == child) == 12 - 5


def test_a_fork_has_waited_as_long_as_its_parent():
    """It counted as arrived when it was forked, after its admission: its time in the queue was negative."""
    engine = small_engine(max_running=1)
    engine.submit(request("first", range(4), max_tokens=3))
    engine.submit(request("second", range(4), max_tokens=8))
    engine.step()
    engine.clock.advance(5.0)
    while engine.stats().num_waiting:
        engine.step()
    engine.clock.advance(2.0)
    child = engine.fork("second", 0)
    assert {event.queued_s for event in drain(engine) if event.choice == child} == {5.0}


@pytest.mark.parametrize("depth", [1, 2])
def test_the_next_choice_takes_over_a_prompt_under_way(depth):
    """Choice 0 was aborted before its prompt was computed: the next one began anew, told the prompt's logprobs again
    and counted its tokens twice. And with its last chunk under way the logprobs were lost."""
    for num_steps in range(5):
        engine = small_engine(budget=8, depth=depth)
        engine.submit(request("a", range(30), max_tokens=3, num_choices=3, score_prompt=True))
        events = [event for _ in range(num_steps) for event in engine.step()]
        engine.abort("a", 0)
        events += drain(engine)
        assert sum(len(event.prompt_logprobs) for event in events) == 29
        assert {event.choice for event in events if event.finish_reason} == {1, 2}
        stats = engine.stats()
        assert (stats.prompt_tokens, stats.requests) == (30, 1)
        assert stats.computed_tokens <= 30 + 3 * 2


def test_only_who_cannot_run_waits():
    """The queue refused at max_queue though places were free; the server counted places and the engine did not."""
    engine = small_engine(max_queue=1, max_running=3)
    places = [engine.stats().num_places]
    for i, num_choices in enumerate((1, 2, 1)):
        engine.submit(request(f"r{i}", range(4), num_choices=num_choices))
        places.append(engine.stats().num_places)
    assert places == [4, 3, 1, 0]
    with pytest.raises(Overloaded, match="max_queue"):
        engine.submit(request("refused", range(4)))
    engine.step()
    assert (engine.stats().num_running, engine.stats().num_waiting, engine.stats().num_places) == (3, 1, 0)
    drain(engine)
    assert engine.stats().num_places == 4


def test_a_request_of_many_choices_holds_up_those_behind_it():
    engine = small_engine(max_queue=2, max_running=3)
    engine.submit(request("runs", range(4)))
    engine.submit(request("waits", range(4), num_choices=3))
    assert engine.stats().num_places == 1
    engine.submit(request("waits too", range(4)))
    assert engine.stats().num_places == 0
    drain(engine)


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
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "max_tokens")
    assert str(refused.value) == (
        "this model reads at most 8192 tokens; the prompt has 8170 and max_tokens asks for 64 more. "
        "Shorten the prompt or ask for at most 22."
    )
    with pytest.raises(InvalidRequest, match=r"the prompt has 8192\. Shorten the prompt by at least 1\.") as refused:
        engine.submit(request("c", [1] * 8192, max_tokens=1))
    assert refused.value.param == "prompt"
    engine.submit(request("d", [1] * 8192, max_tokens=0, score_prompt=True))  # nothing more to read
    engine.abort("d")
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
        ("num_logprobs", -1),
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


@pytest.mark.parametrize("pooling", Pooling)
@pytest.mark.parametrize("depth", [1, 2])
def test_an_embedding_reads_every_token_once_and_samples_nothing(pooling: Pooling, depth: int):
    """In chunks, after its whole prompt was cached, and in a pool that it fills to the last block."""
    engine = small_engine(num_blocks=(8,), budget=8, max_running=4, depth=depth)
    engine.submit(request("before", range(30), max_tokens=1))
    drain(engine)
    engine.submit(request("a", range(32), max_tokens=0, pooling=pooling))
    *pieces, last = drain(engine)
    assert all(event.pooled is not None and not event.tokens and event.finish_reason is None for event in pieces)
    assert (last.pooled, last.tokens, last.finish_reason) == (None, (), FinishReason.LENGTH)
    states = [hidden(prefix_hash(range(n + 1))) for n in range(32)]
    expected = states if pooling is Pooling.MEAN else states[-1:]
    assert [sum(numbers) for numbers in zip(*[event.pooled for event in pieces], strict=True)] == [
        sum(expected),
        len(expected),
    ]
    assert last.num_cached == 0, "a hit has no hidden states"
    assert engine.stats().groups[0].num_used == 0


def test_an_aborted_embedding_frees_within_the_call():
    engine = small_engine(budget=8)
    engine.submit(request("a", range(30), max_tokens=0, pooling=Pooling.MEAN))
    engine.step()
    assert engine.stats().groups[0].num_used > 0
    engine.abort("a")
    assert not engine.has_work and engine.stats().groups[0].num_used == 0


def test_an_embedding_generates_nothing():
    engine = small_engine()
    for fields in ({"max_tokens": 1}, {"max_tokens": None}, {"max_tokens": 0, "score_prompt": True}):
        with pytest.raises(InvalidRequest, match="embedding"):
            engine.submit(request("a", range(3), pooling=Pooling.MEAN, **fields))
    assert not engine.has_work
