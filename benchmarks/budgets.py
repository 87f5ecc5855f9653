"""What serving costs beside the model: the engine's own time per step, start, memory, idling, size on disk.

`make bench-budgets` prints it and writes the section `budgets` of docs/benchmarks.md. Each figure is a median, and has
the budget beside it that it is held to.
"""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from benchmarks.peers.report import machine_text, replace_section, table
from headrace.backends.native.model import NativeModel
from headrace.bench.machine import inspect_machine
from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.models.catalogue import DEFAULT_MODEL
from headrace.models.fetch import resolve
from headrace.models.progress import no_progress
from headrace.server.build import ServeConfig, build
from headrace.server.serve import settle_interpreter

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
NUM_STARTS = 7
IDLE_S = 10.0
MIB = 1 << 20
KV_BYTES = 256 * MIB
ENGINE_LOADS = ((1, 0.25), (64, 1.0))  # (sequences, milliseconds allowed)


@dataclass(frozen=True, slots=True)
class Figure:
    """A measurement and what it may be at most."""

    what: str
    measured: float
    budget: float
    unit: str
    note: str = ""

    @property
    def cells(self) -> tuple[str, str, str, str]:
        verdict = "" if self.measured <= self.budget else " **over**"
        return (self.what, f"{self.measured:.3g} {self.unit}{verdict}", f"{self.budget:g} {self.unit}", self.note)


class _Timed:
    """In place of an object: knows how much processor time some of its methods took."""

    def __init__(self, target: Any, *methods: str) -> None:
        self._target = target
        self._methods = methods
        self.ms: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if name not in self._methods:
            return found

        def timed(*arguments: Any) -> Any:
            begin = time.thread_time()
            result = found(*arguments)
            self.ms[name] += 1e3 * (time.thread_time() - begin)
            return result

        return timed


def engine_overhead(num_sequences: int, budget_ms: float, num_steps: int = 100) -> Figure:
    """A step without its native call, nothing overlapped (depth 1): processor time of its thread."""
    engine = build(ServeConfig(max_running=num_sequences, depth=1, kv_memory_bytes=1 << 30)).engine
    settle_interpreter()
    backend = engine.executor.backend  # type: ignore[attr-defined]
    assert isinstance(backend, NativeModel)
    native = backend._native = _Timed(backend._native, "run")
    scheduler = engine.scheduler = _Timed(engine.scheduler, "schedule", "commit")  # type: ignore[assignment]
    for index in range(num_sequences):
        prompt = tuple(range(100 + index, 164 + index))
        engine.submit(Request(f"r{index}", prompt, SamplingParams(max_tokens=4 * num_steps, temperature=0)))
    started: set[str] = set()
    while len(started) < num_sequences:
        started |= {event.request_id for event in engine.step() if event.tokens}
    steps: list[tuple[float, float, float]] = []  # all of it, schedule, commit
    for _ in range(num_steps):
        native.ms.clear()
        scheduler.ms.clear()
        begin = time.thread_time()
        engine.step()
        own_ms = 1e3 * (time.thread_time() - begin) - native.ms["run"]
        steps.append((own_ms, scheduler.ms["schedule"], scheduler.ms["commit"]))
    total, schedule, commit = (statistics.median(part) for part in zip(*steps, strict=True))
    what = f"engine, per step of {num_sequences} sequence{'s' if num_sequences > 1 else ''}"
    rest = f"inputs, readouts and the rest {total - schedule - commit:.2g}; no HTTP"
    return Figure(what, total, budget_ms, "ms", f"schedule {schedule:.2g}, commit {commit:.2g}, {rest}")


@dataclass(frozen=True, slots=True)
class Start:
    ready_s: float
    first_token_s: float
    """After ready."""
    peak_bytes: int
    idle_share: float | None
    """Of a core, over some seconds without a request."""


def start_server(measure_idle: bool) -> Start:
    command = [
        str(Path(sys.executable).with_name("headrace")),
        "serve",
        "--port",
        "0",
        "--kv-memory",
        f"{KV_BYTES // MIB}MiB",
    ]
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            ready_s = time.perf_counter() - begin
            url = line.split()[2]
            ask = {"prompt": "Once upon a time", "max_tokens": 1}
            with httpx.Client(verify=False) as client:  # loading certificates is not the server's time
                begin = time.perf_counter()
                client.post(f"{url}/completions", json=ask, timeout=60).raise_for_status()
                first_s = time.perf_counter() - begin
                client.post(f"{url}/completions", json={"prompt": "Tell me. " * 500, "max_tokens": 64}, timeout=60)
            idle = None
            if measure_idle:
                time.sleep(3)
                before = _processor_s(process.pid)
                time.sleep(IDLE_S)
                idle = (_processor_s(process.pid) - before) / IDLE_S
            return Start(ready_s, first_s, _status_bytes(process.pid, "VmHWM"), idle)
        finally:
            process.terminate()


def starts() -> list[Figure]:
    """With the model in the page cache."""
    file_bytes = resolve(DEFAULT_MODEL, no_progress).stat().st_size
    runs = [start_server(measure_idle=index == 0) for index in range(NUM_STARTS)]
    idle = next(run.idle_share for run in runs if run.idle_share is not None)
    allowed = (300 * MIB + 1.1 * file_bytes + KV_BYTES) / MIB
    return [
        Figure("start to ready", statistics.median(run.ready_s for run in runs), 2.0, "s", f"{NUM_STARTS} starts"),
        Figure("first token after that", statistics.median(run.first_token_s for run in runs), 0.2, "s"),
        Figure(
            "peak memory",
            max(run.peak_bytes for run in runs) / MIB,
            round(allowed),
            "MiB",
            f"300 + 1.1 x file ({file_bytes / MIB:.0f}) + KV pool ({KV_BYTES // MIB})",
        ),
        Figure("idle", 100 * idle, 1.0, "% of a core", f"over {IDLE_S:.0f} s"),
    ]


def size_on_disk() -> Figure:
    """The core install, without extras, in an environment of its own (pip and setuptools left out)."""
    root = PAGE.parents[1]
    with tempfile.TemporaryDirectory() as folder:
        venv = Path(folder) / "venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(venv / "bin" / "python")]
        subprocess.run([*pip, "install", "--quiet", str(root)], check=True, capture_output=True)
        sizes = (path.stat().st_size for path in venv.rglob("*") if path.is_file() and not path.is_symlink())
        return Figure("core install", sum(sizes) / 1e6, 200, "MB")


def _status_bytes(pid: int, name: str) -> int:
    status = Path(f"/proc/{pid}/status").read_text("ascii")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(f"{name}:"))


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text("ascii").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100  # user and system time, in ticks of 10 ms


def main() -> None:
    console = Console()
    parts: list[tuple[str, Callable[[], list[Figure]]]] = [
        *((f"engine, {n} sequences", lambda n=n, ms=ms: [engine_overhead(n, ms)]) for n, ms in ENGINE_LOADS),
        ("starts", starts),
        ("install", lambda: [size_on_disk()]),
    ]
    figures = []
    for title, measure in parts:
        with console.status(title):
            figures.append(measure())
        for figure in figures[-1]:
            console.print("  ".join(figure.cells))
    rows = [figure.cells for figure in itertools.chain(*figures)]
    machine = machine_text(asdict(inspect_machine()))
    body = (
        "## What serving costs beside the model\n\n"
        f"Made by `make bench-budgets` on {time.strftime('%Y-%m-%d')}, SmolLM2-135M-Instruct Q4_1.\n\n"
        f"{machine}\n\n{table(('', 'measured', 'budget', ''), rows, num_left=1)}"
    )
    PAGE.write_text(replace_section(PAGE.read_text("utf-8"), "budgets", body), "utf-8")


if __name__ == "__main__":
    main()
