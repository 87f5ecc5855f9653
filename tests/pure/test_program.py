"""Programs as data: what a builder refuses, what steps cost, where buffers lie. No tensors."""

from __future__ import annotations

import math
import random
import subprocess
import sys

import pytest

from headrace.core.cache import CacheKind
from headrace.core.errors import ConfigurationError
from headrace.models.architectures.blocks import Attention
from headrace.models.architectures.llama import LlamaConfig, llama
from headrace.program.builder import Builder, ProgramError
from headrace.program.cache import AttentionEntry, cache_groups
from headrace.program.cost import StepShape, keys_read, query_key_pairs
from headrace.program.ops import Add, Attend, Linear
from headrace.program.passes import dying_buffers, plan_buffers
from headrace.program.program import Program
from headrace.program.rope import RopeScaling, rotation

ROTATION = rotation(10000.0, 16)


def decoder(**changes: object) -> Program:
    """Llama with the sizes of SmolLM2 135M."""
    settings: dict[str, object] = {
        "vocab_size": 49152,
        "context_length": 8192,
        "num_layers": 30,
        "hidden": 576,
        "intermediate": 1536,
        "attention": Attention(heads=9, kv_heads=3, head_dim=64, scale=0.125),
        "rotation": rotation(100000.0, 64),
        "windows": (0,) * 30,
        "norm_eps": 1e-5,
        "is_tied": True,
    }
    return llama(LlamaConfig(**{**settings, **changes}), Builder())  # type: ignore[arg-type]


# Recording


def test_programs_load_no_numpy() -> None:
    code = "import sys, headrace.program.builder, headrace.program.passes; print('numpy' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_widths_follow_from_the_ops() -> None:
    p = Builder()
    x = p.embed("token_embd", 320, 64)
    w = p.layer(3)
    q, k, v = p.linear(x, w["attn_q"], 128), p.linear(x, w["attn_k"], 32), p.linear(x, w["attn_v"], 48)
    a = p.attend(q, k, v, heads=8, kv_heads=2, scale=0.25)
    assert [p.width(b) for b in (x, q, k, v, a)] == [64, 128, 32, 48, 8 * 24]
    latent = p.attend(
        p.linear(x, w["q"], 160), p.linear(x, w["kv"], 40), None, heads=4, kv_heads=1, scale=1.0, value_width=32
    )
    assert p.width(latent) == 4 * 32
    heads = p.slice(q, 2, 5, heads=8)
    assert p.width(heads) == 8 * 3
    assert p.width(p.concat((heads, q), heads=8)) == 8 * (3 + 16)
    assert p.width(p.route(x, w["ffn_gate_inp"], 8, 2)) == 4
    program = p.finish(p.linear(p.select_rows(a), "output", 320))
    assert program.weights["blk.3.attn_q"].shape == (128, 64)
    assert program.vocab_size == 320
    assert program.head[0].inputs == (a,)


def test_widths_that_do_not_fit_are_refused() -> None:
    p = Builder()
    x = p.embed("token_embd", 320, 64)
    narrow = p.linear(x, "blk.0.ffn_up", 48)
    with pytest.raises(ProgramError, match=r"add reads 64 numbers per row, but %1 \(linear\) holds 48"):
        p.add(x, narrow)
    with pytest.raises(ProgramError, match=r"64 cannot be cut into 5 equal parts"):
        p.rope(x, ROTATION, heads=5)
    with pytest.raises(ProgramError, match=r"rope turns numbers 4 to 20 of each head.*only 16"):
        p.rope(x, ROTATION, heads=4, offset=4)
    with pytest.raises(ProgramError, match=r"output wants shape \[320, 48\].*\[320, 64\]"):
        p.linear(x, "output", 320)
        p.linear(narrow, "output", 320)
    with pytest.raises(ProgramError, match=r"takes numbers \[8, 20\) of each head, but a head has 16"):
        p.slice(x, 8, 20, heads=4)
    with pytest.raises(ProgramError, match="chooses 3 of 2 experts"):
        p.route(x, "gate", 8, 3, num_groups=4, top_groups=1)
    with pytest.raises(ProgramError, match="value_width from 1 to the key width 16, not 0"):
        p.attend(x, p.linear(x, "k", 16), None, heads=4, kv_heads=1, scale=1.0)


def test_trunk_and_head_do_not_mix() -> None:
    p = Builder()
    x = p.embed("token_embd", 320, 64)
    with pytest.raises(ProgramError, match="never selects rows"):
        p.finish(x)
    rows = p.select_rows(x)
    with pytest.raises(ProgramError, match="other side of select_rows"):
        p.add(rows, x)
    with pytest.raises(ProgramError, match="needs every token"):
        p.attend(rows, rows, rows, heads=1, kv_heads=1, scale=1.0)
    with pytest.raises(ProgramError, match="recorded twice"):
        p.select_rows(x)


def test_listing_names_every_op() -> None:
    lines = str(decoder(num_layers=1, windows=(512,))).splitlines()
    assert "attend %5 %6 %4 group=0 entry=0 heads=9" in "\n".join(lines)
    assert lines[-1] == "%18 = linear %17 token_embd[49152, 576] -> [rows, 49152]"
    assert "cache 0: window 512, 1 entries" in lines


# Cache


def test_layers_of_one_kind_and_window_share_a_group() -> None:
    program = decoder(num_layers=5, windows=(512, 0, 512, 256, 512))
    assert [(s.kind, s.window, len(s.entries)) for s in program.cache] == [
        (CacheKind.WINDOW, 512, 3),
        (CacheKind.FULL, 0, 1),
        (CacheKind.WINDOW, 256, 1),
    ]
    assert [(op.group, op.entry) for op in program.ops if isinstance(op, Attend)] == [
        (0, 0), (1, 0), (0, 1), (2, 0), (0, 2),
    ]  # fmt: skip
    assert program.cache[0].entries[0] == AttentionEntry(kv_heads=3, key_width=64, value_width=64)


def test_bytes_per_block() -> None:
    (group,) = cache_groups(decoder(), block_size=16, element_bytes=2)
    # 30 layers x 3 heads x (64 + 64) numbers x 2 bytes x 16 tokens
    assert (group.kind, group.bytes_per_block) == (CacheKind.FULL, 30 * 3 * 128 * 2 * 16)


def test_states_need_a_checkpoint_interval() -> None:
    p = Builder()
    x = p.embed("token_embd", 320, 64)
    y = p.conv(x, "conv", 4)
    y = p.ssm_scan(y, y, p.linear(y, "b", 16), p.linear(y, "c", 16), a="a", d="d")
    program = p.finish(p.linear(p.select_rows(y), "output", 320))
    with pytest.raises(ConfigurationError, match=r"checkpoint_interval is 40.*multiple of the block size, 16"):
        cache_groups(program, 16, checkpoint_interval=40)
    (group,) = cache_groups(program, 16, element_bytes=2, checkpoint_interval=64)
    assert group.kind is CacheKind.STATE
    assert group.bytes_per_block == 4 * (3 * 64 + 64 * 16)  # float32 whatever the cache's format
    assert group.checkpoint_interval == 64


# Costs


def matmul_flops(program: Program, step: StepShape) -> tuple[float, float]:
    sizes = program.weight_bytes()
    return (
        sum(op.cost(step, sizes).flops for op in program.trunk if isinstance(op, Linear)),
        sum(op.cost(step.of_head(), sizes).flops for op in program.head if isinstance(op, Linear)),
    )


def test_flops_of_smollm2() -> None:
    """106.2 M weights in the layers and 28.3 M in the output matrix, two flops each."""
    program = decoder()
    assert program.num_parameters == 134_515_008
    layers, head = matmul_flops(program, program.step_shape([(0, 100)], num_rows=3))
    assert layers == 100 * 2 * 106_168_320
    assert head == 3 * 2 * 49152 * 576
    without_rows = program.step_shape([(0, 100)], num_rows=0)
    assert matmul_flops(program, without_rows)[1] == 0


def test_bytes_of_a_decode_step_are_the_weights_and_the_context() -> None:
    program = decoder()
    sizes = program.weight_bytes(element_bytes=0.5)
    short = program.cost(program.step_shape([(0, 1)], 1, cache_element_bytes=2), sizes)
    long = program.cost(program.step_shape([(1000, 1)], 1, cache_element_bytes=2), sizes)
    weights = sum(sizes.values())
    assert weights < short.bytes_read < 1.15 * weights  # activations are the rest
    assert long.bytes_read - short.bytes_read == 1000 * 30 * 2 * 192 * 2
    assert long.flops - short.flops == 1000 * 30 * 9 * 2 * (64 + 64)
    assert long.bytes_written == short.bytes_written


def test_pairs_and_keys_against_counting() -> None:
    for start in range(9):
        for count in range(1, 9):
            for window in (0, 1, 3, 5, 20):
                seen = [range(max(0, q + 1 - window) if window else 0, q + 1) for q in range(start, start + count)]
                assert query_key_pairs(start, count, window) == sum(map(len, seen))
                assert keys_read(start, count, window) == len(set().union(*seen))


def test_experts_read_what_they_touch() -> None:
    p = Builder()
    x = p.embed("token_embd", 320, 64)
    y = p.experts(x, p.route(x, "gate", 8, 2), gate="g", up="u", down="d", num_experts=8, intermediate=128)
    op = p.finish(p.linear(p.select_rows(y), "output", 320)).ops[3]
    sizes = {"g": 1000, "u": 1000, "d": 1000}
    few = op.cost(StepShape(1, 0, 1), sizes).bytes_read - 4 * (64 + 4)
    many = op.cost(StepShape(1000, 0, 1), sizes).bytes_read - 4000 * (64 + 4)
    assert few == pytest.approx(3000 * 2 / 8)
    assert many == pytest.approx(3000)


# Buffers


def overlapping(program: Program) -> list[tuple[int, int]]:
    """Pairs of buffers that are live together and share storage, by brute force over the ops."""
    plan = plan_buffers(program)
    last = {b: i for i, op in enumerate(program.ops) for b in (*op.inputs, op.output)}
    last[program.head[0].inputs[0]] = len(program.ops)
    born = {op.output: i for i, op in enumerate(program.ops)}
    is_head = {op.output: i >= program.head_start for i, op in enumerate(program.ops)}
    return [
        (a, b)
        for a in born
        for b in born
        if a < b
        and is_head[a] == is_head[b]
        and born[b] <= last[a]
        and plan.offsets[a] < plan.offsets[b] + program.widths[b]
        and plan.offsets[b] < plan.offsets[a] + program.widths[a]
    ]


def test_live_buffers_never_share_storage() -> None:
    assert overlapping(decoder()) == []
    for seed in range(30):
        assert overlapping(random_program(random.Random(seed))) == []


def random_program(rng: random.Random) -> Program:
    p = Builder()
    buffers = [p.embed("token_embd", 320, 64)]
    for i in range(40):
        x = rng.choice(buffers[-6:])
        if rng.random() < 0.5:
            buffers.append(p.linear(x, f"w{i}", rng.choice((16, 48, 64, 200))))
        else:
            same = [b for b in buffers[-6:] if p.width(b) == p.width(x)]
            buffers.append(p.add(x, rng.choice(same)))
    return p.finish(p.linear(p.select_rows(buffers[-1]), "output", 320))


def test_storage_is_reused() -> None:
    program = decoder()
    plan = plan_buffers(program)
    # The widest moment of a layer: residual, normed input, gate, up and their product.
    assert plan.peak_bytes_per_token <= 4 * (2 * 576 + 3 * 1536 + 576)
    assert plan.trunk_width >= 576 + 3 * 1536
    assert plan.trunk_width < sum(program.widths) / 30
    # The logits start after both rows of 576: the hole the first one leaves is too small for them.
    assert plan.peak_bytes_per_row == 4 * (2 * 576 + 49152)


def test_buffers_die_after_their_last_reader() -> None:
    p = Builder()
    x = p.embed("token_embd", 320, 64)
    y = p.add(x, x)
    z = p.add(y, x)
    program = p.finish(p.linear(p.select_rows(z), "output", 320))
    assert [type(op) for op in program.trunk[1:]] == [Add, Add]
    assert [set(d) for d in dying_buffers(program.trunk, frozenset({z}))] == [set(), set(), {x, y}]


# Rotations, against numbers worked out by hand from the papers' formulas


def test_linear_scaling_divides() -> None:
    scaled = rotation(10000.0, 8, RopeScaling("linear", 4.0))
    assert scaled.frequencies == pytest.approx([0.25, 0.025, 0.0025, 0.00025])


def test_llama3_keeps_short_waves_and_stretches_long_ones() -> None:
    """Llama 3.1's own settings: 64 pairs, base 500000, factor 8 over 8192 tokens."""
    plain = rotation(500000.0, 128).frequencies
    scaled = rotation(500000.0, 128, RopeScaling("llama3", 8.0, 8192)).frequencies
    waves = [2 * math.pi / f for f in plain]
    for wave, before, after in zip(waves, plain, scaled, strict=True):
        if wave < 8192 / 4:
            assert after == before
        elif wave > 8192:
            assert after == before / 8
        else:
            assert before / 8 < after < before


def test_longrope_chooses_once_by_the_served_context() -> None:
    scaling = RopeScaling("longrope", 4.0, 4096, short_factors=(1.0, 1.0), long_factors=(2.0, 4.0))
    short = rotation(10000.0, 4, scaling, context_length=4096)
    long = rotation(10000.0, 4, scaling, context_length=4097)
    assert short.frequencies == pytest.approx([1.0, 0.01])
    assert long.frequencies == pytest.approx([0.5, 0.0025])
    assert short.attention_factor == long.attention_factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(4096)))


def test_yarn_temperature() -> None:
    assert rotation(1e4, 16, RopeScaling("yarn", 4.0, 32)).attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    equal = RopeScaling("yarn", 40.0, 4096, mscale=1.0, mscale_all_dim=1.0)
    assert rotation(1e4, 64, equal).attention_factor == 1.0  # DeepSeek-V3 puts it into the attention's scale


def test_rope_factors_must_fit() -> None:
    with pytest.raises(ConfigurationError, match="3 rope factors do not fit 4 pairs"):
        rotation(10000.0, 8, factors=(1.0, 2.0, 3.0))
