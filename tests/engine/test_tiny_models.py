"""Every architecture's tiny checkpoint through the engine: whole, in chunks, and after a prefix hit."""

from __future__ import annotations

import pytest

from headrace.core.request import Request
from headrace.core.sampling import SamplingParams

from .loaded import Loaded, assert_greedy, greedy, run

TOLERANCE = 1e-3
NAMES = (
    "llama",
    "llama-bias",
    "llama-linear-rope",
    "llama-mha-tied",
    "llama-mqa-headdim",
    "llama-yarn",
    "llama3-rope",
    "mistral-window",
    "qwen2",
    "qwen3",
    "gemma3",
    "mixtral",
    "mamba",
    "deepseek-v3",
)


@pytest.mark.parametrize("chunk", [7, 256])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_tiny_checkpoint(name, depth, chunk, data_path):
    folder = data_path / "tiny" / name
    loaded = Loaded.open(folder, folder / "expected.json")
    expected = loaded.expected
    engine = loaded.engine(max_step_tokens=chunk, depth=depth, block_size=4, max_running=4)
    params = SamplingParams(max_tokens=16, temperature=0, num_logprobs=20)
    steps = expected["greedy"]["steps"]

    first = run(engine, Request("first", tuple(expected["ids"]), params, score_prompt=True))["first"]
    assert first.num_cached == 0
    worst = max(abs(e.logprob - v) for e, v in zip(first.prompt_logprobs, expected["prompt_logprobs"], strict=True))
    assert worst <= TOLERANCE
    # No margins are recorded for the prompt: another argmax is right only if the expected one is as probable.
    for entry, argmax in zip([*first.prompt_logprobs, first.logprobs[0]], expected["argmax"], strict=True):
        assert entry.top[0][1] - dict(entry.top)[argmax] <= TOLERANCE
    assert_greedy(first, steps, TOLERANCE)

    second = run(engine, greedy("second", expected["ids"], 16))["second"]
    assert second.num_cached >= 92  # 96 tokens: the last one is always computed
    assert_greedy(second, steps, TOLERANCE)

    turn = run(engine, greedy("turn", [*expected["ids"], *(step[0] for step in steps[:9])], 7))["turn"]
    assert turn.num_cached >= 96  # the first reply is cached too
    assert_greedy(turn, steps[9:], TOLERANCE)
