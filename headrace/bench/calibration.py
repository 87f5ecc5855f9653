"""The cost model of a real engine, from a designed set of steps.

Time is that of a whole step as the engine sees it: schedule, launch, result, commit.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrace.core.cache import CacheGroup, CacheKind
from headrace.core.cost_model import CostModel, save_cost_model
from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.core.work import StepWork
from headrace.engine.budget import FixedBudget
from headrace.engine.engine import Engine
from headrace.server import system
from headrace.server.build import Deployment, ServeConfig

STREAMS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
CONTEXTS = (16, 128, 512)
MOST_KEYS = 1024
"""Of all streams together: their prompts have to be read first."""
PROMPTS = (4, 8, 16, 32, 48, 64, 96, 128, 160)
LONG_PROMPT = 800
MIXED_STREAMS = (1, 3, 8)
MIXED_PROMPT = 256
MIXED_CHUNKS = (16, 32, 96)
NUM_DECODED = 8
"""Tokens of each stream: so many steps of a kind, and round after round."""

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Load:
    """Requests sent at once: streams, and a prompt beside them read in chunks."""

    num_streams: int
    context: int
    prompt: int = 0
    chunk: int = 0

    def __str__(self) -> str:
        streams = f"{self.num_streams} streams at {self.context}" if self.num_streams else ""
        prompt = f"a prompt of {self.prompt} by {self.chunk}" if self.prompt else ""
        return " + ".join(part for part in (streams, prompt) if part)


@dataclass(frozen=True, slots=True)
class Measured:
    load: Load
    work: StepWork
    seconds: float


def loads(max_running: int, max_step_tokens: int, context_length: int) -> list[Load]:
    """All kinds of steps that an engine of these limits takes."""
    decode = [
        Load(streams, context)
        for streams in STREAMS
        for context in CONTEXTS
        if streams <= max_running and streams * context <= MOST_KEYS
    ]
    prompts = [Load(0, 0, size, size) for size in PROMPTS if size <= max_step_tokens]
    prompts.append(Load(0, 0, LONG_PROMPT, max_step_tokens))
    mixed = [
        Load(streams, 64, MIXED_PROMPT, chunk)
        for streams in MIXED_STREAMS
        for chunk in MIXED_CHUNKS
        if streams < max_running and streams + chunk <= max_step_tokens
    ]
    found = [*decode, *prompts, *mixed]
    return [load for load in found if max(load.context, load.prompt) + 2 * NUM_DECODED + 32 < context_length]


def measure(
    engine: Engine,
    vocab_size: int,
    *,
    rounds: int,
    seed: int,
    progress: Progress = lambda num_done, num_total, what: None,
    timer: Callable[[], float] = time.perf_counter,
) -> list[Measured]:
    """Every load, `rounds` times, in another order each time; a round before them is thrown away.

    The engine is idle, before and after. Its budget is set aside meanwhile, so that the chunks are the designed ones.
    """
    limits = engine.scheduler.limits
    budget = engine.scheduler.budget
    plan = loads(limits.max_running, budget.max_tokens, limits.context_length)
    measured: list[Measured] = []
    draw = random.Random(seed)
    try:
        for round_number in range(rounds + 1):
            draw.shuffle(plan)
            for index, load in enumerate(plan):
                progress(round_number * len(plan) + index, (rounds + 1) * len(plan), str(load))
                engine.scheduler.budget = FixedBudget(budget.max_tokens)
                steps = _run(engine, load, vocab_size, draw, timer)
                if round_number:
                    measured += steps
        progress(1, 1, "done")
    finally:
        engine.scheduler.budget = budget
    return measured


def _run(
    engine: Engine, load: Load, vocab_size: int, draw: random.Random, timer: Callable[[], float]
) -> list[Measured]:
    """Prompts of streams are read first, and not measured: their steps are no design of ours."""

    def request(name: str, num_prompt: int, num_output: int) -> Request:
        prompt = tuple(draw.choices(range(vocab_size), k=num_prompt))
        return Request(name, prompt, SamplingParams(max_tokens=num_output, temperature=0.0))

    steps: list[Measured] = []
    if load.num_streams:
        # Beside a prompt they go on until it is read.
        num_chunks = -(-load.prompt // load.chunk) if load.chunk else 0
        num_decoded = NUM_DECODED + num_chunks + load.context * load.num_streams // 100
        for index in range(load.num_streams):
            engine.submit(request(f"stream {index}", load.context, num_decoded))
        while any(s.num_computed < s.num_prompt for s in engine.scheduler.state.running) or engine.stats().num_waiting:
            engine.step()
        engine.step()
    if load.prompt:
        engine.scheduler.budget = FixedBudget(load.num_streams + load.chunk)
        engine.submit(request("prompt", load.prompt, 1))
    count = len(engine.scheduler.state.running)
    while engine.has_work and len(engine.scheduler.state.running) >= min(count, load.num_streams):
        work, seconds = _step(engine, timer)
        is_designed = work.num_streams == load.num_streams and bool(work.num_prompt) == bool(load.prompt)
        if is_designed or not load.num_streams:
            steps.append(Measured(load, work, seconds))
        if len(steps) >= NUM_DECODED or (load.prompt and not work.num_prompt):
            break
    for index in range(load.num_streams):
        engine.abort(f"stream {index}")
    engine.abort("prompt")
    while engine.has_work:
        engine.step()
    return steps


def _step(engine: Engine, timer: Callable[[], float]) -> tuple[StepWork, float]:
    """The engine's loop at depth 1, with a watch in hand."""
    begin = timer()
    scheduler, now = engine.scheduler, engine.clock.now
    plan = scheduler.schedule(now())
    work = StepWork.of(plan)
    result = engine.executor.launch(plan).result()
    scheduler.commit(plan, result, now())
    return work, timer() - begin


def fit(measured: Sequence[Measured]) -> CostModel:
    """Each kind of step counts alike, however many there are of it: by its mean.

    The mean and not the median, for the slow steps of a machine are part of what a request waits for; and before the
    fit, for least squares of relative errors leans towards the fast ones.
    """
    model = CostModel()
    for work, seconds in _means(measured):
        model.observe(work, seconds)
    model.fit()
    return model


def _means(measured: Sequence[Measured]) -> list[tuple[StepWork, float]]:
    """Steps of one load and (to a tenth of a context) one size become one."""
    kinds: dict[tuple, list[Measured]] = defaultdict(list)
    for step in measured:
        streams, prompt, _, _, keys, pairs = step.work
        kinds[step.load, streams, prompt, keys // 512, pairs // 8192].append(step)
    found = []
    for steps in kinds.values():
        works = [step.work for step in steps]
        middle = StepWork(*(round(statistics.fmean(column)) for column in zip(*works, strict=True)))
        found.append((middle, statistics.fmean(step.seconds for step in steps)))
    return found


@dataclass(frozen=True, slots=True)
class Row:
    """Of the table: one kind of load."""

    load: Load
    num_steps: int
    measured_s: float
    """Median."""
    predicted_s: float


def table(model: CostModel, measured: Sequence[Measured]) -> list[Row]:
    by_load: dict[Load, list[Measured]] = defaultdict(list)
    for step in measured:
        by_load[step.load].append(step)
    order = sorted(by_load, key=lambda load: (bool(load.prompt), load.num_streams, load.context, load.chunk))
    return [
        Row(
            load,
            len(by_load[load]),
            statistics.median(step.seconds for step in by_load[load]),
            statistics.median(model.seconds(step.work) for step in by_load[load]),
        )
        for load in order
    ]


def about(config: ServeConfig, deployment: Deployment) -> dict[str, Any]:
    """What a simulation needs to know of a model beside its cost."""
    memory = deployment.engine.scheduler.state.memory
    return {
        "model": deployment.name,
        "processor": system.processor(),
        "threads": config.num_threads,
        "isa": config.instruction_set,
        "kv_format": config.kv_format,
        "context_length": deployment.context_length,
        "vocab_size": deployment.vocab_size,
        "cache_groups": [asdict(group.group) | {"kind": group.group.kind.value} for group in memory.groups],
        "num_blocks": [group.pool.num_blocks for group in memory.groups],
    }


def cache_groups_of(about: dict[str, Any]) -> tuple[CacheGroup, ...]:
    """Of what `about` told."""
    return tuple(CacheGroup(**{**group, "kind": CacheKind(group["kind"])}) for group in about["cache_groups"])


def save(path: Path, config: ServeConfig, deployment: Deployment, model: CostModel) -> None:
    save_cost_model(path, model, about(config, deployment))
