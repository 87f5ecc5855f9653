"""The machine a result was measured on, and what it can do at most.

The limits are measured by a small C++ program (native/peaks.cpp), compiled for this processor on first use and kept in
the user's cache: arithmetic in registers and reading a buffer larger than the caches, each at its best of several
rounds. NumPy would measure its BLAS instead.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.models.fetch import cache_root
from headrace.server import system

SOURCE = Path(__file__).parent / "native" / "peaks.cpp"
FLAGS = ("-std=c++20", "-O3", "-march=native", "-ffp-contract=fast", "-pthread")
COMPILERS = ("c++", "g++", "clang++")
BUFFER_MIB = 1024
MAX_MEMORY_SHARE = 0.25
TIMEOUT_S = 120


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts from the system, and measured limits.

    `peaks` is what peaks.cpp prints: figures over `threads`; GB/s for reading, 10^9 operations per second otherwise, an
    addition and a multiplication being two. None where it could not be built or run: `peaks_missing` says why.
    """

    processor: str
    architecture: str
    instruction_sets: tuple[str, ...]
    cores: int
    cores_limited_by: str
    memory_bytes: int
    load_1m: float | None
    """Runnable processes, averaged over the last minute before the measurement: above 0.5 somebody else was there."""
    system: str
    python: str
    headrace: str
    packages: dict[str, str] = field(default_factory=dict)
    peaks: dict[str, Any] | None = None
    peaks_missing: str = ""


def inspect_machine(measure: bool = True) -> Machine:
    """`measure`: find the limits too; about 3 seconds, and once a compilation."""
    cores, limited_by = system.usable_cores()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    peaks, missing = None, "not measured: not asked for"
    if measure:
        try:
            peaks, missing = measure_peaks(cores), ""
        except PeaksError as error:
            missing = f"not measured: {error}"
    return Machine(
        processor=system.processor(),
        architecture=platform.machine(),
        instruction_sets=system.instruction_sets(),
        cores=cores,
        cores_limited_by=limited_by,
        memory_bytes=system.memory_bytes()[0],
        load_1m=load,
        system=platform.platform(),
        python=platform.python_version(),
        headrace=system.version(),
        packages=system.package_versions(),
        peaks=peaks,
        peaks_missing=missing,
    )


class PeaksError(RuntimeError):
    """Why the limits could not be measured."""


def measure_reading(num_threads: int) -> float:
    """GB/s that so many threads read now (the median of some rounds, not the best): neighbours change it all the time.

    Raises `PeaksError`.
    """
    return max(value for value in measure_peaks(num_threads, "read")["read_gb_per_s"] if value)


def measure_peaks(num_threads: int, *only: str) -> dict[str, Any]:
    """Build peaks.cpp where that has not happened yet, and run it; `only`: "read". Raises `PeaksError`."""
    program = _build()
    mib = min(BUFFER_MIB, int(system.memory_bytes()[1] * MAX_MEMORY_SHARE) >> 20)
    command = [str(program), str(num_threads), str(mib), *only]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
        return json.loads(done.stdout)
    except subprocess.CalledProcessError as error:
        raise PeaksError(f"{program} ended with status {error.returncode}: {error.stderr[-500:]}") from error
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        raise PeaksError(f"{program}: {error}") from error


def _build() -> Path:
    """The program for this processor, built unless it is in the cache."""
    compiler = _compiler()
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    # -march=native: a cache on a shared disk must not hand the program to another processor.
    identity = "\n".join((SOURCE.read_text(), version, *FLAGS, system.processor(), *system.instruction_sets()))
    folder = cache_root().parent / "bench"
    program = folder / f"peaks-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    if program.exists():
        return program
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as scratch:
            built = Path(scratch) / "peaks"
            done = subprocess.run(
                [compiler, *FLAGS, str(SOURCE), "-o", str(built)],
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
            if done.returncode:
                raise PeaksError(f"{compiler} cannot build {SOURCE.name}: {done.stderr.strip()[:500]}")
            built.replace(program)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeaksError(f"{SOURCE.name} cannot be built in {folder}: {error}") from error
    return program


def _compiler() -> str:
    names = (os.environ["CXX"],) if os.environ.get("CXX") else COMPILERS
    for name in names:
        if found := shutil.which(name):
            return found
    raise PeaksError(f"no C++ compiler (looked for {', '.join(names)}); install one, or set CXX to its path")
