"""The same request gives the same bits: random schedules on the native backend against running alone."""

from __future__ import annotations

import json
import math
import random
import struct
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from headrace.backends.native import _native
from headrace.backends.native.model import FLOAT_PACKINGS, PACKINGS, NativeModel
from headrace.core.plan import ReadoutKind, Span, StepPlan
from headrace.core.protocols import Pending
from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.core.sequence import Sequence as Sequence_
from headrace.engine.composition import BATCHING, ORDERS, WRAPPERS, SchedulingConfig, parse_policy
from headrace.engine.engine import Engine
from headrace.engine.speculative.prompt_lookup import PromptLookup
from headrace.engine.speculative.speculation import Speculation
from headrace.executor.native import NativeExecutor
from headrace.models.loaders.checkpoint import open_checkpoint
from headrace.models.loaders.stored import StoredTensor
from headrace.models.registry import describe, open_weights
from headrace.program.cache import cache_groups
from headrace.program.ops import Linear
from headrace.server.build import ServeConfig, compose
from tests.model.write_quantized import write_quantized_gguf

from .loaded import Reply, add
from .patterns import PatternGrammar

BLOCK_SIZE = 16
NUM_BLOCKS = 400
MAX_STEP_TOKENS = 256
CHUNK = 256
"""Positions that the attention kernel sums on their own (native/kernels.h)."""
TILES = {"avx512": (8, 8), "avx2": (4, 6), "scalar": (1, 2)}
"""Rows that share a load of weights, at most: of quantized ones (MAX_TILE in native/linear_lanes.h), of others
(FLOAT_TILE in native/linear_float.h). Beyond two tiles, if not before, quantized weights are unpacked once for all."""
ROWS_AT_ONCE = 128
"""Rows whose sums are kept while a strip passes (native/linear_quantized.h)."""
ISAS = tuple(_native.isas())
"""Of this processor, the best first; scalar last."""
FILTERS: tuple[dict, ...] = (
    {},
    {"typical_p": 0.8},
    {"xtc_probability": 0.5, "xtc_threshold": 0.05},
    {"dry_multiplier": 2.0, "dry_allowed_length": 1},
)
FAST_ISAS = ISAS[:-1] or ISAS


class Native:
    """A checkpoint on the native backend, once per number of threads."""

    def __init__(self, path: Path, context_length: int = 1024, activations: str = "mixed") -> None:
        checkpoint = open_checkpoint(path)
        self.description = describe(checkpoint)
        self.program = self.description.program
        self.weights = open_weights(checkpoint, self.program)
        products = [self.weights[op.weight] for op in self.program.ops if isinstance(op, Linear)]
        self.formats = {tensor.format.name for tensor in products if isinstance(tensor, StoredTensor)}
        self.context_length = context_length
        self.activations = activations
        self.groups = cache_groups(self.program, BLOCK_SIZE, element_bytes=2, checkpoint_interval=4 * BLOCK_SIZE)
        self._models: dict[tuple, NativeModel] = {}
        self._alone: dict[Request, Reply] = {}

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
                activations=self.activations,
                isa=isa,
            )
        return self._models[key]

    def engine(self, threads: int = 1, num_blocks: Sequence[int] = (), isa: str = "", **options) -> Engine:
        """Engines share a model's cache, one after the other; small pools are the first blocks of it."""
        num_blocks = num_blocks or (NUM_BLOCKS,) * len(self.groups)
        room = [n * BLOCK_SIZE for n, group in zip(num_blocks, self.groups, strict=True) if not group.window]
        config = ServeConfig(block_size=BLOCK_SIZE, **{"max_running": 8, "max_queue": 1000, **options})
        return compose(
            config,
            self.model(threads, isa),
            self.groups,
            tuple(num_blocks),
            context_length=min([self.context_length, *room]),
            vocab_size=self.program.vocab_size,
            numerics="test",
        )

    def alone(self, request: Request) -> Reply:
        if request not in self._alone:
            reply = generate(self.engine(), [request], [])[request.id, 0]
            assert all(math.isfinite(entry.logprob) for entry in (*reply.logprobs, *reply.prompt_logprobs))
            self._alone[request] = reply
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


def tile(format: str, isa: str) -> int:
    return TILES[isa][format in FLOAT_PACKINGS]


def tiles_of(format: str, isa: str, rows: int) -> str:
    most = tile(format, isa)
    return f"{format} on {isa}: {rows % most} rows beyond {'many' if rows > 2 * most else 'few'} tiles of {most}"


class HalfKnowing:
    """Drafts what a request says when it runs alone, with mistakes."""

    def __init__(self, alone: dict[Request, Reply], rng: random.Random) -> None:
        self._alone = alone
        self._rng = rng
        self._mistakes = rng.choice([0.0, 0.1, 0.5])

    def propose(self, sequence: Sequence_, max_tokens: int) -> tuple[int, ...]:
        begin = sequence.num_tokens - sequence.num_prompt
        known = self._alone[sequence.request].tokens[begin : begin + max_tokens]
        return tuple(token ^ (self._rng.random() < self._mistakes) for token in known)

    def forget(self, sequence: Sequence_) -> None:
        pass


class Eager(Speculation):
    """Verifies all there are, whether that pays or not."""

    def _num_that_pay(self, num_decoding: int, num_keys: int, chances: Sequence[tuple[float, int]]) -> int:
        return len(chances)


class Watched:
    """An executor that counts what the plans it launches are made of."""

    def __init__(self, executor: NativeExecutor, formats: set[str]) -> None:
        """`formats`: of the matrices that every step multiplies by."""
        self.seen: Counter[str] = Counter()
        self._executor = executor
        self._formats = formats
        self._begun: set[int] = set()

    def launch(self, plan: StepPlan) -> Pending:
        self._count(plan)
        return self._executor.launch(plan)

    def _count(self, plan: StepPlan) -> None:
        rows, isa = plan.num_tokens, self._executor.backend.isa
        self.seen.update(tiles_of(name, isa, rows) for name in self._formats)
        if rows == 1:
            self.seen["steps of one row"] += 1
        if rows > ROWS_AT_ONCE:
            self.seen["steps of more rows than are kept at once"] += 1
        for span in plan.spans:
            if span.num_drafts:
                self._count_drafts(span)
            elif span.count > 1 and span.start >= span.sequence.num_prompt:
                self.seen["forced tokens computed together"] += 1
            self.seen["spans across three chunk borders"] += span.start + span.count > 3 * CHUNK
            if span.sequence.id not in self._begun:
                self._begun.add(span.sequence.id)
                self.seen["prefix hits in mid-prompt"] += span.start > 0
        for kind, sequence in zip(plan.readout_kinds, plan.readout_sequences, strict=True):
            if kind == ReadoutKind.SAMPLE:
                self.seen["greedy tokens" if sequence.request.sampling.is_greedy else "seeded tokens"] += 1
                self.seen["tokens within a grammar"] += sequence.request.grammar is not None

    def _count_drafts(self, span: Span) -> None:
        params = span.sequence.request.sampling
        self.seen["drafts, greedy" if params.is_greedy else "drafts, seeded"] += 1
        self.seen["drafts with penalties or DRY"] += params.has_penalties or params.has_dry
        self.seen["drafts with logprobs"] += params.num_logprobs is not None
        end = span.start + span.count
        self.seen["drafts across a block border"] += span.start // BLOCK_SIZE < (end - 1) // BLOCK_SIZE


def draw_scheduling(rng: random.Random) -> SchedulingConfig:
    """Any order within any wrappers, any batching mode; the default in a third of all cases."""
    if rng.random() < 1 / 3:
        return SchedulingConfig()
    names = [rng.choice(["fair", "dlpm"]), *rng.sample(["ageing", "priority", "lpf"], rng.randint(0, 3))]
    rng.shuffle(names)
    names.append(rng.choice(list(ORDERS)))
    return SchedulingConfig(
        policy="(".join(names) + ")" * (len(names) - 1),
        max_wait_s=rng.choice([0.0, 0.01]),
        batching=rng.choice(BATCHING),
        batch_window_ms=1.0,
        predictor=rng.choice(["bound", "history"]),
        predictor_sigma=rng.choice([0.0, 1.0]),
        budget=rng.choice(["paced", "fixed", "fixed"]),
        reserve_replies=rng.random() < 0.5,
        tenant_running_tokens=rng.choice([None, 100]),
    )


def run_schedule(native: Native, seed: str, longest: int, isas: Sequence[str]) -> Counter[str]:
    """Requests, arrivals and machine all drawn from the seed. Returns what the steps were made of."""
    rng, filters, serving = random.Random(seed), random.Random(f"{seed} filters"), random.Random(f"{seed} serving")
    scheduling = draw_scheduling(serving)
    vocab = native.program.vocab_size
    common = [rng.randrange(vocab) for _ in range(longest)]
    requests = []
    for i in range(rng.randint(1, 6)):
        length = rng.randint(1, longest) if rng.random() < 0.5 else rng.randint(1, 40)
        shared = rng.randint(0, length)
        prompt = [*common[:shared], *(rng.randrange(vocab) for _ in range(length - shared))]
        params = SamplingParams(
            max_tokens=rng.choice([rng.randint(1, 16), rng.randint(16, 48)]),
            temperature=rng.choice([0.0, 1.0]),
            top_p=rng.choice([1.0, 0.9]),
            repetition_penalty=rng.choice([1.0, 1.1]),
            seed=rng.randint(0, 5),
            num_logprobs=rng.choice([3, 3, None]),  # forced tokens are taken in one step only where none are wanted
            **filters.choice(FILTERS),
        )
        grammar = PatternGrammar(rng.randint(0, 9), vocab) if rng.random() < 0.25 else None
        score_prompt = params.num_logprobs is not None and rng.random() < 0.15
        requests.append(
            Request(
                f"r{i}",
                tuple(prompt),
                params,
                score_prompt=score_prompt,
                grammar=grammar,
                tenant=serving.choice(["", "other"]),
                priority=serving.randint(0, 1),
                is_batch=serving.random() < 0.2,
            )
        )
    alone = {request: native.alone(request) for request in requests}
    last_arrival = rng.choice([0, 4, 12])
    arrivals = [rng.randint(0, last_arrival) for _ in requests]
    needed = max(len(r.prompt) + (r.sampling.max_tokens or 0) for r in requests)
    threads, depth = rng.randint(1, 4), rng.randint(1, 2)
    budget = rng.choice([rng.randint(8, 32), rng.randint(33, MAX_STEP_TOKENS)])
    spare = rng.choice([0, 1, 2, 3, 100])
    num_blocks = []
    for group in native.groups:
        tokens = group.window + depth * budget if group.window else needed
        least = max(-(-tokens // BLOCK_SIZE) + 2 * bool(group.window), depth + 1)
        num_blocks.append(min(NUM_BLOCKS, least + spare))
    max_running, isa = rng.choice([2, 3, 8]), rng.choice(isas)
    engine = native.engine(
        threads,
        num_blocks,
        isa,
        max_step_tokens=budget,
        depth=depth,
        max_running=max_running,
        scheduling=scheduling,
    )
    engine.executor = watched = Watched(engine.executor, native.formats)
    drafts = random.Random(f"{seed} drafts")
    if drafts.random() < 0.6:
        drafter = HalfKnowing(alone, drafts) if drafts.random() < 0.7 else PromptLookup()
        costs = engine.scheduler.state.ledger.costs
        engine.scheduler.speculation = Eager(drafter, costs, drafts.choice([1, 2, 5, 12]))
    replies = generate(engine, requests, arrivals)
    machine = f"{threads=}, {depth=}, {budget=}, {num_blocks=}, {isa=}"
    for request in requests:
        same = bits(replies[request.id, 0]) == bits(alone[request])
        assert same, f"seed {seed}: {request.id} differs ({machine}, {scheduling=})"
    names = ("schedules", f"{threads} threads", f"depth {depth}", isa, scheduling.batching)
    policies = parse_policy(scheduling.policy)
    stats = engine.stats()
    events = Counter(preemptions=stats.preemptions, displacements=stats.displacements)
    events["batch class"] = sum(request.is_batch for request in requests)
    events["drafts accepted"] = stats.accepted_drafts
    events["drafts rejected"] = stats.proposed_drafts - stats.accepted_drafts
    events["preemptions beside drafts"] = stats.preemptions if stats.proposed_drafts else 0
    return watched.seen + Counter(names) + Counter(policies) + events


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


K_FORMATS = ("Q4_K", "Q5_K", "Q6_K")
PLAIN_FORMATS = ("Q4_0", "F16", "Q4_1", "Q5_0", "BF16", "Q5_1", "Q8_0", "F32")
ODD_VOCAB = 250  # the last strip of the head is not full
QUANTIZED = {
    # Inner widths of 40 and 25 groups: two panels each, the latter of unequal size.
    "llama-k.gguf": (
        K_FORMATS,
        "llama",
        {"hidden_size": 256, "intermediate_size": 1280, "head_dim": 64, "num_hidden_layers": 2},
    ),
    "llama-32.gguf": (
        PLAIN_FORMATS,
        "llama",
        {
            "hidden_size": 96,
            "intermediate_size": 800,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 32,
        },
    ),
    "gemma3-all.gguf": (
        (*K_FORMATS, *PLAIN_FORMATS),
        "gemma3",
        {
            "hidden_size": 256,
            "intermediate_size": 512,
            "head_dim": 64,
            "query_pre_attn_scalar": 64,
            "sliding_window": 300,
        },
    ),
    "mixtral-all.gguf": (
        (*PLAIN_FORMATS, *K_FORMATS),
        "mixtral",
        {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2},
    ),
}
"""Formats in turn, a tiny checkpoint's config, and what is different."""


@pytest.fixture(scope="session")
def folder(data_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where every name has its checkpoint."""
    path = tmp_path_factory.mktemp("same-bits")
    for name in NAMES:
        (path / name).symlink_to(data_path / "tiny" / name)
    for name, (formats, base, changes) in QUANTIZED.items():
        config = json.loads((data_path / "tiny" / base / "config.json").read_text())
        write_quantized_gguf(path / name, {**config, "vocab_size": ODD_VOCAB, **changes}, formats)
    return path


@cache
def tiny(path: Path, activations: str = "mixed") -> Native:
    return Native(path, activations=activations)


@cache
def thirty_schedules(path: Path) -> Counter[str]:
    """What was seen in them, all bits being the same."""
    native = tiny(path)
    seen: Counter[str] = Counter()
    for seed in range(30):
        is_long = seed % 6 == 0
        # The scalar twin is slow: a third of the short ones.
        seen += run_schedule(
            native, f"{path.name} {seed}", 900 if is_long else 60, ISAS if seed % 3 == 1 else FAST_ISAS
        )
    return seen


@pytest.mark.parametrize("name", [*NAMES, *QUANTIZED])
def test_random_schedules_on_tiny_checkpoints(name: str, folder: Path) -> None:
    thirty_schedules(folder / name)


def test_the_schedules_meet_everything_they_should(folder: Path) -> None:
    seen = sum((thirty_schedules(folder / name) for name in (*NAMES, *QUANTIZED)), Counter[str]())
    print("\n".join(f"{count:8} {what}" for what, count in sorted(seen.items())))
    assert seen["schedules"] >= 300
    expected = [
        "steps of one row",
        "steps of more rows than are kept at once",
        "spans across three chunk borders",
        "prefix hits in mid-prompt",
        "preemptions",
        "greedy tokens",
        "seeded tokens",
        "tokens within a grammar",
        "forced tokens computed together",
        "drafts, greedy",
        "drafts, seeded",
        "drafts with penalties or DRY",
        "drafts with logprobs",
        "drafts across a block border",
        "drafts accepted",
        "drafts rejected",
        "preemptions beside drafts",
        *(f"{threads} threads" for threads in (1, 2, 3, 4)),
        *(f"depth {depth}" for depth in (1, 2)),
        *ISAS,
        *ORDERS,
        *WRAPPERS,
        "batch class",
    ]
    assert [what for what in expected if seen[what] < 20] == []
    assert [what for what in (*BATCHING, "displacements") if seen[what] < 8] == []
    tiles = [
        tiles_of(name, isa, rows) for name in PACKINGS for isa in ISAS for rows in range(1, 3 * tile(name, isa) + 1)
    ]
    assert [what for what in tiles if not seen[what]] == []


@pytest.mark.parametrize(
    ("name", "activations"), [("gemma3-all.gguf", "int8"), ("gemma3-all.gguf", "int16"), ("mixtral-all.gguf", "int16")]
)
def test_random_schedules_with_other_activations(name: str, activations: str, folder: Path) -> None:
    native = tiny(folder / name, activations)
    for seed in range(6):
        run_schedule(native, f"{name} {activations} {seed}", 900 if seed == 0 else 60, FAST_ISAS)


@pytest.mark.long
@pytest.mark.parametrize("model", ["smollm2_path", "gemma_path"])
def test_random_schedules_on_real_models(model: str, request: pytest.FixtureRequest) -> None:
    native = Native(request.getfixturevalue(model))
    seen: Counter[str] = Counter()
    for seed in range(40):
        seen += run_schedule(native, f"{model} {seed}", 900 if seed % 4 == 0 else 120, ISAS[:1])
    print("\n".join(f"{count:8} {what}" for what, count in sorted(seen.items())))
    expected = ("spans across three chunk borders", "prefix hits in mid-prompt", "preemptions", "depth 2", "4 threads")
    assert [what for what in expected if not seen[what]] == []


@pytest.mark.parametrize(
    ("name", "activations"),
    [
        *((name, "mixed") for name in (*NAMES, *QUANTIZED)),
        *((name, activations) for name in QUANTIZED for activations in ("int8", "int16")),
    ],
)
def test_every_instruction_set_gives_the_same_bits(name: str, activations: str, folder: Path) -> None:
    """Prompts whose steps take both ways of unpacking and several tiles, and a head of many rows."""
    native = tiny(folder / name, activations)
    vocab = native.program.vocab_size
    params = SamplingParams(max_tokens=12, seed=1, num_logprobs=3)
    requests = [
        Request(f"r{length}", tuple(7 * i % vocab for i in range(length)), params, score_prompt=length == 40)
        for length in (1, 40, 300)
    ]
    found = {}
    for isa in ISAS:
        replies = generate(native.engine(isa=isa), requests, [])
        found[isa] = b"".join(bits(replies[request.id, 0]) for request in requests)
    assert len(set(found.values())) == 1, f"not all agree: {list(found)}"
