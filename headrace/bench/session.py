"""A whole benchmark: targets opened, each load run in rounds, and the document that tells it."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headrace.bench.http_target import HttpTarget
from headrace.bench.machine import Machine
from headrace.bench.presets import Point
from headrace.bench.prompts import PromptMaker
from headrace.bench.recording import Recorder
from headrace.bench.report import Objectives, Summary, medians, ratios
from headrace.bench.runner import Run, run_interleaved
from headrace.bench.targets import Target
from headrace.core.errors import ConfigurationError
from headrace.sim.workload import Workload, plan

FORMAT = 1
"""Of the JSON document; raised when a field changes its meaning."""

Progress = Callable[[int, int, str], None]
"""(requests done, requests in all, what is running)."""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    points: Sequence[Point]
    rounds: int = 1
    seed: int = 0
    objectives: Objectives = field(default_factory=Objectives)
    record: Path | None = None


@dataclass(frozen=True, slots=True)
class PointRuns:
    """One load: per target its summaries, round by round."""

    point: Point
    summaries: dict[str, list[Summary]]
    examples: dict[str, str]
    """Kind of error -> one of them in full."""


@dataclass(frozen=True, slots=True)
class BenchReport:
    """The first target is the base of all ratios."""

    targets: dict[str, dict[str, Any]]
    points: tuple[PointRuns, ...]
    options: BenchOptions
    machine: Machine
    started: datetime

    @property
    def num_errors(self) -> int:
        return sum(s.num_errors for p in self.points for rounds in p.summaries.values() for s in rounds)

    def document(self) -> dict[str, Any]:
        """As JSON: per load and target the rounds in full, `median` over them and `ratio` to the first target."""
        return {
            "format": FORMAT,
            "started": self.started.isoformat(timespec="seconds"),
            "command": _command(sys.argv[1:]),
            "machine": asdict(self.machine),
            "targets": self.targets,
            "rounds": self.options.rounds,
            "seed": self.options.seed,
            "objectives": asdict(self.options.objectives),
            "num_errors": self.num_errors,
            "points": [self._point(runs) for runs in self.points],
        }

    def _point(self, runs: PointRuns) -> dict[str, Any]:
        base = next(iter(runs.summaries.values()))
        spec = runs.point.spec
        workload = {f.name: getattr(spec, f.name) for f in fields(spec)}
        workload["trace"] = None if spec.trace is None else f"{len(spec.trace)} rows"
        return {
            "name": runs.point.name,
            "workload": workload,
            "errors": runs.examples,
            "targets": {
                name: {
                    "median": medians(rounds),
                    "ratio": ratios(rounds, base),
                    "rounds": [asdict(summary) for summary in rounds],
                }
                for name, rounds in runs.summaries.items()
            },
        }


def run_bench(
    targets: Sequence[Target],
    maker: PromptMaker,
    options: BenchOptions,
    machine: Machine,
    progress: Progress = lambda num_done, num_total, what: None,
) -> BenchReport:
    """Run everything on an event loop of its own. Raises `ConfigurationError` before anything is measured."""
    names = [target.name for target in targets]
    if len(set(names)) < len(names) or not names:
        raise ConfigurationError(f"the targets are {names}; give each a name of its own (--url NAME=URL).")
    if options.rounds < 1 or not options.points:
        raise ConfigurationError(f"there are {options.rounds} rounds of {len(options.points)} loads: nothing to run.")
    if options.record is not None and not any(isinstance(target, HttpTarget) for target in targets):
        raise ConfigurationError("--record keeps the streams of --url targets; there is none.")
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_run(targets, maker, options, machine, progress))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if sys.platform == "win32":
        return None
    import uvloop  # noqa: PLC0415  (half the cost per arrival)

    return uvloop.new_event_loop


async def _run(
    targets: Sequence[Target], maker: PromptMaker, options: BenchOptions, machine: Machine, progress: Progress
) -> BenchReport:
    started = datetime.now(UTC)
    try:
        with ExitStack() as stack:
            recorder = stack.enter_context(Recorder(options.record)) if options.record is not None else None
            for target in targets:
                await target.open()
            limits = [target.max_tokens for target in targets if target.max_tokens is not None]
            points = [
                Point(point.name, replace(point.spec, max_tokens=min(limits, default=None))) for point in options.points
            ]
            done = []
            for point in points:
                workloads = _workloads(point, maker, options)
                done.append(await _run_point(point, workloads, targets, options.objectives, _Hooks(progress, recorder)))
            described = {target.name: target.describe() for target in targets}
    finally:
        for target in targets:
            await target.close()
    return BenchReport(described, tuple(done), options, machine, started)


def _workloads(point: Point, maker: PromptMaker, options: BenchOptions) -> list[Workload]:
    """One per round. Each load and round has a seed of its own: no target may find a prompt in its cache that another
    has left there."""
    return [
        plan(point.spec, maker, hash_seed(options.seed, point.name, round_number))
        for round_number in range(options.rounds)
    ]


@dataclass(frozen=True, slots=True)
class _Hooks:
    progress: Progress
    recorder: Recorder | None


async def _run_point(
    point: Point, workloads: Sequence[Workload], targets: Sequence[Target], objectives: Objectives, hooks: _Hooks
) -> PointRuns:
    num_total = len(targets) * sum(len(workload.requests) for workload in workloads)
    num_done = 0
    hooks.progress(0, num_total, point.name)

    def tick() -> None:
        nonlocal num_done
        num_done += 1
        hooks.progress(num_done, num_total, point.name)

    def record(target: Target, run: Run) -> None:
        if hooks.recorder is not None and isinstance(target, HttpTarget):
            hooks.recorder.add(target, run.round, point.name)

    runs = await run_interleaved(targets, workloads, objectives, tick, record)
    summaries: dict[str, list[Summary]] = {target.name: [] for target in targets}
    examples: dict[str, str] = {}
    for run in runs:
        summaries[run.target].append(run.summary)
        for result in run.results:
            if result.error is not None:
                examples.setdefault(result.error, f"{run.target}: {result.detail}")
    return PointRuns(point, summaries, examples)


def _command(arguments: Sequence[str]) -> str:
    """As it was typed, without the key."""
    shown = ["headrace"]
    for before, argument in itertools.pairwise(["", *arguments]):
        shown.append("***" if before == "--api-key" else re.sub(r"^--api-key=.*", "--api-key=***", argument))
    return shlex.join(shown)


def hash_seed(seed: int, name: str, round_number: int) -> int:
    """A seed of 63 bits out of a seed, a load and a round; the same in every process."""
    digest = hashlib.sha256(f"{seed} {name} {round_number}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
