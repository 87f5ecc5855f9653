"""What this machine offers a server: cores, instruction sets, memory, versions. Read from the system, never assumed."""

from __future__ import annotations

import os
import platform
from functools import cache
from importlib import metadata
from pathlib import Path

_RELEVANT = (
    *("sse4_2", "avx", "f16c", "fma", "avx2", "avx_vnni"),
    *("avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_int8", "amx_bf16"),
    *("neon", "asimd", "asimddp", "i8mm", "bf16", "sve", "sve2"),
)
"""Instruction sets that a kernel could be chosen by, as Linux spells them."""

_PACKAGES = ("numpy", "tokenizers", "jinja2", "fastapi", "uvicorn", "pydantic", "msgspec")


@cache
def version() -> str:
    """Headrace's own."""
    return metadata.version("headrace")


def package_versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


@cache
def instruction_sets() -> tuple[str, ...]:
    """Those of this processor that matter here, from the basic to the newest."""
    flags = set(_cpu_field("flags", "Features").split())
    return tuple(name for name in _RELEVANT if name in flags)


@cache
def processor() -> str:
    return _cpu_field("model name", "Model") or platform.processor() or platform.machine()


def usable_cores() -> tuple[int, str]:
    """(cores this process may keep busy, what limits them): the machine's, the cpuset's, the cgroup quota's."""
    total = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    quota = _cgroup_quota_cores()
    if quota is not None and quota < allowed:
        return max(1, int(quota)), f"cgroup quota of {quota:g} on {total}"
    if allowed < total:
        return allowed, f"cpuset, of {total}"
    return total, "all of the machine"


def memory_bytes() -> tuple[int, int]:
    """(memory this process may use at most, of which now available): the machine's, or its cgroup's if smaller."""
    total = available = 0
    for line in _read("/proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemTotal":
            total = int(rest.split()[0]) << 10
        elif name == "MemAvailable":
            available = int(rest.split()[0]) << 10
    if not total and hasattr(os, "sysconf"):  # not Linux
        total = available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _integer("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
    if limit is not None and limit < total:
        used = _integer("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory/memory.usage_in_bytes") or 0
        return limit, min(available, max(0, limit - used))
    return total, available


def _cgroup_quota_cores() -> float | None:
    quota = _read("/sys/fs/cgroup/cpu.max").split()  # version 2: "max 100000" or "200000 100000", microseconds
    if len(quota) == 2:
        return None if quota[0] == "max" else int(quota[0]) / int(quota[1])
    runtime = _integer("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
    period = _integer("/sys/fs/cgroup/cpu/cpu.cfs_period_us")
    return runtime / period if runtime and period and runtime > 0 else None


def _integer(*paths: str) -> int | None:
    for path in paths:
        text = _read(path).strip()
        if text.lstrip("-").isdigit():
            return int(text)
    return None


def _cpu_field(*names: str) -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in names:
            return value.strip()
    return ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
