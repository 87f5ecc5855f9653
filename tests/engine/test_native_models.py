"""The native backend against the independent float32 implementation."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean

import pytest
from typer.testing import CliRunner

from headrace.backends.native.model import FLOAT_PACKINGS, PACKINGS, NativeModel
from headrace.cli import app
from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.core.sequence import FinishReason
from headrace.engine.engine import Engine
from headrace.models.loaders.checkpoint import open_checkpoint
from headrace.models.registry import describe, open_weights
from headrace.program.cache import cache_groups
from headrace.server.build import ServeConfig, compose
from tests.model.write_quantized import write_quantized_gguf

from .loaded import Loaded, assert_greedy, greedy, run
from .test_tiny_models import NAMES


def native_engine(
    path: Path, *, kv_f16: bool, activations: str = "mixed", max_step_tokens: int = 256, context_length: int = 2048
) -> Engine:
    checkpoint = open_checkpoint(path)
    program = describe(checkpoint).program
    config = ServeConfig(max_running=8, max_step_tokens=max_step_tokens)
    groups = cache_groups(program, 16, element_bytes=2 if kv_f16 else 4, checkpoint_interval=64)
    num_blocks = (400,) * len(groups)
    model = NativeModel(
        program,
        open_weights(checkpoint, program),
        groups,
        num_blocks,
        max_tokens=max_step_tokens,
        context_length=context_length,
        num_threads=2,
        kv_f16=kv_f16,
        activations=activations,
    )
    return compose(
        config,
        model,
        groups,
        num_blocks,
        context_length=context_length,
        vocab_size=program.vocab_size,
        numerics=model.numerics,
    )


@pytest.mark.parametrize("chunk", [7, 256])
@pytest.mark.parametrize("name", NAMES)
def test_unquantized_weights_and_cache_are_right_to_rounding(name: str, chunk: int, data_path: Path) -> None:
    folder = data_path / "tiny" / name
    expected = json.loads((folder / "expected.json").read_text())
    engine = native_engine(folder, kv_f16=False, max_step_tokens=max(chunk, 8), context_length=128)
    params = SamplingParams(max_tokens=16, temperature=0, num_logprobs=1)
    reply = run(engine, Request("r", tuple(expected["ids"]), params, score_prompt=True))["r"]
    pairs = zip(reply.prompt_logprobs, expected["prompt_logprobs"], strict=True)
    assert max(abs(entry.logprob - value) for entry, value in pairs) <= 1e-3
    assert_greedy(reply, expected["greedy"]["steps"], 1e-3)
    again = run(engine, greedy("again", expected["ids"], 16))["again"]
    assert again.num_cached >= 80
    assert_greedy(again, expected["greedy"]["steps"], 1e-3)


def test_weights_packed_in_pieces_are_the_same(data_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixture's experts, which are stacked: none of them keeps the whole stack until it is packed."""
    folder = data_path / "tiny" / "mixtral"
    scored = Request("r", tuple(range(100)), SamplingParams(max_tokens=1, num_logprobs=1), score_prompt=True)
    replies, held = [], []
    read = NativeModel._packed

    def look(model: NativeModel) -> None:
        held.extend(array if array.base is None else array.base for array in model._unpacked)
        read(model)

    monkeypatch.setattr(NativeModel, "_packed", look)
    for at_once in (1, 1 << 30):
        monkeypatch.setattr("headrace.backends.native.model.PACKED_AT_ONCE", at_once)
        replies.append(run(native_engine(folder, kv_f16=True, context_length=128), scored)["r"].prompt_logprobs)
    assert replies[0] == replies[1]
    expert = json.loads((folder / "config.json").read_text())
    size = 4 * max(expert["intermediate_size"], expert["vocab_size"]) * expert["hidden_size"]
    assert max(array.nbytes for array in held) <= size


@pytest.mark.parametrize(("base", "changes"), [("llama", {}), ("mixtral", {"num_hidden_layers": 2})])
def test_16_bit_activations_are_float32_to_rounding(base: str, changes: dict, data_path: Path, tmp_path: Path) -> None:
    """Quantized weights of every format against the reference backend, which multiplies in float32."""
    config = json.loads((data_path / "tiny" / base / "config.json").read_text())
    path, formats = tmp_path / "tiny.gguf", [name for name in PACKINGS if name not in FLOAT_PACKINGS]
    write_quantized_gguf(path, {**config, "hidden_size": 256, "intermediate_size": 512, **changes}, formats)
    scored = Request("r", tuple(range(100)), SamplingParams(max_tokens=1, num_logprobs=1), score_prompt=True)

    def logprobs(engine: Engine) -> list[float]:
        return [entry.logprob for entry in run(engine, scored)["r"].prompt_logprobs]

    reference = logprobs(Loaded.open(path, data_path / "tiny" / base / "expected.json").engine(num_blocks=64))
    worst = {}
    for activations in ("int8", "mixed", "int16"):
        ours = logprobs(native_engine(path, kv_f16=False, activations=activations, context_length=128))
        worst[activations] = max(abs(a - b) for a, b in zip(ours, reference, strict=True))
    print(worst)
    assert worst["int16"] < 1e-3 < min(worst["mixed"], worst["int8"]) / 20


@pytest.mark.parametrize(
    ("model", "reference"), [("smollm2_path", "smollm2-135m-instruct.q4_1"), ("gemma_path", "gemma-3-270m.q4_k_m")]
)
def test_mixed_activations_and_an_f16_cache_cost_little(
    model: str, reference: str, data_path: Path, request: pytest.FixtureRequest
) -> None:
    """Mean absolute logprob difference under 0.03, perplexity within 0.5 %, over the reference prompts and replies."""
    expected = json.loads((data_path / f"{reference}.json").read_text())
    engine = native_engine(request.getfixturevalue(model), kv_f16=True)
    ours: list[float] = []
    theirs: list[float] = []
    for index, prompt in enumerate(expected["prompts"]):
        steps = prompt["greedy"]["steps"]
        ids = (*prompt["ids"], *(step[0] for step in steps))
        scored = Request(f"p{index}", ids, SamplingParams(max_tokens=1, temperature=0), score_prompt=True)
        ours += [entry.logprob for entry in run(engine, scored)[scored.id].prompt_logprobs]
        theirs += [*prompt["prompt_logprobs"], *(step[1] for step in steps)]
    difference = fmean(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    ratio = math.exp(fmean(theirs) - fmean(ours))
    print(f"{reference}: mean difference {difference:.4f}, perplexity x {ratio:.4f} over {len(ours)} tokens")
    assert difference < 0.03
    assert abs(ratio - 1) < 0.005


@pytest.mark.long
@pytest.mark.parametrize("model", ["smollm2_path", "gemma_path"])
def test_prose_is_as_good_as_in_float32(model: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """By the command, over 4,000 tokens that the models find hard."""
    root = Path(__file__).parents[2]
    options = ["--model", str(request.getfixturevalue(model)), "--json", str(tmp_path / "result.json")]
    reference = ["--reference-set", "backend=reference", "--reference-set", "kv_format=f32"]
    texts = [str(root / "README.md"), str(root / "docs" / "architecture.md")]
    ended = CliRunner().invoke(app, ["eval", "divergence", *texts, *options, *reference])
    assert ended.exit_code == 0, ended.output
    result = json.loads((tmp_path / "result.json").read_text())
    print({name: value for name, value in result.items() if isinstance(value, float)})
    assert result["num_tokens"] > 4000
    assert result["abs_logprob_mean"] < 0.03
    assert result["kl_mean"] < 0.01
    assert abs(result["perplexity_ratio"] - 1) < 0.005


def test_two_engines_of_one_process_keep_their_tokens_apart(data_path: Path):
    """What a step answers into is no other executor's: one engine steps while another's step has yet to be read."""
    folder = data_path / "tiny" / "llama"
    asked = [Request("r", prompt, SamplingParams(max_tokens=12, temperature=0)) for prompt in ((1, 2, 3), (9, 8, 7, 6))]
    alone = [run(native_engine(folder, kv_f16=True, context_length=128), request)["r"].tokens for request in asked]
    assert alone[0] != alone[1]
    first, second = (native_engine(folder, kv_f16=True, context_length=128) for _ in asked)
    model, others = first.executor.backend, []
    step = model.step

    def interrupted(inputs, readouts) -> None:
        step(inputs, readouts)
        others.extend(token for event in second.step() for token in event.tokens)

    model.step = interrupted
    second.submit(asked[1])
    assert run(first, asked[0])["r"].tokens == alone[0]
    while second.has_work:
        others.extend(token for event in second.step() for token in event.tokens)
    assert others == alone[1]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_row_without_a_token_ends_its_sequence_only(depth: int, data_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The sampler says -1 where numbers are not finite: no id, and nothing that another step may look up."""
    folder = data_path / "tiny" / "llama"
    engine = native_engine(folder, kv_f16=True, context_length=128)
    engine.depth = depth
    step, num_steps = NativeModel.step, 0

    def failing(self: NativeModel, inputs, readouts) -> None:
        nonlocal num_steps
        step(self, inputs, readouts)
        num_steps += 1
        if num_steps == 4:
            readouts.tokens[0] = -1

    monkeypatch.setattr(NativeModel, "step", failing)
    for name in ("bad", "good"):
        engine.submit(Request(name, (1, 2, 3), SamplingParams(max_tokens=12, temperature=0)))
    events = []
    while engine.has_work:
        events += engine.step()
        engine.scheduler.check()
    last = {event.request_id: event for event in events if event.finish_reason is not None}
    assert last["bad"].finish_reason is FinishReason.ERROR
    assert "no token" in (last["bad"].error or "")
    assert last["good"].finish_reason is FinishReason.LENGTH
    assert all(token >= 0 for event in events for token in event.tokens)
    assert all(group.num_used == 0 for group in engine.stats().groups)
