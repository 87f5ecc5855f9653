"""What the experiments share: the simulated machine, traces at a share of its capacity, and the figures of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.simulator_speed import COEFFICIENTS, GROUP
from headrace.core.cost_model import CostModel
from headrace.engine.composition import SchedulingConfig
from headrace.sim.build import SimConfig, build_sim
from headrace.sim.generators import generate
from headrace.sim.replay import Reply, replay
from headrace.sim.traces import TraceRow, read_trace
from headrace.sim.workload import Numbers, Workload, WorkloadSpec, plan

SCALE = 1 / 8
SEED = 1
MAX_TOKENS = 256
"""What a request asks for at most where its length is hidden; longer replies of a trace end there."""
SIM = SimConfig((GROUP,), (6000,), 8192, 49_152, max_queue=1_000_000)
"""Memory is never short in it, and no queue is full: places and the scheduler decide."""
Progress = Callable[[str], None]
"""Told before each run what it is."""


@dataclass(frozen=True, slots=True)
class Section:
    """One experiment as the page shows it."""

    body: str
    plots: tuple[Plot, ...] = ()


@dataclass(frozen=True, slots=True)
class Plot:
    """Lines over x, and horizontal lines by name."""

    name: str
    title: str
    x: str
    y: str
    lines: dict[str, tuple[Sequence[float], Sequence[float]]]
    levels: dict[str, float]
    log_y: bool = False


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run, in seconds, of the replies that were given."""

    latency: tuple[float, ...]
    ttft: tuple[float, ...]
    tpot: tuple[float, ...]
    """Mean time between tokens per reply; 0 for replies of one token."""
    preemptions: int
    num_refused: int

    @property
    def mean(self) -> float:
        return sum(self.latency) / len(self.latency)

    @classmethod
    def of_all(cls, runs: Sequence[Figures]) -> Figures:
        """Of several runs together."""
        latency, ttft, tpot = (
            tuple(value for run in runs for value in getattr(run, name)) for name in ("latency", "ttft", "tpot")
        )
        return cls(latency, ttft, tpot, sum(run.preemptions for run in runs), sum(run.num_refused for run in runs))


def times(coefficients: Sequence[float] = COEFFICIENTS) -> CostModel:
    model = CostModel()
    model.coefficients = list(coefficients)
    return model


def scheduled(policy: str = "fcfs", **fields) -> SchedulingConfig:
    return SchedulingConfig(policy=policy, **fields)


def trace(path: Path, num_requests: int, stretch: int = 0) -> tuple[TraceRow, ...]:
    """So many rows of a trace, the first ones or a later stretch, with lengths scaled and at the pace it was recorded
    with, from time 0."""
    begin = stretch * num_requests
    rows = read_trace(path, length_scale=SCALE)[begin : begin + num_requests]
    start_s = rows[0].arrival_s
    return tuple(
        replace(row, arrival_s=row.arrival_s - start_s, num_output=min(row.num_output, MAX_TOKENS)) for row in rows
    )


def chat(num_requests: int, scale: float = SCALE) -> tuple[TraceRow, ...]:
    return generate("chat", num_requests, 1.0, SEED, scale)


def at_rate(rows: Sequence[TraceRow], rate_per_s: float) -> Workload:
    """The same pattern of arrivals, so many of them a second."""
    factor = (len(rows) - 1) / (rows[-1].arrival_s - rows[0].arrival_s) / rate_per_s
    paced = tuple(replace(row, arrival_s=row.arrival_s * factor) for row in rows)
    spec = WorkloadSpec(
        num_requests=len(rows), concurrency=None, trace=paced, num_warmup=0, max_tokens=SIM.context_length
    )
    return plan(spec, Numbers(SIM.vocab_size), SEED)


def run(
    sim: SimConfig, workload: Workload, *, hidden: bool, coefficients: Sequence[float] = COEFFICIENTS
) -> tuple[list[Reply], int]:
    """The replies in the order of sending, and how many preemptions there were. `hidden`: the engine does not know
    how long replies will be."""
    lengths: dict[str, int] | None = {} if hidden else None
    engine, executor = build_sim(sim, times(coefficients), lengths)
    replies = replay(engine, executor, workload, lengths=lengths, max_tokens=MAX_TOKENS, stop_token=executor.stop_token)
    return replies, engine.stats().preemptions


def figures(sim: SimConfig, workload: Workload, *, hidden: bool) -> Figures:
    replies, preemptions = run(sim, workload, hidden=hidden)
    served = [reply for reply in replies if reply.error is None]
    return Figures(
        tuple(reply.token_times_s[-1] - reply.sent_s for reply in served),
        tuple(reply.token_times_s[0] - reply.sent_s for reply in served),
        tuple(tpot(reply) for reply in served),
        preemptions,
        len(replies) - len(served),
    )


def tpot(reply: Reply) -> float:
    found = reply.token_times_s
    return (found[-1] - found[0]) / max(1, len(found) - 1)


def capacity(
    sim: SimConfig, rows: Sequence[TraceRow], *, hidden: bool = True, coefficients: Sequence[float] = COEFFICIENTS
) -> float:
    """Requests per second, with twice as many always in flight as may run, first come first served."""
    workload = replace(at_rate(rows, 1.0), concurrency=2 * sim.max_running)
    replies, _ = run(replace(sim, scheduling=scheduled()), workload, hidden=hidden, coefficients=coefficients)
    return len(replies) / max(reply.token_times_s[-1] for reply in replies)


def percentile(values: Sequence[float], percent: float) -> float:
    """Between the two nearest."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def seconds(value: float) -> str:
    return f"{value:.2f}"
