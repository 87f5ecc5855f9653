"""One environment per peer under the user's cache, made once and reused.

    <cache>/headrace/peers/<name>-<version>/
        venv/            the peer and what it needs
        install.log      what pip and cmake said
        installed.json   versions and seconds, written last: an environment without it is not trusted
        failed.json      why it cannot be had here, so that the next run need not find out again (--retry does)

<cache> is $HEADRACE_CACHE, else $XDG_CACHE_HOME, else ~/.cache, as for models.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.server.system import instruction_sets, processor, usable_cores

ERROR_WORDS = re.compile(r"error|fail|not found|no module|cannot|unable|refused|killed|timed out", re.IGNORECASE)
NOISE = re.compile(r"^(\[?notice|hint|note|warning|×|╰|│|full command|-+$|\[end of output)", re.IGNORECASE)
# A CPU build of torch is on such machines under this one version; others bring gigabytes of CUDA libraries.
TORCH = "2.13.0"

Say = Callable[[str], None]


class Unavailable(Exception):
    """A peer cannot be had or run here; the text is the reason as it is printed."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a peer comes here: requirements for pip, then perhaps sources for cmake."""

    name: str
    version: str
    requirements: tuple[str, ...]
    import_name: str
    """Tried after the installation."""
    pip_options: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    """Variables for pip, such as CMAKE_ARGS."""
    sdist: str = ""
    """A requirement whose source package is unpacked for cmake."""
    cmake_folder: str = "."
    """Of the CMakeLists.txt inside the source package."""
    cmake_options: tuple[str, ...] = ()
    cmake_target: str = ""
    is_native: bool = False
    """Compiled for this processor: a cache that moved to another one is not trusted."""
    timeout_s: float = 3600.0


@dataclass(frozen=True, slots=True)
class Environment:
    """A peer that is here."""

    folder: Path
    versions: dict[str, str]
    """Of the packages in it, by name."""
    install_s: float
    made_for: str
    """What its compiled code depends on."""

    @property
    def python(self) -> Path:
        return self.folder / "venv" / "bin" / "python"

    def built(self, target: str) -> Path:
        """A program that cmake made."""
        return self.folder / "build" / "bin" / target


def cache_root() -> Path:
    base = os.environ.get("HEADRACE_CACHE") or os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "headrace" / "peers"


def hardware() -> str:
    """What compiled code depends on: a cache may move to another machine."""
    return f"{processor()} ({' '.join(instruction_sets())})"


def ensure(recipe: Recipe, say: Say, *, retry: bool = False) -> Environment:
    """The peer's environment, made first if need be. Raises `Unavailable`."""
    folder = cache_root() / f"{recipe.name}-{recipe.version}"
    made_for = " ".join((hardware(), *(f"{k}={v}" for k, v in recipe.environment), *recipe.cmake_options))
    if (found := _read(folder)) and (not recipe.is_native or found.made_for == made_for):
        return found
    if found:
        say(f"{recipe.name} {recipe.version}: was compiled for {found.made_for}; making it anew")
    failed = folder / "failed.json"
    if failed.exists() and not retry:
        raise Unavailable(json.loads(failed.read_text("utf-8"))["reason"])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        begin = time.monotonic()
        with (folder / "install.log").open("w", encoding="utf-8") as log:
            _install(recipe, folder, Run(log, folder / "install.log", recipe.timeout_s), say)
        made = Environment(folder, _versions(folder), time.monotonic() - begin, made_for)
    except Unavailable as error:
        failed.write_text(json.dumps({"reason": str(error)}), "utf-8")
        raise
    facts = {"versions": made.versions, "install_s": made.install_s, "made_for": made.made_for}
    (folder / "installed.json").write_text(json.dumps(facts, indent=1), "utf-8")
    return made


class Run:
    """Commands whose output goes to the log; the log's last meaningful line is the reason when one fails."""

    def __init__(self, log: Any, path: Path, timeout_s: float) -> None:
        self._log, self._path = log, path
        self._deadline = time.monotonic() + timeout_s

    def __call__(self, command: list[str], environment: dict[str, str] | None = None, cwd: Path | None = None) -> None:
        print(f"$ {' '.join(command)}", file=self._log, flush=True)
        begin = self._log.tell()
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                cwd=cwd,
                timeout=max(1.0, self._deadline - time.monotonic()),
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise Unavailable(f"not installed within {error.timeout:.0f} s (`{Path(command[0]).name}`)") from None
        except OSError as error:
            raise Unavailable(f"{command[0]}: {error.strerror}") from None
        self._log.seek(0, os.SEEK_END)  # the child wrote through the same file
        if done.returncode:
            said = self._path.read_text("utf-8", errors="replace")[begin:]
            raise Unavailable(last_error_line(said) or f"`{command[0]}` exited with {done.returncode}")


def _install(recipe: Recipe, folder: Path, run: Run, say: Say) -> None:
    python = folder / "venv" / "bin" / "python"
    if not python.exists():
        run([sys.executable, "-m", "venv", str(folder / "venv")])
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    constraints = folder / "constraints.txt"
    constraints.write_text(f"torch=={TORCH}\n", "utf-8")
    if recipe.requirements:
        say(f"{recipe.name} {recipe.version}: installing")
        # A wheel that pip keeps may have been compiled for another processor, or with other options.
        options = [*recipe.pip_options, *(["--no-cache-dir"] if recipe.is_native else [])]
        wanted = ["install", *options, "--constraint", str(constraints), *recipe.requirements]
        plan = folder / "plan.json"
        run([*pip, *wanted, "--dry-run", "--ignore-installed", "--report", str(plan), "--quiet"])
        if heavy := heavy_packages(json.loads(plan.read_text("utf-8"))):
            raise Unavailable(f"pip would install {', '.join(heavy)}: several gigabytes")
        run([*pip, *wanted, "--verbose"], dict(recipe.environment))
        run([str(python), "-c", f"import {recipe.import_name}"], cwd=folder)
    if recipe.sdist:
        say(f"{recipe.name} {recipe.version}: compiling {recipe.cmake_target}, which takes minutes")
        _compile(recipe, folder, run, pip)


def _compile(recipe: Recipe, folder: Path, run: Run, pip: list[str]) -> None:
    """Goes on where an interrupted compilation stopped."""
    source, build, unpacked = folder / "source", folder / "build", folder / "source.complete"
    if not unpacked.exists():
        downloads = folder / "sdist"
        run([*pip, "download", "--no-binary=:all:", "--no-deps", "--dest", str(downloads), recipe.sdist])
        archives = list(downloads.glob("*.tar.gz"))
        if len(archives) != 1:
            raise Unavailable(f"pip left {len(archives)} source packages of {recipe.sdist}")
        shutil.rmtree(source, ignore_errors=True)
        source.mkdir()
        run(["tar", "-xzf", str(archives[0]), "--strip-components=1", "-C", str(source)])
        unpacked.touch()
    run(["cmake", "-S", str(source / recipe.cmake_folder), "-B", str(build), *recipe.cmake_options])
    run(["cmake", "--build", str(build), "--target", recipe.cmake_target, "--parallel", str(usable_cores()[0])])
    shutil.rmtree(source)
    unpacked.unlink()


def heavy_packages(plan: dict[str, Any]) -> list[str]:
    """Packages of a `pip install --dry-run --report` that bring gigabytes, or an unwanted torch."""
    found = [(each["metadata"]["name"], each["metadata"]["version"]) for each in plan.get("install", ())]
    heavy = [f"{name} {version}" for name, version in found if name == "torch" and not version.startswith(TORCH)]
    cuda = [name for name, _ in found if name.startswith(("nvidia-", "cuda-"))]
    return heavy + ([f"{len(cuda)} CUDA packages"] if cuda else [])


def last_error_line(said: str) -> str:
    """The line of a log that says most about a failure: the last one that speaks of an error, else the last one."""
    lines = [line.strip() for line in said.splitlines()]
    lines = [line for line in lines if line and not NOISE.match(line)]
    errors = [line for line in lines if ERROR_WORDS.search(line)]
    best = (errors or lines or [""])[-1]
    return best if len(best) <= 240 else best[:237] + "..."


def _versions(folder: Path) -> dict[str, str]:
    python = folder / "venv" / "bin" / "python"
    listed = subprocess.run(
        [str(python), "-m", "pip", "--disable-pip-version-check", "list", "--format=json"],
        capture_output=True,
        text=True,
        check=True,
    )
    return {each["name"]: each["version"] for each in json.loads(listed.stdout)}


def _read(folder: Path) -> Environment | None:
    try:
        return Environment(folder, **json.loads((folder / "installed.json").read_text("utf-8")))
    except (FileNotFoundError, TypeError):  # of an older version of this file
        return None
