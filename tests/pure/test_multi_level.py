"""Multi-level feedback: no head-of-line blocking, joining by the prompt, quanta, and promotion."""

from __future__ import annotations

import pytest

from headrace.engine.policies.ageing import Ageing
from headrace.engine.policies.multi_level import FIRST_QUANTUM, MultiLevel

from .build import ends, mean, request, small_engine


def head_of_line() -> list:
    longs = [(0, request(f"long{i}", [i], max_tokens=300)) for i in range(2)]
    return longs + [(10 * i, request(f"short{i}", [i], max_tokens=6)) for i in range(2, 40)]


def test_a_long_reply_does_not_block_short_ones() -> None:
    found = {}
    for policy in ("fcfs", "mlfq"):
        arrivals = head_of_line()
        engine = small_engine(max_running=2, num_blocks=(400,), policy=policy)
        ended = ends(engine, arrivals)
        found[policy] = mean(ended[r.id] - at for at, r in arrivals if r.id.startswith("short"))
    assert found["fcfs"] > 100
    assert found["mlfq"] < 20  # 6 alone, and the wait for a long one to use up its quantum
    assert engine.stats().displacements > 0


@pytest.mark.parametrize(("length", "level"), [(1, 0), (64, 0), (65, 1), (128, 1), (129, 2), (600, 4), (100_000, 7)])
def test_a_prompt_joins_the_level_that_pays_for_it(length: int, level: int) -> None:
    engine = small_engine(policy="mlfq", num_blocks=(40_000,), context_length=120_000, max_running=1)
    engine.submit(request("other", [7], max_tokens=4))
    engine.submit(request("a", [3] * length, max_tokens=4))
    waits = max(engine.scheduler.state.waiting, key=lambda sequence: sequence.id)
    assert engine.scheduler.policy.level(waits) == level


def test_quanta_are_used_up_level_by_level() -> None:
    """64 units of work: a prompt token and 32 generated ones; then twice as many, and so on."""
    engine = small_engine(policy="mlfq", num_blocks=(400,))
    engine.submit(request("a", [1], max_tokens=400))
    levels = []
    while engine.has_work:
        for sequence in engine.scheduler.state.running:
            levels.append(engine.scheduler.policy.level(sequence))
        engine.step()
        engine.scheduler.check()
    lengths = [levels.count(level) for level in range(4)]
    assert levels == sorted(levels)
    assert lengths[0] == pytest.approx(FIRST_QUANTUM / 2, abs=1)
    assert lengths[1:3] == [FIRST_QUANTUM, 2 * FIRST_QUANTUM]


def test_who_waits_too_long_returns_to_the_first_level() -> None:
    def last(promoted_after_s: float) -> int:
        engine = small_engine(max_running=1, num_blocks=(400,), policy="mlfq")
        engine.scheduler.policy = MultiLevel(promoted_after_s=promoted_after_s)
        # More short ones than can be served: the long prompt's level would never have its turn.
        arrivals = [(2 * i, request(f"short{i}", [i + 2], max_tokens=4)) for i in range(100)]
        return ends(engine, [*arrivals, (1, request("long", [1] * 65, max_tokens=10))])["long"]

    assert last(1e9) > 400
    assert last(50.0) < 200


def test_a_promotion_pays_for_its_restoring() -> None:
    """A level's quantum is used up by what a sequence asked for; what it lost and gets again is not counted, and a
    promoted one has at least as much service as that is."""
    policy = MultiLevel(promoted_after_s=10.0)
    engine = small_engine(max_running=1, num_blocks=(400,), policy="mlfq")
    engine.scheduler.policy = policy
    arrivals = [(0, request("long", [1] * 300, max_tokens=150))]
    arrivals += [(40 + 2 * i, request(f"short{i}", [i + 2], max_tokens=4)) for i in range(60)]
    ends(engine, arrivals)
    stats = engine.stats()
    restored = stats.computed_tokens - stats.prompt_tokens - stats.generated_tokens + stats.requests
    assert stats.displacements >= 1
    assert restored <= 2 * stats.generated_tokens
    assert policy._places == {}, "who has ended is forgotten"


def test_ageing_goes_around_it() -> None:
    assert isinstance(small_engine(policy="ageing(mlfq)").scheduler.policy, Ageing)
