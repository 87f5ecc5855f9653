"""Models loaded once, and engines of any size around them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.backends.kv_store import KVStore
from headrace.backends.reference.model import ReferenceModel
from headrace.backends.reference.runner import ReferenceRunner
from headrace.core.events import TokenEvent
from headrace.core.request import Request
from headrace.core.result import TokenLogprob
from headrace.core.sampling import SamplingParams
from headrace.engine.engine import Engine
from headrace.models.loaders.checkpoint import open_checkpoint
from headrace.models.registry import ModelDescription, describe, open_weights
from headrace.program.cache import cache_groups
from headrace.server.build import ServeConfig, compose

MARGIN = 0.01
"""The independent implementation's argmax counts where it leads by more than this."""


@dataclass(frozen=True)
class Loaded:
    description: ModelDescription
    model: ReferenceModel
    expected: dict[str, Any]

    @classmethod
    def open(cls, path: Path, expected: Path) -> Loaded:
        checkpoint = open_checkpoint(path)
        description = describe(checkpoint)
        model = ReferenceModel.load(description.program, open_weights(checkpoint, description.program))
        return cls(description, model, json.loads(expected.read_text()))

    def engine(self, *, num_blocks: int = 1280, **options: Any) -> Engine:
        """`num_blocks` in each of the model's cache groups."""
        program = self.description.program
        config = ServeConfig(**{"max_running": 16, **options})
        groups = cache_groups(program, config.block_size, checkpoint_interval=16 * config.block_size)
        context_length = min(self.description.context_length, num_blocks * config.block_size)
        return compose(
            config,
            ReferenceRunner(self.model, KVStore(program, groups, (num_blocks,) * len(groups))),
            groups,
            (num_blocks,) * len(groups),
            context_length=context_length,
            vocab_size=program.vocab_size,
            numerics="test",
        )


@dataclass
class Reply:
    tokens: list[int]
    logprobs: list[TokenLogprob]
    prompt_logprobs: list[TokenLogprob]
    num_cached: int = 0


def run(engine: Engine, *requests: Request) -> dict[str, Reply]:
    """Choice 0 of each request, all submitted at once; the engine is checked after every step."""
    replies = {request.id: Reply([], [], []) for request in requests}
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        for event in engine.step():
            add(replies[event.request_id], event)
        engine.scheduler.check()
    return replies


def add(reply: Reply, event: TokenEvent) -> None:
    reply.tokens += event.tokens
    reply.logprobs += event.logprobs
    reply.prompt_logprobs += event.prompt_logprobs
    reply.num_cached = event.num_cached


def greedy(id: str, prompt: list[int], max_tokens: int, **fields: Any) -> Request:
    return Request(id, tuple(prompt), SamplingParams(max_tokens=max_tokens, temperature=0, num_logprobs=1), **fields)


def assert_greedy(reply: Reply, steps: list[list[float]], tolerance: float) -> None:
    """The reply's tokens and logprobs against [token, logprob, margin] of the independent implementation. Where its
    margin is too small to count and ours differs, the texts part and nothing after can be compared."""
    assert len(reply.tokens) == len(steps)
    for token, entry, (expected, logprob, margin) in zip(reply.tokens, reply.logprobs, steps, strict=True):
        if token != expected and margin <= MARGIN:
            return
        assert token == expected
        assert abs(entry.logprob - logprob) <= tolerance
