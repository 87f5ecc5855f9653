"""How long a request that comes now would wait."""

from __future__ import annotations

from heapq import heapify, heappushpop
from itertools import islice

from headrace.core.work import StepWork
from headrace.engine.state import EngineState

MOST = 256
"""Waiting requests looked at one by one; those behind are taken to be like them on average."""


def seconds_to_start(state: EngineState, max_running: int) -> float:
    """Until a place is free for a newcomer, first come first served, by predicted lengths; 0 where nothing is known of
    seconds.

    Each place is free when its sequence has ended, and is taken by the next that waits (list scheduling); a step
    takes as long as one of `max_running` streams, and all prompts before the newcomer's have to be read as well.
    """
    ledger = state.ledger
    free_at = [ledger.remaining(sequence) for sequence in state.running for _ in range(sequence.num_places)]
    free_at = sorted(free_at)[:max_running] + [0.0] * (max_running - len(free_at))
    heapify(free_at)
    to_read = [sequence for sequence in state.running if sequence.num_tokens > sequence.num_scheduled + 1]
    num_prompt = sum(sequence.num_tokens - sequence.num_scheduled for sequence in to_read)
    num_pairs = sum((sequence.num_tokens**2 - sequence.num_scheduled**2) // 2 for sequence in to_read)
    num_looked_at, num_steps = 0, 0.0
    for sequence in islice(state.waiting, MOST):
        num_looked_at += 1
        num_prompt += sequence.num_tokens
        num_pairs += sequence.num_tokens**2 // 2
        remaining = ledger.remaining(sequence)
        for _ in range(sequence.num_places):
            heappushpop(free_at, free_at[0] + remaining)
            num_steps += remaining
    start = free_at[0]
    if num_looked_at and len(state.waiting) > num_looked_at:
        num_behind = len(state.waiting) - num_looked_at
        start += num_steps / num_looked_at * num_behind / max_running
        num_prompt += num_prompt * num_behind // num_looked_at
        num_pairs += num_pairs * num_behind // num_looked_at
    num_keys = sum(sequence.num_tokens for sequence in state.running)
    step_s = ledger.costs.seconds(StepWork.of_streams(max_running, num_keys))
    prompt_s = ledger.costs.seconds(StepWork(0, num_prompt, 1, 1, 0, num_pairs)) if num_prompt else 0.0
    return start * step_s + prompt_s
