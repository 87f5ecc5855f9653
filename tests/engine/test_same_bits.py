"""The same request gives the same bits: random schedules on the native backend against running alone."""

from __future__ import annotations

import random
import struct
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from headrace.backends.native.model import NativeModel
from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.engine.engine import Engine
from headrace.models.loaders.checkpoint import open_checkpoint
from headrace.models.registry import describe, open_weights
from headrace.program.cache import cache_groups
from headrace.server.build import ServeConfig, compose

from .loaded import Reply, add

BLOCK_SIZE = 16
NUM_BLOCKS = 400
MAX_STEP_TOKENS = 256
CHUNK = 256
"""Positions that the attention kernel sums on their own (native/kernels.h)."""


class Native:
    """A checkpoint on the native backend, once per number of threads."""

    def __init__(self, path: Path, context_length: int = 1024) -> None:
        checkpoint = open_checkpoint(path)
        self.description = describe(checkpoint)
        self.program = self.description.program
        self.weights = open_weights(checkpoint, self.program)
        self.context_length = context_length
        self.groups = cache_groups(self.program, BLOCK_SIZE, element_bytes=2, checkpoint_interval=4 * BLOCK_SIZE)
        self._models: dict[tuple, NativeModel] = {}
        self._alone: dict[Request, bytes] = {}

    def model(self, threads: int, isa: str = "") -> NativeModel:
        key = (threads, isa)
        if key not in self._models:
            self._models[key] = NativeModel(
                self.program,
                self.weights,
                self.groups,
                (NUM_BLOCKS,) * len(self.groups),
                max_tokens=MAX_STEP_TOKENS,
                context_length=self.context_length,
                num_threads=threads,
                isa=isa,
            )
        return self._models[key]

    def engine(self, threads: int = 1, num_blocks: int = NUM_BLOCKS, isa: str = "", **options) -> Engine:
        """Engines share a model's cache, one after the other; a small pool is the first blocks of it."""
        config = ServeConfig(block_size=BLOCK_SIZE, **{"max_running": 8, "max_queue": 1000, **options})
        return compose(
            config,
            self.model(threads, isa),
            self.groups,
            (num_blocks,) * len(self.groups),
            context_length=min(self.context_length, num_blocks * BLOCK_SIZE),
            vocab_size=self.program.vocab_size,
            numerics="test",
        )

    def alone(self, request: Request) -> bytes:
        if request not in self._alone:
            self._alone[request] = bits(generate(self.engine(), [request], [])[request.id, 0])
        return self._alone[request]


def generate(engine: Engine, requests: list[Request], arrivals: list[int]) -> dict[tuple[str, int], Reply]:
    """Request i is submitted after `arrivals[i]` steps (all at once without arrivals)."""
    replies: dict[tuple[str, int], Reply] = {}
    waiting = list(zip(arrivals or [0] * len(requests), requests, strict=True))
    step = 0
    while waiting or engine.has_work:
        for due, request in [item for item in waiting if item[0] <= step]:
            engine.submit(request)
            waiting.remove((due, request))
        for event in engine.step():
            add(replies.setdefault((event.request_id, event.choice), Reply([], [], [])), event)
        engine.scheduler.check()
        step += 1
    return replies


def bits(reply: Reply) -> bytes:
    """Tokens and logprobs as bytes: -0.0 differs from 0.0, and a NaN equals itself."""
    numbers = [entry.logprob for entry in reply.prompt_logprobs]
    for entry in reply.logprobs:
        numbers += [entry.logprob, *(logprob for _, logprob in entry.top)]
    ids = [*reply.tokens, *(token for entry in reply.logprobs for token, _ in entry.top)]
    return struct.pack(f"{len(ids)}i{len(numbers)}d", *ids, *numbers)


seen: Counter[str] = Counter()


def run_schedule(native: Native, seed: int, longest: int) -> None:
    """Requests, arrivals and machine all drawn from the seed."""
    rng = random.Random(seed)
    vocab = native.program.vocab_size
    common = [rng.randrange(vocab) for _ in range(longest)]
    requests = []
    for i in range(rng.randint(1, 6)):
        length = rng.randint(1, longest) if rng.random() < 0.5 else rng.randint(1, 40)
        shared = rng.randint(0, length)
        prompt = [*common[:shared], *(rng.randrange(vocab) for _ in range(length - shared))]
        params = SamplingParams(
            max_tokens=rng.randint(1, 24),
            temperature=rng.choice([0.0, 1.0]),
            top_p=rng.choice([1.0, 0.9]),
            repetition_penalty=rng.choice([1.0, 1.1]),
            seed=rng.randint(0, 5),
            num_logprobs=3,
        )
        requests.append(Request(f"r{i}", tuple(prompt), params, score_prompt=rng.random() < 0.15))
    arrivals = [rng.randint(0, 12) for _ in requests]
    needed = max(len(r.prompt) + (r.sampling.max_tokens or 0) for r in requests)
    threads, depth = rng.randint(1, 4), rng.randint(1, 2)
    budget = rng.choice([8, 9, 11, 16, 23, 64, 100, 256])
    least = -(-needed // BLOCK_SIZE)
    for group in native.groups:
        if group.window:
            least = max(least, -(-(group.window + depth * budget) // BLOCK_SIZE) + 2)
    num_blocks = min(NUM_BLOCKS, max(least, depth + 1) + rng.choice([0, 1, 3, 100]))
    engine = native.engine(threads, num_blocks, max_step_tokens=budget, depth=depth, max_running=rng.choice([2, 3, 8]))
    replies = generate(engine, requests, arrivals)
    for request in requests:
        assert bits(replies[request.id, 0]) == native.alone(request), f"seed {seed}: {request.id} differs"
    stats = engine.stats()
    seen.update(
        {
            "schedules": 1,
            "preemptions": stats.preemptions,
            "cached tokens": stats.cached_tokens,
            "three chunks": sum(len(r.prompt) > 2 * CHUNK for r in requests),
            f"threads {threads}": 1,
            f"depth {depth}": 1,
            f"budget {budget}": 1,
        }
    )


NAMES = (
    "llama",
    "llama-bias",
    "llama-mqa-headdim",
    "mistral-window",
    "qwen3",
    "gemma3",
    "mixtral",
    "mamba",
    "deepseek-v3",
)


@cache
def tiny(path: Path) -> Native:
    return Native(path)


@pytest.mark.parametrize("name", NAMES)
def test_random_schedules_on_tiny_checkpoints(name: str, data_path: Path) -> None:
    native = tiny(data_path / "tiny" / name)
    for seed in range(30):
        run_schedule(native, seed, longest=700 if seed % 6 == 0 else 60)


@pytest.mark.long
@pytest.mark.parametrize("model", ["smollm2_path", "gemma_path"])
def test_random_schedules_on_real_models(model: str, request: pytest.FixtureRequest) -> None:
    native = Native(request.getfixturevalue(model))
    for seed in range(40):
        run_schedule(native, seed, longest=700 if seed % 4 == 0 else 120)


@pytest.mark.parametrize("name", NAMES)
def test_every_instruction_set_gives_the_same_bits(name: str, data_path: Path) -> None:
    from headrace.backends.native import _native

    native = tiny(data_path / "tiny" / name)
    request = Request("r", tuple(range(40)), SamplingParams(max_tokens=12, seed=1, num_logprobs=3))
    found = {isa: bits(generate(native.engine(isa=isa), [request], [])["r", 0]) for isa in _native.isas()}
    assert len(set(found.values())) == 1, f"not all agree: {list(found)}"
