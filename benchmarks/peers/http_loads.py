"""The loads over HTTP: every server in turn, measured by `headrace bench`, which knows nothing of whom it measures."""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.environments import last_error_line
from benchmarks.peers.loads import HttpLoad
from benchmarks.peers.runner import ROOT
from benchmarks.peers.servers import Server, ServerError, ServerSpec

BENCH_S = 3600.0
FIGURES = (
    "output_tokens_per_s",
    "ttft_ms.p50",
    "ttft_ms.p99",
    "inter_token_ms.p50",
    "inter_token_ms.p99",
    "num_errors",
    "cached_tokens",
    "prompt_tokens",
)
"""Those that are kept of a round."""

Advance = Callable[[str], None]


class BenchError(Exception):
    """`headrace bench` failed; the text is the reason as it is printed."""


@dataclass(frozen=True, slots=True)
class HttpSample:
    """One load against one server, once."""

    round: int
    load: str
    server: str
    figures: dict[str, float]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HttpGap:
    load: str
    server: str
    reason: str


@dataclass(slots=True)
class HttpRecord:
    samples: list[HttpSample] = field(default_factory=list)
    gaps: list[HttpGap] = field(default_factory=list)
    ready_s: dict[str, float] = field(default_factory=dict)
    """From start to ready, by server."""


def run_http(
    python: Path,
    specs: list[ServerSpec],
    loads: list[HttpLoad],
    *,
    num_rounds: int,
    num_requests: int,
    record: HttpRecord,
    advance: Advance,
) -> None:
    """All servers stay up and are asked one at a time; one that fails on a load is not asked for it again."""
    with contextlib.ExitStack() as stack:
        servers: list[Server] = []
        for spec in specs:
            advance(f"starting {spec.title}")
            server = stack.enter_context(Server(spec))
            try:
                record.ready_s[spec.title] = server.wait_ready()
            except ServerError as error:
                record.gaps += [HttpGap(load.name, spec.title, str(error)) for load in loads]
                continue
            servers.append(server)
        failed: set[tuple[str, str]] = set()
        for number in range(num_rounds):
            for load in loads:
                turn = number % max(1, len(servers))
                for server in servers[turn:] + servers[:turn]:
                    title = server.spec.title
                    if (load.name, title) in failed:
                        continue
                    advance(f"{load.name}: {title}")
                    try:
                        document = bench(python, server, load, num_requests, number)
                        record.samples.append(parse_document(document, load, title, number))
                    except BenchError as error:
                        failed.add((load.name, title))
                        record.gaps.append(HttpGap(load.name, title, str(error)))


def bench(python: Path, server: Server, load: HttpLoad, num_requests: int, seed: int) -> dict[str, Any]:
    """What `headrace bench` tells of one load. Raises `BenchError`."""
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "bench.json"
        command = [str(python), "-m", "headrace.cli", "bench", "--url", f"it={server.url}", "--preset", load.preset]
        command += ["--concurrency", str(load.concurrency), "--requests", str(num_requests), "--seed", str(seed)]
        command += ["--no-machine", "--allow-errors", "--json", str(result)]
        if server.spec.extra:
            command += ["--extra", json.dumps(dict(server.spec.extra))]
        try:
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, errors="replace", timeout=BENCH_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise BenchError(f"not done within {BENCH_S:.0f} s") from None
        if done.returncode < 0:
            raise BenchError(f"headrace bench was ended from outside, by signal {-done.returncode}")
        if done.returncode or not result.exists():
            raise BenchError(last_error_line(done.stderr + done.stdout) or f"ended with {done.returncode}")
        return dict(json.loads(result.read_text("utf-8")))


def parse_document(document: dict[str, Any], load: HttpLoad, server: str, number: int) -> HttpSample:
    """The figures of the one point and target in it. Raises `BenchError` where every request failed."""
    try:
        point = document["points"][0]
        target = point["targets"]["it"]
        median, notes = target["median"], target["rounds"][0]["notes"]
    except (KeyError, IndexError) as error:
        raise BenchError(f"the result of headrace bench has no {error}") from None
    if not median.get("output_tokens"):
        raise BenchError("; ".join(point.get("errors", {}).values()) or "no reply had any token")
    figures = {name: median[name] for name in FIGURES if name in median}
    return HttpSample(number, load.name, server, figures, tuple(notes))
