"""Drafts: what prompt lookup proposes, how many are taken, and that none of them ever shows."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace

from headrace.core.cache import CacheGroup, CacheKind
from headrace.engine.composition import SchedulingConfig
from headrace.engine.engine import Engine
from headrace.engine.speculative.prompt_lookup import MOST_COMPARED, MOST_INDEXED, MOST_PLACES, PromptLookup
from headrace.engine.speculative.speculation import Speculation

from .build import FULL, STEPS_ONLY, RowsOnly, drain, request, small_engine
from .checking_executor import KnowingDrafter
from .test_schedules import Run, Setup

STATE = CacheGroup("state", CacheKind.STATE, block_size=4, bytes_per_block=1, checkpoint_interval=64)
KINDS = (
    (CacheKind.FULL,),
    (CacheKind.WINDOW,),
    (CacheKind.STATE,),
    (CacheKind.FULL, CacheKind.WINDOW),
    (CacheKind.FULL, CacheKind.STATE),
)


def speculating(mode: str = "right", *, share: float = 0.1, max_drafts: int = 4, **options) -> Engine:
    engine = small_engine(**options)
    speculation = Speculation(KnowingDrafter(mode, is_steady=True), RowsOnly(share), max_drafts)
    speculation.FIRST_ACCURACY = 0.9
    engine.scheduler.speculation = speculation
    return engine


# --- prompt lookup -------------------------------------------------------------------------------------------------


def sequence_of(tokens: list[int]):
    return SimpleNamespace(id=1, tokens=tokens)


def looked_up(tokens: list[int], most: int) -> tuple[int, ...]:
    """By brute force: every earlier place is compared."""
    places = [p for p in range(2, len(tokens)) if tokens[p - 2 : p] == tokens[-2:]][-MOST_PLACES:]

    def length(place: int) -> int:
        longest = 0
        while longest < min(place, MOST_COMPARED) and tokens[place - 1 - longest] == tokens[-1 - longest]:
            longest += 1
        return longest

    if not places:
        return ()
    place = max(places, key=lambda p: (length(p), p))
    drafts = list(tokens)
    for i in range(most):
        drafts.append(drafts[place + i])
    return tuple(drafts[len(tokens) :])


def test_prompt_lookup_finds_what_brute_force_finds():
    rng, num_found = random.Random(1), 0
    for _ in range(300):
        lookup, tokens = PromptLookup(), [rng.randrange(4) for _ in range(rng.randint(1, 60))]
        for _ in range(20):
            most = rng.randint(1, 9)
            drafts = lookup.propose(sequence_of(tokens), most)
            assert drafts == looked_up(tokens, most)
            num_found += bool(drafts)
            # It goes on as proposed, as a copy does, or otherwise.
            tokens += drafts[: rng.randint(1, most)] if drafts and rng.random() < 0.5 else [rng.randrange(4)]
    assert num_found > 3000


def test_a_long_prompt_is_indexed_over_several_steps():
    tokens = [*range(5000), 7, 8]
    lookup = PromptLookup()
    steps = 0
    while not (drafts := lookup.propose(sequence_of(tokens), 3)):
        steps += 1
    assert drafts == (9, 10, 11)
    assert steps == len(tokens) // MOST_INDEXED


def test_prompt_lookup_forgets():
    lookup = PromptLookup()
    lookup.propose(sequence_of([1, 2, 3, 1, 2]), 2)
    assert lookup.num_indexed == 1
    lookup.forget(sequence_of([]))
    lookup.forget(sequence_of([]))
    assert lookup.num_indexed == 0


# --- how many drafts -----------------------------------------------------------------------------------------------


def test_right_drafts_make_replies_in_fewer_steps():
    """A reply of 24 tokens: the prompt's step samples one, and each step after it five."""
    engine = speculating()
    engine.submit(request("a", range(9), max_tokens=24))
    events = drain(engine)
    assert [len(event.tokens) for event in events] == [1, 5, 5, 5, 5, 3]
    stats = engine.stats()
    assert (stats.verifications, stats.proposed_drafts, stats.accepted_drafts) == (5, 18, 18)
    assert events[-1].num_drafts == 2, "none beyond max_tokens"


def drafts_by_cost(share: float, mode: str) -> int:
    engine = speculating(mode, share=share, max_drafts=8, num_blocks=(200,))
    engine.submit(request("a", range(9), max_tokens=200))
    drain(engine)
    return engine.stats().proposed_drafts


def test_fewer_drafts_where_rows_cost_more_or_guesses_are_worse():
    by_cost = [drafts_by_cost(share, "mixed") for share in (0.0, 0.2, 1.0, 5.0)]
    assert by_cost == sorted(by_cost, reverse=True) and by_cost[0] > 2 * by_cost[2]
    assert drafts_by_cost(0.1, "wrong") <= 30, "of 1600: it learns within a few steps"


def test_that_guesses_have_become_right_is_seen_without_verifying_any():
    engine = speculating("wrong")
    engine.submit(request("a", range(9), max_tokens=200))
    for _ in range(60):
        engine.step()
    proposed = engine.stats().proposed_drafts
    engine.step()
    assert engine.stats().proposed_drafts == proposed, "none pay"
    engine.scheduler.speculation.drafter.wrong = 0.0
    for _ in range(20):
        engine.step()
    assert engine.stats().accepted_drafts >= 30


def test_the_likelier_drafts_come_first_when_the_budget_is_short():
    """Two sequences, a budget of four: two drafts at most, and the guesses at the one have always been right."""
    engine = speculating(budget=4, max_running=2)
    speculation = engine.scheduler.speculation
    for id in ("a", "b"):
        engine.submit(request(id, range(3), max_tokens=60))
    while len(speculation._guesses) < 2:
        engine.step()
    speculation._guesses[0].accuracy, speculation._guesses[1].accuracy = 0.4, 0.9
    events = {event.request_id: event for event in engine.step()}
    assert (events["a"].num_drafts, events["b"].num_drafts) == (0, 2)


def test_no_drafts_where_memory_is_short():
    """Ten blocks: at nine in use there are none; a sequence that grows into the last tenth goes on without."""
    engine = speculating(num_blocks=(10,), budget=40)
    engine.submit(request("a", range(4), max_tokens=36))
    events = drain(engine)
    received = 4
    for event in events:
        if event.num_drafts:
            assert -(-(received + event.num_drafts) // FULL.block_size) <= 9
        received += len(event.tokens)
    assert received == 40 and events[-1].num_drafts == 0 and engine.stats().accepted_drafts > 10


def test_a_prompt_takes_its_tokens_before_any_draft():
    engine = speculating(budget=12, max_running=2)
    engine.submit(request("a", range(4), max_tokens=100))
    engine.step()
    engine.submit(request("b", range(50, 90), max_tokens=4))
    engine.step()  # admitted with what was left
    while engine.scheduler.state.running.snapshot()[-1].num_remaining > 11:
        assert [event.num_drafts for event in engine.step()] == [0]


def test_replies_within_a_grammar_take_none():
    from .checking_executor import Pattern

    engine = speculating()
    engine.submit(request("a", range(9), max_tokens=24, grammar=Pattern()))
    drain(engine)
    assert engine.stats().proposed_drafts == 0


def test_a_recurrent_state_is_computed_again_where_a_draft_was_wrong():
    """Every third token is guessed wrong: a step that takes drafts and finds one wrong leaves its right tokens to be
    computed by the next, which takes none."""
    engine = speculating(groups=(FULL, STATE), num_blocks=(16, 8))
    known = [token for event in drain_one(small_engine((FULL, STATE), (16, 8))) for token in event.tokens]
    engine.scheduler.speculation.drafter = Third(known)
    events = drain_one(engine)
    assert [token for event in events for token in event.tokens] == known
    # The prompt's step; then a right draft and a wrong one, at the reply's third token, the sixth, the ninth ...
    assert [len(event.tokens) for event in events] == [1, 2, 1, 2, 1, 2, 1, 2, 1, 2]
    stats = engine.stats()
    assert stats.accepted_drafts == 5 and stats.verifications == 5
    again = 3  # the token before the drafts, the right one of them, and the one sampled in the wrong one's place
    assert stats.computed_tokens == 6 + 5 + stats.proposed_drafts + 4 * again


def drain_one(engine: Engine):
    engine.submit(request("a", range(6), max_tokens=15))
    return drain(engine)


class Third:
    """Knows the reply, but every third token of it."""

    def __init__(self, reply: list[int]) -> None:
        self.reply = reply

    def propose(self, sequence, max_tokens: int) -> tuple[int, ...]:
        begin = sequence.num_tokens - sequence.num_prompt
        return tuple(token + (i % 3 == 2) for i, token in enumerate(self.reply[begin : begin + max_tokens], begin))

    def forget(self, sequence) -> None:
        pass


def test_at_depth_two_a_sequence_waits_for_its_token_where_drafts_pay():
    engine = speculating(depth=2)
    engine.submit(request("a", range(9), max_tokens=24))
    assert [len(event.tokens) for event in drain(engine)] == [1, 1, 5, 5, 5, 5, 2], "the second beside the first"
    overlapped = speculating("wrong", depth=2)
    overlapped.submit(request("a", range(9), max_tokens=100))
    drain(overlapped)
    assert overlapped.executor.max_unfinished == 2, "and does not where they don't"
    assert overlapped.stats().proposed_drafts <= 30


def test_prompt_lookup_in_an_engine():
    """A reply that repeats itself: tokens are a function of the last one, in a loop of five."""
    engine = small_engine()
    engine.scheduler.speculation = Speculation(PromptLookup(), STEPS_ONLY)
    engine.executor.run, run = looping(engine.executor.run), engine.executor.run
    engine.submit(request("a", (1, 2, 3, 4, 0, 1), max_tokens=40))
    events = drain(engine)
    assert [token for event in events for token in event.tokens] == [(2 + i) % 5 for i in range(40)]
    assert engine.stats().accepted_drafts >= 25 and run
    assert not engine.scheduler.speculation._guesses
    assert not engine.scheduler.speculation.drafter.num_indexed


def looping(run):
    def runs(plan, tables):
        result = run(plan, tables)
        result.tokens[:] = [(plan.token_ids[row] + 1) % 5 for row in plan.readout_rows]
        return result

    return runs


# --- nothing shows -------------------------------------------------------------------------------------------------


def test_crowded_schedules():
    """Long replies in pools that hold hardly more than one of them, every one with drafts: preemptions while drafts are
    in flight, drafts that no block is left for, and forks and aborts among them."""
    seen: Counter[str] = Counter()
    for seed in range(400):
        rng = random.Random(seed)
        setup = Setup(
            kinds=rng.choice(KINDS),
            block_size=rng.choice([1, 2, 4]),
            window=rng.randint(2, 9),
            interval=rng.randint(1, 4),
            spare=rng.randint(0, 8),
            budget=rng.randint(8, 24),
            max_running=rng.randint(2, 4),
            depth=rng.randint(1, 2),
            scheduling=SchedulingConfig(policy="fcfs", budget="fixed"),
            drafts=rng.choice(["right", "mixed", "mixed", "wrong"]),
            is_rash=rng.random() < 0.8,
        )
        run = Run(setup)
        for _ in range(rng.randint(4, 8)):
            length, most, wish = rng.randint(1, 16), rng.randint(6, 20), rng.choice((1, 2, 3, 12, 12))
            run.submit(rng.randint(0, 1), length, most, rng.randint(1, 2), seed, wish)
            run.step(rng.randint(0, 4))
            if rng.random() < 0.3:
                run.fork(rng.randint(1, 3), 0)
            if rng.random() < 0.1:
                run.abort(rng.randint(1, 3), rng.randint(-1, 1))
        run.finish()
        run.verify()
        seen += run.drafts + Counter({f"preemptions at depth {setup.depth}": run.engine.stats().preemptions})
    print(dict(seen))
    rare = {name: count for name, count in seen.items() if count < 50}
    assert len(seen) >= 7 and not rare, f"the schedules hardly ever get there: {rare}"
