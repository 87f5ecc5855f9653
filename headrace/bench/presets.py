"""Loads by name: those of the tables that are compared with peers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from headrace.sim.workload import WorkloadSpec


@dataclass(frozen=True, slots=True)
class Point:
    """One load of a benchmark."""

    name: str
    spec: WorkloadSpec


def _prompt() -> list[Point]:
    return [Point("prompt 512", WorkloadSpec(num_requests=5, num_prompt=512, num_output=1, concurrency=1))]


def _decode() -> list[Point]:
    return [
        Point(
            f"decode 128 x{n}",
            WorkloadSpec(num_requests=n, num_prompt=128, num_output=128, concurrency=n, num_warmup=1),
        )
        for n in (1, 2, 4, 8, 16, 32, 64)
    ]


def _http_128_64() -> list[Point]:
    return [
        Point(
            f"128+64 c{n}",
            WorkloadSpec(num_requests=64, num_prompt=128, num_output=64, concurrency=n),
        )
        for n in (1, 8, 16)
    ]


def _shared_prefix() -> list[Point]:
    spec = WorkloadSpec(num_requests=64, num_prompt=1030, num_prefix=1000, num_output=32, concurrency=8)
    return [Point("1000+30+32 c8", spec)]


PRESETS: Mapping[str, Callable[[], list[Point]]] = {
    "prompt": _prompt,
    "decode": _decode,
    "http-128-64": _http_128_64,
    "shared-prefix": _shared_prefix,
}
