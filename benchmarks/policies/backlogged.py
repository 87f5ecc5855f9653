"""Tenants who always keep requests waiting, and the service each gets: for the fairness test and its figure."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.engine.engine import Engine
from headrace.engine.ledger import GENERATED_WORK, PROMPT_WORK

Service = dict[str, float]
"""By tenant, in weighted tokens."""


def serve_backlogged(
    engine: Engine,
    tenants: Mapping[str, int],
    num_steps: int = 0,
    *,
    least_service: float = 0.0,
    longest_prompt: int,
    longest_reply: int,
    each_step: Callable[[Service], None] = lambda served: None,
) -> list[Service]:
    """Each tenant keeps so many requests waiting, for so many steps and until all together have had so much service.
    Returns the service each got until each step: prompts when they are admitted, tokens when they are generated."""
    rng = random.Random(3)
    waiting, served, number = dict.fromkeys(tenants, 0), dict.fromkeys(tenants, 0.0), 0
    owner: dict[str, tuple[str, int]] = {}
    begun: set[str] = set()

    def begin(id: str) -> None:
        begun.add(id)
        tenant, length = owner[id]
        served[tenant] += PROMPT_WORK * length
        waiting[tenant] -= 1

    history = []
    while len(history) < num_steps or sum(served.values()) < least_service:
        for tenant, backlog in tenants.items():
            while waiting[tenant] < backlog:
                prompt = tuple(rng.randrange(1000) for _ in range(rng.randint(5, longest_prompt)))
                id = f"r{number}"
                number += 1
                sampling = SamplingParams(max_tokens=rng.randint(2, longest_reply), seed=number)
                engine.submit(Request(id, prompt, sampling, tenant=tenant))
                owner[id] = (tenant, len(prompt))
                waiting[tenant] += 1
        events = engine.step()
        for sequence in engine.scheduler.state.running:
            if sequence.request.id not in begun:
                begin(sequence.request.id)
        for event in events:
            if event.request_id not in begun:  # admitted and ended within the step
                begin(event.request_id)
            served[owner[event.request_id][0]] += GENERATED_WORK * len(event.tokens)
        history.append(dict(served))
        each_step(served)
    return history


def gaps(history: list[Service], weights: Mapping[str, float]) -> list[float]:
    """After each step: how far tenants are apart, each by its weight."""
    return [
        max(now[name] / weight for name, weight in weights.items())
        - min(now[name] / weight for name, weight in weights.items())
        for now in history
    ]
