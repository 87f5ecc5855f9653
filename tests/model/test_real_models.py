"""SmolLM2 and Gemma 3 from their GGUF files, against transformers on the same dequantized weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from headrace.backends.reference import ReferenceModel
from tests.model.harness import OneSequence, load

TOLERANCE = 2e-3
CLEAR_MARGIN = 0.01
NUM_STEPS = 12


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> ReferenceModel:
    return load(smollm2_path)


@pytest.fixture(scope="module")
def gemma(gemma_path: Path) -> ReferenceModel:
    return load(gemma_path)


def check_prompt(model: ReferenceModel, prompt: dict, num_steps: int, every: int = 1) -> None:
    """Score every `every`-th token of the prompt, what follows it, and `num_steps` greedy steps."""
    ids = prompt["ids"]
    sequence = OneSequence(model, max_tokens=len(ids) + num_steps)
    rows = range((len(ids) - 1) % every, len(ids), every)  # the last row among them
    for tile, logprobs in sequence.tiles(ids, rows):
        scored = [row for row in tile if row + 1 < len(ids)]
        found = logprobs[np.arange(len(scored)), [ids[row + 1] for row in scored]]
        wanted = [prompt["prompt_logprobs"][row] for row in scored]
        np.testing.assert_allclose(found, wanted, atol=TOLERANCE)
        row = logprobs[-1]
    for token, logprob in prompt["top20_next"]:
        assert row[token] == pytest.approx(logprob, abs=TOLERANCE)
    for token, logprob, margin in prompt["greedy"]["steps"][:num_steps]:
        assert row[token] == pytest.approx(logprob, abs=TOLERANCE)
        assert row.argmax() == token or margin <= CLEAR_MARGIN
        row = sequence.compute([token])[0]


@pytest.mark.parametrize("index", [0, 1])
def test_smollm2(smollm2: ReferenceModel, data_path: Path, index: int) -> None:
    expected = json.loads((data_path / "smollm2-135m-instruct.q4_1.json").read_text())
    check_prompt(smollm2, expected["prompts"][index], NUM_STEPS)


@pytest.mark.parametrize("index", [0, 1])
def test_gemma(gemma: ReferenceModel, data_path: Path, index: int) -> None:
    expected = json.loads((data_path / "gemma-3-270m.q4_k_m.json").read_text())
    check_prompt(gemma, expected["prompts"][index], NUM_STEPS)


def test_gemma_beyond_its_window(gemma: ReferenceModel, data_path: Path) -> None:
    """The one prompt longer than the sliding window of 512."""
    expected = json.loads((data_path / "gemma-3-270m.q4_k_m.json").read_text())
    prompt = max(expected["prompts"], key=lambda p: len(p["ids"]))
    assert len(prompt["ids"]) > 512
    check_prompt(gemma, prompt, num_steps=2, every=8)
