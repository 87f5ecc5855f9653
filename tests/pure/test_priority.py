"""Urgent requests overtake those that wait, and run on when memory ends."""

from __future__ import annotations

from headrace.engine.policies.fair import Fair
from headrace.engine.policies.fcfs import FirstComeFirstServed
from headrace.engine.policies.priority import ByPriority

from .build import drain, request, small_engine


def test_urgent_requests_overtake_waiting_ones() -> None:
    engine = small_engine(max_running=1)
    engine.scheduler.policy = Fair(ByPriority(FirstComeFirstServed()))
    for id, priority in (("a", 0), ("b", 5), ("c", 0), ("d", -1)):
        engine.submit(request(id, range(5), max_tokens=2, priority=priority))
    ended = [event.request_id for event in drain(engine) if event.finish_reason]
    assert ended == ["d", "a", "c", "b"]


def test_the_least_urgent_gives_way() -> None:
    engine = small_engine(num_blocks=(9,), context_length=30)
    engine.scheduler.policy = ByPriority(FirstComeFirstServed())
    engine.submit(request("late", range(8), max_tokens=20, priority=3))
    engine.step()
    engine.submit(request("urgent", range(100, 108), max_tokens=20, priority=0))
    ended = [event.request_id for event in drain(engine) if event.finish_reason]
    assert engine.stats().preemptions > 0
    assert ended == ["urgent", "late"]
