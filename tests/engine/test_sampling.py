"""The native sampler against the reference sampler, on the logits of a model: the same tokens, step by step."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from headrace.backends.native import _native
from headrace.backends.native.model import NativeModel
from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.executor.local import LocalExecutor
from headrace.executor.native import NativeExecutor
from headrace.models.loaders.checkpoint import open_checkpoint
from headrace.models.registry import describe, open_weights
from headrace.program.cache import cache_groups
from headrace.server.build import ServeConfig, compose

from .loaded import run

NUM_TOKENS = 40


def draw(rng: random.Random, vocab: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=NUM_TOKENS,
        temperature=rng.choice([0.0, 0.7, 1.0, 1.5]),
        top_k=rng.choice([0, 0, 30]),
        typical_p=rng.choice([1.0, 0.3, 0.9]),
        top_p=rng.choice([1.0, 0.9]),
        min_p=rng.choice([0.0, 0.02]),
        xtc_probability=rng.choice([0.0, 0.5, 1.0]),
        xtc_threshold=rng.choice([0.02, 0.1]),
        dry_multiplier=rng.choice([0.0, 0.8, 5.0]),
        dry_allowed_length=rng.choice([1, 2]),
        dry_range=rng.choice([0, 20]),
        dry_breakers=frozenset(rng.sample(range(vocab), 3)),
        presence_penalty=rng.choice([0.0, 0.5]),
        logit_bias=tuple((rng.randrange(vocab), rng.uniform(-2, 4)) for _ in range(rng.choice([0, 1]))),
        seed=rng.randrange(100),
    )


@pytest.mark.parametrize("isa", _native.isas())
def test_the_same_tokens_by_both_samplers(isa: str, data_path: Path):
    checkpoint = open_checkpoint(data_path / "tiny" / "llama")
    program = describe(checkpoint).program
    groups = cache_groups(program, 16, element_bytes=2, checkpoint_interval=64)
    num_blocks = (200,) * len(groups)
    model = NativeModel(
        program,
        open_weights(checkpoint, program),
        groups,
        num_blocks,
        max_tokens=64,
        context_length=128,
        num_threads=1,
        isa=isa,
    )
    rng = random.Random(5)
    vocab = program.vocab_size
    words = [rng.randrange(vocab) for _ in range(6)]
    requests = [
        Request(f"r{i}", tuple(rng.choice(words) for _ in range(30)), draw(rng, vocab), num_choices=1)
        for i in range(60)
    ]
    replies = []
    for executor in (LocalExecutor(model, vocab), NativeExecutor(model, vocab, overlapped=False)):
        config = ServeConfig(max_running=16, max_step_tokens=64)
        engine = compose(
            config, model, groups, num_blocks, context_length=128, vocab_size=vocab, numerics=model.numerics
        )
        engine.executor = executor
        replies.append({id: reply.tokens for id, reply in run(engine, *requests).items()})
    assert replies[0] == replies[1]
    assert all(len(tokens) == NUM_TOKENS for tokens in replies[0].values())
