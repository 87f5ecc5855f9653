"""What the threads of a server really do, from Linux's /proc: not what it says of them (proc_pid_stat(5))."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from headrace.conformance.launcher import usable_cores
from headrace.conformance.outcome import NotApplicable

BUSY_SHARE = 0.25
"""A thread is busy that computes for this share of the time of the busiest one: those that only pass tokens on need
less, and those that compute have equal parts."""


def thread_seconds(group: int) -> dict[int, float]:
    """Thread id -> seconds of processor time so far, of all processes of the group."""
    ticks = os.sysconf("SC_CLK_TCK")
    found = {}
    for task in _tasks(group):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = _stat(task)
            found[int(task.name)] = (int(fields[11]) + int(fields[12])) / ticks
    return found


def seconds_queued(process: int) -> float:
    """How long its first thread could have run but had no core, because of other work (proc_pid_schedstat(5)); 0 where
    the system does not tell."""
    try:
        return int(Path(f"/proc/{process}/schedstat").read_text("ascii").split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def stolen_seconds() -> float:
    """Processor time that a virtual machine's host has given to others since its start, all cores (proc_stat(5)); 0
    where the system does not tell."""
    try:
        fields = Path("/proc/stat").read_text("ascii").split("\n", 1)[0].split()
        return int(fields[8]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError):
        return 0.0


def cores_of(group: int) -> set[int]:
    """Those that any thread of the group may use."""
    found: set[int] = set()
    for task in _tasks(group):
        with contextlib.suppress(ProcessLookupError):
            found |= os.sched_getaffinity(int(task.name))
    return found


def num_busy(before: Mapping[int, float], after: Mapping[int, float]) -> int:
    """Threads that computed between two readings of `thread_seconds`."""
    spent = [seconds - before.get(thread, 0.0) for thread, seconds in after.items()]
    return sum(seconds > 0 and seconds >= BUSY_SHARE * max(spent) for seconds in spent)


def halves() -> tuple[list[int], list[int]]:
    """The usable cores in two parts. Raises `NotApplicable` where a server cannot be held to one of them."""
    cores = usable_cores()
    if sys.platform != "linux" or len(cores) < 2:
        raise NotApplicable("needs Linux, and two cores or more")
    return cores[: len(cores) // 2], cores[len(cores) // 2 :]


def _tasks(group: int) -> Iterator[Path]:
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            if int(_stat(process)[2]) == group:
                yield from list((process / "task").iterdir())


def _stat(process: Path) -> list[str]:
    """What follows the name, which may hold anything."""
    return (process / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
