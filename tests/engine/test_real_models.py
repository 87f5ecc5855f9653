"""The two real models through the engine, against an independent float32 implementation."""

from __future__ import annotations

import itertools

import pytest

from headrace.core.request import Request
from headrace.core.sampling import SamplingParams

from .loaded import MARGIN, Loaded, assert_greedy, greedy, run

TOLERANCE = 2e-3
LONG = 8
"""Index of the 1105-token prompt."""


@pytest.fixture(scope="module")
def smollm2(smollm2_path, data_path) -> Loaded:
    return Loaded.open(smollm2_path, data_path / "smollm2-135m-instruct.q4_1.json")


@pytest.fixture(scope="module")
def gemma(gemma_path, data_path) -> Loaded:
    return Loaded.open(gemma_path, data_path / "gemma-3-270m.q4_k_m.json")


@pytest.mark.parametrize(
    ("name", "chunk"),
    [
        *itertools.product(["smollm2"], [16, 64, 2048]),
        pytest.param("gemma", 16, marks=pytest.mark.long),
        *itertools.product(["gemma"], [64, 2048]),
    ],
)
def test_teacher_forced_logprobs(name, chunk, request):
    """Prompts and their greedy continuations as one scored prompt: chunks of 16, of 64, and whole."""
    loaded: Loaded = request.getfixturevalue(name)
    engine = loaded.engine(max_step_tokens=chunk)
    for index, prompt in enumerate(loaded.expected["prompts"]):
        steps = prompt["greedy"]["steps"]
        ids = [*prompt["ids"], *(step[0] for step in steps)]
        scored = Request(
            f"p{index}", tuple(ids), SamplingParams(max_tokens=1, temperature=0, num_logprobs=1), score_prompt=True
        )
        entries = run(engine, scored)[f"p{index}"].prompt_logprobs
        assert len(entries) == len(ids) - 1
        num_prompt = len(prompt["ids"])
        expected = [*prompt["prompt_logprobs"], *(step[1] for step in steps)]
        worst = max(abs(entry.logprob - value) for entry, value in zip(entries, expected, strict=True))
        assert worst <= TOLERANCE
        for entry, (_, _, margin) in zip(entries[num_prompt - 1 :], steps, strict=True):
            assert entry.rank == 0 or margin <= MARGIN
        top = dict(prompt["top20_next"])
        best = entries[num_prompt - 1].top[0]
        assert abs(top[best[0]] - best[1]) <= TOLERANCE


@pytest.mark.parametrize(
    ("name", "depth"),
    [("smollm2", 1), ("smollm2", 2), ("gemma", 1), pytest.param("gemma", 2, marks=pytest.mark.long)],
)
def test_all_prompts_together_in_a_small_pool(name, depth, request):
    """Nine prompts, and room for little more than the longest: preempted and resumed, each reads as it does alone."""
    loaded: Loaded = request.getfixturevalue(name)
    prompts = loaded.expected["prompts"]
    # Just over the 1105 + 48 tokens of the longest one: 73 blocks.
    engine = loaded.engine(num_blocks=75, max_step_tokens=64, depth=depth)
    # The long one first: the short ones fill what is left of the pool, and grow.
    order = [LONG, *(i for i in range(len(prompts)) if i != LONG)]
    replies = run(engine, *(greedy(f"p{i}", prompts[i]["ids"], 48) for i in order))
    for index, prompt in enumerate(prompts):
        assert_greedy(replies[f"p{index}"], prompt["greedy"]["steps"], TOLERANCE)
    assert engine.stats().preemptions > 0


def test_a_long_prompt_is_cached_and_computed_once(smollm2):
    prompt = smollm2.expected["prompts"][LONG]
    assert len(prompt["ids"]) == 1105
    engine = smollm2.engine()
    run(engine, greedy("first", prompt["ids"], 1))
    before = engine.stats().computed_tokens
    reply = run(engine, greedy("second", prompt["ids"], 48))["second"]
    assert reply.num_cached >= 1088
    assert engine.stats().computed_tokens - before == 1105 - reply.num_cached + 47
    assert_greedy(reply, prompt["greedy"]["steps"], TOLERANCE)


@pytest.mark.parametrize("name", ["smollm2", "gemma"])
def test_eight_identical_prompts_compute_their_prefix_once(name, request):
    """Gemma's windows too: a hit needs the blocks of the window's end only, and they are there."""
    loaded: Loaded = request.getfixturevalue(name)
    prompt = loaded.expected["prompts"][LONG]
    num_prompt = len(prompt["ids"])
    num_cached = (num_prompt - 1) // 16 * 16  # whole blocks, and the last token is always computed
    assert num_cached > 1000
    engine = loaded.engine()
    replies = run(engine, *(greedy(f"r{i}", prompt["ids"], 1) for i in range(8)))
    assert engine.stats().computed_tokens == num_prompt + 7 * (num_prompt - num_cached)
    assert sorted(reply.num_cached for reply in replies.values()) == [0] + [num_cached] * 7
    for reply in replies.values():
        assert_greedy(reply, prompt["greedy"]["steps"][:1], TOLERANCE)
