"""`headrace eval` on the reference backend against right values obtained elsewhere."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from headrace.backends.kv_store import KVStore
from headrace.backends.reference import ReferenceModel
from headrace.backends.reference.runner import ReferenceRunner
from headrace.cli import app
from headrace.engine.engine import Engine
from headrace.evaluation.divergence import diverge
from headrace.evaluation.scoring import perplexity, score
from headrace.evaluation.texts import Window, windows
from headrace.program.cache import cache_groups
from headrace.server.build import ServeConfig, build, compose
from tests.model.harness import OneSequence, load

RUNNER = CliRunner()
REFERENCE = ("--set", "backend=reference", "--set", "kv_format=f32")


def run(*arguments: str | Path) -> dict[str, Any]:
    done = RUNNER.invoke(app, ["eval", *map(str, arguments)])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_perplexity_is_what_the_independent_logprobs_imply(smollm2_path, data_path, tmp_path):
    """tests/data holds prompt logprobs of an independent float32 implementation: within 0.1 %, all and one by one."""
    prompts = json.loads((data_path / "smollm2-135m-instruct.q4_1.json").read_text())["prompts"]
    files = []
    for number, prompt in enumerate(prompts):
        files.append(tmp_path / f"{number}.json")
        files[-1].write_text(json.dumps(prompt["ids"]))
    found = run("perplexity", *files, "--model", smollm2_path, "--context", "1200", *REFERENCE)
    expected = [value for prompt in prompts for value in prompt["prompt_logprobs"]]
    assert found["num_tokens"] == len(expected)
    implied = math.exp(-sum(expected) / len(expected))
    difference = found["perplexity"] / implied - 1
    print(f"\nperplexity {found['perplexity']:.6f}, implied {implied:.6f}: {100 * difference:+.5f} %")
    assert abs(difference) < 1e-3
    for file, prompt in zip(files, prompts, strict=True):
        implied = math.exp(-sum(prompt["prompt_logprobs"]) / len(prompt["prompt_logprobs"]))
        assert found["texts"][str(file)]["perplexity"] == pytest.approx(implied, rel=1e-3)


def test_windows_score_as_one_text_where_nothing_is_cut(smollm2_path, data_path):
    """A text in one window, and the same in windows whose overlap is all that came before: the same logprobs."""
    prompt = json.loads((data_path / "smollm2-135m-instruct.q4_1.json").read_text())["prompts"][1]["ids"]
    engine = build(ServeConfig(model=str(smollm2_path), max_running=4, backend="reference", kv_format="f32")).engine
    whole = score(engine, windows(prompt, 64, 1))
    parts = score(engine, [Window(tuple(prompt[: i + 1]), i) for i in range(1, len(prompt))])
    assert parts == pytest.approx(whole, abs=1e-4)
    assert perplexity(whole).mean_nll_error == pytest.approx(np.std(whole, ddof=1) / math.sqrt(len(whole)))


def tiny_engine(model: ReferenceModel, max_step_tokens: int) -> Engine:
    groups = cache_groups(model.program, 16, checkpoint_interval=256)
    num_blocks = (16,) * len(groups)
    return compose(
        ServeConfig(max_running=2, max_step_tokens=max_step_tokens),
        ReferenceRunner(model, KVStore(model.program, groups, num_blocks)),
        groups,
        num_blocks,
        context_length=128,
        vocab_size=model.program.vocab_size,
        numerics="test",
    )


def test_divergence_against_whole_distributions(data_path):
    """A tiny model and the same with noise in its weights, steps of different sizes, against KL by its definition."""
    reference = load(data_path / "tiny" / "llama")
    noise = np.random.default_rng(0)
    weights = {name: w + noise.normal(0, 0.02, w.shape).astype(np.float32) for name, w in reference.weights.items()}
    other = ReferenceModel(reference.program, weights)
    vocab_size = reference.program.vocab_size
    tokens = np.random.default_rng(1).integers(0, vocab_size, 60).tolist()
    parts = list(windows(tokens, 25, 10))
    found = diverge(tiny_engine(reference, 7), tiny_engine(other, 16), parts, vocab_size)

    kl, difference, same = [], [], []
    for window in parts:
        p, q = (OneSequence(model).compute(window.tokens) for model in (reference, other))
        for i in range(window.num_known, len(window.tokens)):
            kl.append(sum(math.exp(a) * (a - b) for a, b in zip(p[i - 1], q[i - 1], strict=True)))
            difference.append(abs(p[i - 1][window.tokens[i]] - q[i - 1][window.tokens[i]]))
            same.append(p[i - 1].argmax() == q[i - 1].argmax())
    assert len(kl) == 59
    assert found.kl == pytest.approx(kl, abs=1e-5)
    assert found.abs_logprob == pytest.approx(difference, abs=1e-4)
    assert found.same_top.tolist() == same
    assert found.kl.mean() > 1e-3, "the noise shows"
    assert found.as_dict()["kl_mean"] == pytest.approx(np.mean(kl), rel=1e-3)
    logprobs = score(tiny_engine(other, 16), parts)
    assert found.model.perplexity == pytest.approx(perplexity(logprobs).perplexity, rel=1e-5)


def test_a_model_does_not_diverge_from_itself(smollm2_path, tmp_path):
    """Whatever the size of its steps (a reference's sums depend on the number of rows, so not to the last bit)."""
    text = tmp_path / "text.txt"
    text.write_text("Paged attention divides the cache into blocks, and a table says where they are.")
    both = (*REFERENCE, "--reference-set", "backend=reference", "--reference-set", "kv_format=f32")
    found = run("divergence", text, "--model", smollm2_path, "--context", "12", "--set", "max_step_tokens=64", *both)
    assert found["kl_max"] < 1e-6 and found["same_top_share"] == 1
    assert found["perplexity_ratio"] == pytest.approx(1, abs=1e-4)


def test_vocabularies_must_be_the_same(smollm2_path, gemma_path, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("One two three.")
    arguments = [
        "eval",
        "divergence",
        str(text),
        "--model",
        str(smollm2_path),
        "--reference",
        str(gemma_path),
    ]
    done = RUNNER.invoke(app, arguments)
    assert done.exit_code == 1
    assert "different vocabularies" in done.stderr


def test_similarity(tmp_path):
    """Two texts, scored by hand: 5 of 6 words and 3 of 5 pairs, then nothing."""
    (tmp_path / "h").write_text("the cat sat on the mat\n")
    (tmp_path / "r").write_text("the cat sat on a mat\n")
    found = run("similarity", tmp_path / "h", tmp_path / "r")
    assert found["rouge1"] == pytest.approx(5 / 6)
    assert found["rouge2"] == pytest.approx(3 / 5)
    assert found["rougeL"] == pytest.approx(5 / 6)
    # BLEU-4 by its definition: 5/6 words, 3/5 pairs, 2/4 triples, 1/3 quadruples, no brevity penalty.
    assert found["bleu"] == pytest.approx(100 * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25)
    assert "version:" in found["bleu_signature"]
    (tmp_path / "short").write_text("")
    done = RUNNER.invoke(app, ["eval", "similarity", str(tmp_path / "h"), str(tmp_path / "short")])
    assert done.exit_code == 1 and "0 lines in reference file 1" in done.stderr
