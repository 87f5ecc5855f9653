"""Embeddings of real programs: both backends, any chunks, and against the logits of the same model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.core.request import Pooling, Request
from headrace.core.sampling import SamplingParams
from headrace.engine.engine import Engine
from headrace.executor.native import NativeExecutor
from headrace.models.loaders.checkpoint import open_checkpoint
from headrace.models.registry import describe, open_weights
from headrace.program.ops import Linear

from .loaded import Loaded, greedy, run
from .test_native_models import native_engine
from .test_tiny_models import NAMES


def embed(engine: Engine, prompt: list[int], pooling: Pooling, id: str = "e") -> NDArray[np.float64]:
    """The sum of hidden states, unnormalised."""
    engine.submit(Request(id, tuple(prompt), SamplingParams(max_tokens=0, temperature=0), pooling=pooling))
    events = []
    while engine.has_work:
        events += engine.step()
    assert events[-1].finish_reason is not None
    return np.sum([event.pooled for event in events if event.pooled is not None], axis=0)


def cosine(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


@pytest.mark.parametrize("pooling", Pooling)
@pytest.mark.parametrize("name", NAMES)
def test_both_backends_and_any_chunks_agree(name: str, pooling: Pooling, data_path: Path):
    folder = data_path / "tiny" / name
    ids = json.loads((folder / "expected.json").read_text())["ids"]
    reference = Loaded.open(folder, folder / "expected.json")
    expected = embed(reference.engine(num_blocks=40), ids, pooling)
    small = embed(reference.engine(num_blocks=40, max_step_tokens=16), ids, pooling)
    assert np.allclose(small, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())
    for chunk in (8, 256):
        engine = native_engine(folder, kv_f16=False, max_step_tokens=chunk, context_length=128)
        run(engine, greedy("before", ids, 2))  # the prompt is cached now
        found = embed(engine, ids, pooling)
        assert cosine(found, expected) > 0.9999
        assert np.allclose(found, expected, rtol=1e-2, atol=2e-3 * np.abs(expected).max())


@pytest.mark.parametrize("name", ["llama", "llama-mha-tied", "qwen3", "mixtral", "mamba"])
def test_the_last_tokens_state_gives_its_logits(name: str, data_path: Path):
    """What is pooled is the very input of the last matrix: the product has the logprobs of the next token."""
    folder = data_path / "tiny" / name
    expected = json.loads((folder / "expected.json").read_text())
    state = embed(native_engine(folder, kv_f16=False, context_length=128), expected["ids"], Pooling.LAST)
    checkpoint = open_checkpoint(folder)
    program = describe(checkpoint).program
    last = program.ops[-1]
    assert isinstance(last, Linear), "no softcap"
    logits = open_weights(checkpoint, program)[last.weight].dequantize().astype(np.float64) @ state
    token, logprob, _ = expected["greedy"]["steps"][0]
    assert logits.argmax() == token
    assert logits[token] - np.log(np.exp(logits).sum()) == pytest.approx(logprob, abs=1e-3)


def test_no_logits_are_computed(data_path: Path):
    engine = native_engine(data_path / "tiny" / "llama", kv_f16=False, context_length=128)
    native = engine.executor.backend._native
    native.set_profiling(True)
    embed(engine, list(range(1, 60)), Pooling.MEAN)
    runs = [runs for _, _, runs, _ in native.op_times()]  # the trunk's ops, then the head's
    assert runs[0] > 0
    assert runs[-1] == 0
    run(engine, greedy("r", list(range(1, 60)), 1))
    assert native.op_times()[-1][2] > 0, "the same for a reply does"


def test_embeddings_beside_replies(data_path: Path):
    """In one batch, at depth 2, with other requests' prompts and replies in the same steps."""
    folder = data_path / "tiny" / "llama"
    expected = json.loads((folder / "expected.json").read_text())
    alone = embed(native_engine(folder, kv_f16=False, context_length=128), expected["ids"], Pooling.MEAN)
    engine = native_engine(folder, kv_f16=False, max_step_tokens=24, context_length=128)
    engine.depth, model = 2, engine.executor.backend
    engine.executor = NativeExecutor(model, engine.scheduler.limits.vocab_size, overlapped=True)
    engine.submit(greedy("a", expected["ids"], 16))
    engine.submit(Request("e", tuple(expected["ids"]), SamplingParams(max_tokens=0), pooling=Pooling.MEAN))
    engine.submit(greedy("b", expected["ids"], 16))
    tokens: dict[str, list[int]] = {"a": [], "b": [], "e": []}
    pooled = []
    while engine.has_work:
        for event in engine.step():
            tokens[event.request_id] += event.tokens
            pooled += [event.pooled] if event.pooled is not None else []
        engine.scheduler.check()
    assert len(pooled) > 1
    assert cosine(np.sum(pooled, axis=0), alone) > 0.99999
    assert tokens["a"] == tokens["b"] and len(tokens["a"]) == 16 and not tokens["e"]
