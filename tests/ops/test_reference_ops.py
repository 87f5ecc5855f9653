"""Each op of the reference against loops in float64, over odd sizes."""

from __future__ import annotations

import math
from array import array
from types import SimpleNamespace

import numpy as np
import pytest

from headrace.backends.inputs import BatchInputs
from headrace.backends.kv_store import KVStore
from headrace.backends.reference import ReferenceModel
from headrace.backends.reference.meanings import MEANINGS, Step
from headrace.backends.reference.rowwise import activate
from headrace.core.cache import NO_BLOCK, CacheGroup, CacheKind, Copy
from headrace.core.plan import ReadoutKind, Span, StepPlan
from headrace.program import ops
from headrace.program.builder import Builder
from headrace.program.cache import cache_groups
from headrace.program.mixture_ops import Experts, Route
from headrace.program.program import Program
from headrace.program.recurrent_ops import Conv, SsmScan
from headrace.program.rope import RopeScaling, rotation
from tests.ops import brute

IN_CACHE = StepPlan.IN_CACHE


def numbers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def batch(
    token_ids: np.ndarray,
    positions: np.ndarray,
    parents: np.ndarray,
    readout_rows: np.ndarray,
    span: tuple[int, int] | None = None,
    table: np.ndarray | None = None,
) -> BatchInputs:
    """At most one span (start, count), of one cache group."""
    none = np.zeros(0, np.int32)
    numbers = none if span is None else np.array([*span, 0], np.int32)
    starts = none if table is None else np.zeros(1, np.int32)
    tables = none if table is None else table
    return BatchInputs(token_ids, positions, parents, numbers, tables, starts, readout_rows, is_chain=False)


def step_of(num_tokens: int, weights: dict[str, np.ndarray] | None = None, positions: np.ndarray | None = None) -> Step:
    chain = np.arange(num_tokens, dtype=np.int32)
    inputs = batch(chain, chain if positions is None else positions, chain - 1, chain)
    return Step(inputs, weights or {}, None)  # type: ignore[arg-type]


def run(op: ops.Op, step: Step, *inputs: np.ndarray) -> np.ndarray:
    out = MEANINGS[type(op)](op, step, *inputs)
    assert out.dtype == np.float32
    return out


def close(found: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)


# Row by row


@pytest.mark.parametrize(("rows", "width", "heads", "offset"), [(1, 7, 1, 0.0), (5, 24, 3, 0.0), (3, 33, 1, 1.0)])
def test_rms_norm(rows: int, width: int, heads: int, offset: float) -> None:
    x, w = numbers(1, rows, width), numbers(2, width // heads)
    op = ops.RmsNorm((0,), 1, "w", width, 1e-5, heads, offset)
    wanted = x.astype(np.float64).copy()
    for row in wanted.reshape(rows * heads, -1):
        row[:] = row / math.sqrt(sum(v * v for v in row) / len(row) + 1e-5) * (offset + w)
    close(run(op, step_of(rows, {"w": w}), x), wanted)


def test_layer_norm() -> None:
    x, w, b = numbers(1, 3, 17), numbers(2, 17), numbers(3, 17)
    wanted = np.empty((3, 17))
    for i, row in enumerate(x.astype(np.float64)):
        mean = sum(row) / 17
        deviation = math.sqrt(sum((v - mean) ** 2 for v in row) / 17 + 1e-5)
        wanted[i] = (row - mean) / deviation * w + b
    close(run(ops.LayerNorm((0,), 1, "w", "b", 17, 1e-5), step_of(3, {"w": w, "b": b}), x), wanted)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_linear_and_head_linear(rows: int) -> None:
    x, w, b = numbers(1, rows, 12), numbers(2, 7, 12), numbers(3, 7)
    op = ops.Linear((0,), 1, "w", "b", 12, 7)
    close(run(op, step_of(rows, {"w": w, "b": b}), x), x.astype(np.float64) @ w.T.astype(np.float64) + b)
    heads = numbers(4, 3, 5, 4)
    wanted = np.concatenate([x[:, 4 * h : 4 * h + 4].astype(np.float64) @ heads[h].T for h in range(3)], axis=1)
    close(run(ops.HeadLinear((0,), 1, "w", 3, 4, 5), step_of(rows, {"w": heads}), x), wanted)


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize(
    "scaling",
    [
        RopeScaling(),
        RopeScaling("linear", 3.0),
        RopeScaling("llama3", 8.0, 32),
        RopeScaling("yarn", 4.0, 32),
        RopeScaling("longrope", 4.0, 32, short_factors=(1.0,) * 3, long_factors=(1.0, 1.5, 4.0)),
    ],
    ids=lambda s: s.kind,
)
@pytest.mark.parametrize(("heads", "head_dim", "offset"), [(1, 6, 0), (3, 11, 5), (2, 9, 1)])
def test_rope(style: str, scaling: RopeScaling, heads: int, head_dim: int, offset: int) -> None:
    """Whole and partial heads, odd ones too."""
    turn = rotation(10000.0, 6, scaling, context_length=100, style=style)  # type: ignore[arg-type]
    positions = np.array([0, 1, 17, 1001], np.int32)
    x = numbers(1, 4, heads * head_dim)
    op = ops.Rope((0,), 1, heads, head_dim, turn, offset)
    close(run(op, step_of(4, positions=positions), x), brute.rope(x, positions, heads, offset, turn))


def test_yarn_frequencies_by_the_paper() -> None:
    """Peng et al. 2023, equations 17 to 23 with transformers' rounding of the ramp's ends."""
    base, dims, original, factor = 10000.0, 16, 32, 4.0

    def pair_of(turns: float) -> float:
        return dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(pair_of(32)), 0), min(math.ceil(pair_of(1)), dims - 1)
    wanted = []
    for j in range(dims // 2):
        plain = base ** (-2 * j / dims)
        ramp = min(max((j - low) / (high - low), 0), 1)
        wanted.append(plain / factor * ramp + plain * (1 - ramp))
    assert rotation(base, dims, RopeScaling("yarn", factor, original)).frequencies == pytest.approx(wanted)


def test_activations() -> None:
    x = np.array([[-90.0, -3.0, -0.5, 0.0, 0.5, 3.0, 90.0]], np.float32)
    functions = {
        "silu": lambda v: v / (1 + math.exp(-v)),
        "sigmoid": lambda v: 1 / (1 + math.exp(-v)),
        "relu": lambda v: max(v, 0.0),
        "softplus": lambda v: math.log1p(math.exp(v)),
        "gelu": lambda v: 0.5 * v * (1 + math.erf(v / math.sqrt(2))),
        "gelu_tanh": lambda v: 0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))),
    }
    for kind, function in functions.items():
        found = activate(kind, x)  # type: ignore[arg-type]
        assert found.dtype == np.float32
        close(found[0], np.array([function(float(v)) for v in x[0]]))
    gated = run(ops.Gate((0, 1), 2, "silu", 7), step_of(1), x, 2 * x)
    close(gated, activate("silu", x) * 2 * x)


def test_moves_and_sums() -> None:
    x, y = numbers(1, 3, 12), numbers(2, 3, 6)
    assert (run(ops.Slice((0,), 1, 3, 4, 1, 3), step_of(3), x) == x.reshape(3, 3, 4)[:, :, 1:3].reshape(3, 6)).all()
    both = run(ops.Concat((0, 1), 2, 3, (4, 2)), step_of(3), x, y).reshape(3, 3, 6)
    assert (both[:, :, :4] == x.reshape(3, 3, 4)).all()
    assert (both[:, :, 4:] == y.reshape(3, 3, 2)).all()
    close(run(ops.Add((0, 0), 1, 12), step_of(3), x, x), 2 * x)
    close(run(ops.Scale((0,), 1, 12, 0.3), step_of(3), x), 0.3 * x)
    close(run(ops.Softcap((0,), 1, 12, 2.0), step_of(3), x), 2 * np.tanh(x.astype(np.float64) / 2))


# Attention


def attention_store(op: ops.Attend, block_size: int, num_blocks: int, dtype: type = np.float32) -> KVStore:
    p = Builder()
    x = p.embed("e", 4, 1)
    q = p.linear(x, "q", op.heads * op.key_width)
    k = p.linear(x, "k", op.kv_heads * op.key_width)
    v = None if op.is_latent else p.linear(x, "v", op.kv_heads * op.value_width)
    p.attend(q, k, v, heads=op.heads, kv_heads=op.kv_heads, scale=1.0, window=op.window, value_width=op.value_width)
    program = p.finish(p.linear(p.select_rows(x), "o", 4))
    return KVStore(program, cache_groups(program, block_size), [num_blocks], dtype)


def attend_span(
    op: ops.Attend,
    store: KVStore,
    span: tuple[int, int],
    table: np.ndarray,
    qkv: tuple[np.ndarray, ...],
    positions: np.ndarray | None = None,
    parents: np.ndarray | None = None,
) -> np.ndarray:
    start, count = span
    rows = np.arange(count, dtype=np.int32)
    positions = rows + start if positions is None else positions
    inputs = batch(rows, positions, rows - 1 if parents is None else parents, rows, span, table)
    return run(op, Step(inputs, {}, store), *qkv)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "key_width", "value_width", "window", "softcap"),
    [(4, 2, 8, 8, 0, 0.0), (3, 3, 5, 7, 0, 0.0), (6, 1, 4, 4, 9, 0.0), (4, 2, 8, 8, 40, 3.0), (2, 1, 6, 6, 1, 0.0)],
)
@pytest.mark.parametrize("chunks", [(150,), (1, 64, 65, 20), (3,) * 50], ids=["whole", "uneven", "threes"])
def test_attention_in_chunks(
    heads: int, kv_heads: int, key_width: int, value_width: int, window: int, softcap: float, chunks: tuple[int, ...]
) -> None:
    """Any chunks, scattered blocks; blocks behind the window are gone from the table when they can be."""
    tokens, size = 150, 4
    inputs = (0, 1, 2)
    op = ops.Attend(inputs, 3, 0, 0, heads, kv_heads, key_width, value_width, 0.3, window, softcap)
    q, k, v = (numbers(i, tokens, w) for i, w in enumerate(op.input_widths))
    store = attention_store(op, size, 50)
    table = np.random.default_rng(0).permutation(50).astype(np.int32)[: -(-tokens // size)]
    found, start = [], 0
    for count in chunks:
        live = table.copy()
        if window:
            live[: max(0, start + 1 - window) // size] = NO_BLOCK
        rows = slice(start, start + count)
        found.append(attend_span(op, store, (start, count), live, (q[rows], k[rows], v[rows])))
        start += count
    positions = np.arange(tokens)
    wanted = brute.attention(
        q.reshape(tokens, heads, -1),
        k.reshape(tokens, kv_heads, -1),
        v.reshape(tokens, kv_heads, -1),
        positions,
        positions[None, :] <= positions[:, None],
        positions,
        scale=0.3,
        window=window,
        softcap=softcap,
    )
    close(np.concatenate(found), wanted)


def test_latent_attention_reads_values_from_keys() -> None:
    op = ops.Attend((0, 1), 2, 0, 0, heads=3, kv_heads=1, key_width=10, value_width=7, scale=0.2)
    q, k = numbers(1, 9, 30), numbers(2, 9, 10)
    store = attention_store(op, 4, 5)
    found = attend_span(op, store, (0, 9), np.array([3, 0, 4], np.int32), (q, k))
    positions = np.arange(9)
    causal = positions[None, :] <= positions[:, None]
    keys = k[:, None, :]
    wanted = brute.attention(q.reshape(9, 3, 10), keys, keys[..., :7], positions, causal, positions, scale=0.2)
    close(found, wanted)


@pytest.mark.parametrize("window", [0, 5, 30])
@pytest.mark.parametrize("seed", range(6))
def test_trees_of_drafts(seed: int, window: int) -> None:
    """A drafted token sees the cache and its ancestors: not its siblings, whatever slots they lie in."""
    rng = np.random.default_rng(seed)
    start, count, size = 13, int(rng.integers(2, 90)), 4
    op = ops.Attend((0, 1, 2), 3, 0, 0, 4, 2, 8, 8, 0.3, window)
    parents = np.array([rng.integers(-1, i) if i else IN_CACHE for i in range(count)], np.int32)
    depth = np.zeros(count, np.int32)
    for i, parent in enumerate(parents):
        depth[i] = 0 if parent == IN_CACHE else depth[parent] + 1
    q, k, v = (numbers(i, start + count, w) for i, w in enumerate(op.input_widths))
    store = attention_store(op, size, 40)
    table = rng.permutation(40).astype(np.int32)[: -(-(start + count) // size)]
    attend_span(op, store, (0, start), table, (q[:start], k[:start], v[:start]))
    positions = np.concatenate([np.arange(start), start + depth])
    found = attend_span(op, store, (start, count), table, (q[start:], k[start:], v[start:]), positions[start:], parents)
    visible = np.zeros((count, start + count), bool)
    visible[:, :start] = True
    for i in range(count):
        row = i
        while row != IN_CACHE:
            visible[i, start + row] = True
            row = int(parents[row])
    wanted = brute.attention(
        q[start:].reshape(count, 4, 8),
        k.reshape(-1, 2, 8),
        v.reshape(-1, 2, 8),
        positions,
        visible,
        positions[start:],
        scale=0.3,
        window=window,
    )
    close(found, wanted)


def test_a_missing_block_is_an_error_not_the_last_block() -> None:
    op = ops.Attend((0, 1, 2), 3, 0, 0, 1, 1, 4, 4, 1.0)
    qkv = tuple(numbers(i, 1, 4) for i in range(3))
    with pytest.raises(ValueError, match=r"needs blocks 0 to 3 of group 0, but its table holds \[1, -1, 2\]"):
        attend_span(op, attention_store(op, 4, 5), (9, 1), np.array([1, NO_BLOCK, 2], np.int32), qkv)


def test_half_precision_cache_rounds_keys_and_values() -> None:
    op = ops.Attend((0, 1, 2), 3, 0, 0, 1, 1, 4, 4, 0.5)
    q, k, v = (numbers(i, 6, 4) for i in range(3))
    table = np.array([1, 0], np.int32)
    half = attend_span(op, attention_store(op, 4, 2, np.float16), (0, 6), table, (q, k, v))
    rounded = [x.astype(np.float16).astype(np.float32) for x in (k, v)]
    close(half, attend_span(op, attention_store(op, 4, 2), (0, 6), table, (q, *rounded)))


# Mixtures


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"renormalize": False, "scaling": 2.5},
        {"score": "sigmoid"},
        {"score": "sigmoid", "bias": "b", "num_groups": 4, "top_groups": 2, "scaling": 2.5},
        {"score": "sigmoid", "bias": "b", "num_groups": 2, "top_groups": 1},
    ],
)
@pytest.mark.parametrize("tokens", [1, 13])
def test_mixture(settings: dict, tokens: int) -> None:
    num_experts, top_k, hidden, inner = 8, 3, 6, 5
    logits, x, bias = numbers(1, tokens, num_experts), numbers(2, tokens, hidden), numbers(3, num_experts)
    gate, up = numbers(4, num_experts, inner, hidden), numbers(5, num_experts, inner, hidden)
    down = numbers(6, num_experts, hidden, inner)
    step = step_of(tokens, {"b": bias, "g": gate, "u": up, "d": down})
    routing = run(Route((0,), 1, num_experts, top_k, **settings), step, logits)
    found = run(Experts((0, 1), 2, "g", "u", "d", num_experts, top_k, hidden, inner), step, x, routing)
    for t in range(tokens):
        chosen = brute.routing(logits[t], top_k, **{**settings, "bias": bias if "bias" in settings else None})
        assert routing[t, :top_k].tolist() == [e for e, _ in chosen]
        close(routing[t, top_k:], np.array([w for _, w in chosen]))
        wanted = np.zeros(hidden)
        for e, weight in chosen:
            g = gate[e].astype(np.float64) @ x[t]
            wanted += weight * (down[e] @ (g / (1 + np.exp(-g)) * (up[e] @ x[t])))
        close(found[t], wanted)


def test_equal_scores_choose_the_lower_expert() -> None:
    routing = run(Route((0,), 1, 4, 2), step_of(1), np.array([[0.0, 1.0, 1.0, 1.0]], np.float32))
    assert routing[0].tolist() == [1, 2, 0.5, 0.5]


# Recurrent


def recurrent_program(width: int, state_size: int, kernel: int) -> Program:
    p = Builder()
    x = p.embed("e", 4, width)
    y = p.conv(x, "conv", kernel)
    y = p.ssm_scan(y, x, p.linear(x, "b", state_size), p.linear(x, "c", state_size), a="a", d="d")
    return p.finish(p.linear(p.select_rows(y), "o", 4))


@pytest.mark.parametrize("chunks", [(11,), (1,) * 11, (2, 1, 5, 3)])
def test_states_carry_over_chunks(chunks: tuple[int, ...]) -> None:
    """Each chunk reads one block and writes another, as at a checkpoint."""
    tokens, width, state_size, kernel = 11, 5, 3, 4
    program = recurrent_program(width, state_size, kernel)
    store = KVStore(program, cache_groups(program, 16, checkpoint_interval=16), [12])
    convolve = Conv((0,), 1, 0, 0, "w", "wb", width, kernel)
    scan = SsmScan((0, 1, 2, 3), 4, 0, 1, "a", "d", width, state_size)
    weights = {
        "w": numbers(1, width, kernel),
        "wb": numbers(2, width),
        "a": -np.exp(numbers(3, width, state_size)),
        "d": numbers(4, width),
    }
    x, b, c = numbers(5, tokens, width), numbers(6, tokens, state_size), numbers(7, tokens, state_size)
    dt = np.log1p(np.exp(numbers(8, tokens, width)))
    convolved, scanned, start, block = [], [], 0, NO_BLOCK
    for n, count in enumerate(chunks):
        rows, table = slice(start, start + count), np.array([block, n], np.int32)
        chain = np.arange(count, dtype=np.int32)
        inputs = batch(chain, chain + start, chain - 1, chain, (start, count), table)
        step = Step(inputs, weights, store)
        convolved.append(run(convolve, step, x[rows]))
        scanned.append(run(scan, step, x[rows], dt[rows], b[rows], c[rows]))
        start, block = start + count, n
    close(np.concatenate(convolved), brute.conv(x, weights["w"], weights["wb"]))
    wanted, state = brute.ssm_scan(x, dt, b, c, weights["a"], weights["d"])
    close(np.concatenate(scanned), wanted)
    close(store.states[0, 1][block], state)


def test_states_refuse_trees() -> None:
    program = recurrent_program(5, 3, 4)
    store = KVStore(program, cache_groups(program, 16, checkpoint_interval=16), [2])
    rows = np.arange(3, dtype=np.int32)
    inputs = batch(rows, rows, np.array([-1, 0, 0], np.int32), rows, (0, 3), np.array([NO_BLOCK, 0], np.int32))
    step = Step(inputs, {"a": rows, "d": rows}, store)
    scan = SsmScan((0, 1, 2, 3), 4, 0, 1, "a", "d", 5, 3)
    with pytest.raises(ValueError, match="are a tree"):
        run(scan, step, *(numbers(1, 3, width) for width in scan.input_widths))


# Inputs, storage, readouts


def test_ids_of_the_previous_plan_are_filled_in() -> None:
    plan = StepPlan(step=1, budget=0)
    plan.token_ids.extend([7, -1, -3])
    plan.positions.extend([0, 4, 9])
    plan.parents.extend([-1, -1, -1])
    table = array("i", [2, 5])
    plan.spans.append(Span(SimpleNamespace(), 4, 1, 1, (table,)))  # type: ignore[arg-type]
    plan.add_readout(2, ReadoutKind.SAMPLE, SimpleNamespace())  # type: ignore[arg-type]
    inputs = BatchInputs.from_plan(plan, [40, 41, 42])
    assert inputs.token_ids.tolist() == [7, 40, 42]
    assert plan.token_ids.tolist() == [7, -1, -3]
    table[0] = 9  # the live table goes on changing
    plan.positions[0] = 1
    assert inputs.spans[0].tables[0].tolist() == [2, 5]
    assert inputs.positions.tolist() == [0, 4, 9]
    with pytest.raises(IndexError, match="readout 2 of the previous plan, which had 2"):
        BatchInputs.from_plan(plan, [40, 41])


def test_copies_move_whole_blocks_of_their_group_in_order() -> None:
    p = Builder()
    x = p.embed("e", 4, 6)
    y = p.attend(x, x, x, heads=2, kv_heads=2, scale=1.0)
    y = p.attend(y, y, y, heads=2, kv_heads=2, scale=1.0, window=8)
    program = p.finish(p.linear(p.select_rows(y), "o", 4))
    store = KVStore(program, cache_groups(program, 4), [3, 3])
    for g in range(2):
        for stored in store.arrays(g):
            stored[:] = np.arange(3).reshape(3, 1, 1, 1) + 10 * g
    store.apply([Copy(0, source=2, target=0), Copy(0, source=0, target=1)])
    assert [stored[:, 0, 0, 0].tolist() for stored in store.arrays(0)] == [[2, 2, 2]] * 2
    assert [stored[:, 0, 0, 0].tolist() for stored in store.arrays(1)] == [[10, 11, 12]] * 2


def test_a_store_must_fit_its_program() -> None:
    program = recurrent_program(5, 3, 4)
    group = CacheGroup("full", CacheKind.FULL, 16, 64)
    with pytest.raises(ValueError, match="keeps 1 cache groups, but 2 groups"):
        KVStore(program, [group, group], [1, 1])


def test_logits_come_in_bounded_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scoring a prompt never holds prompt x vocabulary; the rows asked for may lie anywhere, twice too."""
    monkeypatch.setattr("headrace.backends.reference.model.LOGIT_TILE_BYTES", 3 * 4 * 50)
    p = Builder()
    rows = p.select_rows(p.embed("e", 50, 6))
    program = p.finish(p.linear(rows, "o", 50))
    weights = {"e": numbers(1, 50, 6), "o": numbers(2, 50, 6)}
    tokens, wanted_rows = np.arange(10, dtype=np.int32), np.array([9, 0, 0, 4, 7, 2, 1, 8], np.int32)
    inputs = batch(tokens, tokens, tokens - 1, wanted_rows)
    tiles = list(ReferenceModel(program, weights).run(inputs, None))  # type: ignore[arg-type]
    assert [(t.start, t.stop) for t, _ in tiles] == [(0, 3), (3, 6), (6, 8)]
    close(np.concatenate([logits for _, logits in tiles]), weights["e"][wanted_rows] @ weights["o"].T)


def test_a_misshaped_weight_is_refused() -> None:
    p = Builder()
    program = p.finish(p.linear(p.select_rows(p.embed("e", 50, 6)), "o", 50))
    with pytest.raises(ValueError, match=r"weight o has shape \[6, 50\]; the program wants \[50, 6\]"):
        ReferenceModel(program, {"e": numbers(1, 50, 6), "o": numbers(2, 6, 50)})
