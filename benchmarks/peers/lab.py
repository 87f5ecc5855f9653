"""The running engines: one process per (engine, file, way of loading), started when first needed."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.peers.environments import Environment, Unavailable, cache_root
from benchmarks.peers.loads import Load, Subject, prompts
from benchmarks.peers.peers import Peer, Settings, Variant
from benchmarks.peers.runner import Measurement, Runner, RunnerError, parse_measurement

LOAD_S = 600.0  # some engines compile a model while loading it
ANSWER_S = 900.0  # beyond the time limit of the load: a slow backend has 64 prompts to compute first
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""For what has no option of its own: NumPy's BLAS and OpenMP runtimes."""

FindFile = Callable[[Peer, Subject, Variant], Path]


@dataclass(frozen=True, slots=True)
class Effort:
    """How much of a load is run at once."""

    num_prompts: int
    """Beside one that warms up; fewer when the time is up."""
    prompt_limit_s: float
    num_steps: int
    decode_limit_s: float


FULL = Effort(num_prompts=8, prompt_limit_s=2.0, num_steps=128, decode_limit_s=30.0)
QUICK = Effort(num_prompts=3, prompt_limit_s=1.5, num_steps=128, decode_limit_s=8.0)
GLANCE = Effort(num_prompts=2, prompt_limit_s=1.0, num_steps=32, decode_limit_s=1.0)
"""For comparing settings."""


class Lab:
    """Owns the processes; leaving it ends them. A model that could not be loaded is not tried again."""

    def __init__(self, environments: dict[str, Environment], python: Path, threads: int, find_file: FindFile) -> None:
        """`python`: of the engines without an environment."""
        self._environments = environments
        self._python = python
        self._threads = threads
        self._find_file = find_file
        self._runners: dict[tuple[str, str, Variant], Runner | RunnerError] = {}
        self.facts: dict[str, dict[str, Any]] = {}
        """What the engines say of themselves, by name."""

    def measure(
        self,
        peer: Peer,
        subject: Subject,
        variant: Variant,
        load: Load,
        settings: Settings,
        *,
        seed: str,
        effort: Effort,
    ) -> Measurement:
        """Run one load once. Raises `RunnerError` with the reason; a process that died is started again next time."""
        runner = self._runner(peer, subject, variant)
        try:
            return parse_measurement(self._ask(runner, load, settings, seed, effort))
        except RunnerError:
            if not runner.is_alive:
                del self._runners[peer.name, subject.name, variant]
            raise

    def _ask(self, runner: Runner, load: Load, settings: Settings, seed: str, effort: Effort) -> dict[str, Any]:
        if load.is_prompt:
            return runner.ask(
                ANSWER_S,
                do="prompt",
                prompts=prompts(load, seed, 1 + effort.num_prompts),
                limit_s=effort.prompt_limit_s,
                settings=settings,
            )
        return runner.ask(
            ANSWER_S,
            do="decode",
            prompts=prompts(load, seed, load.num_sequences),
            num_steps=min(load.num_steps, effort.num_steps),
            limit_s=effort.decode_limit_s,
            settings=settings,
        )

    def _runner(self, peer: Peer, subject: Subject, variant: Variant) -> Runner:
        key = (peer.name, subject.name, variant)
        found = self._runners.get(key)
        if found is None:
            try:
                found = self._start(peer, subject, variant)
            except RunnerError as error:
                found = error
            self._runners[key] = found
        if isinstance(found, RunnerError):
            raise found
        return found

    def _start(self, peer: Peer, subject: Subject, variant: Variant) -> Runner:
        try:
            file = self._find_file(peer, subject, variant)
        except Unavailable as error:
            raise RunnerError(str(error)) from None
        python = self._environments[peer.name].python if peer.recipe else self._python
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{peer.name}-{subject.name}-{variant.title}")
        runner = Runner(
            python,
            peer.module,
            cache_root() / "logs" / f"{name}.log",
            dict.fromkeys(THREAD_VARIABLES, str(self._threads)),
        )
        try:
            answer = runner.ask(
                LOAD_S, do="load", model=str(file), threads=self._threads, options=dict(variant.options)
            )
        except RunnerError:
            runner.stop()
            raise
        self.facts[peer.name] = answer.get("facts", {})
        return runner

    def stop(self, subject: Subject) -> None:
        """End the processes of one subject; another one would crowd the memory."""
        for key in [key for key in self._runners if key[1] == subject.name]:
            runner = self._runners.pop(key)
            if isinstance(runner, Runner):
                runner.stop()

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for runner in self._runners.values():
            if isinstance(runner, Runner):
                runner.stop()
        self._runners.clear()
