"""Servers that the suite starts itself: from a command, on free ports of this machine, and always ended again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import IO

from headrace.conformance.client import Server, Target
from headrace.conformance.outcome import Failed, NotApplicable
from headrace.conformance.replies import show
from headrace.core.errors import ConfigurationError

HOST = "127.0.0.1"
_POLL_S = 0.02
_END_S = 20.0
"""From SIGTERM to SIGKILL, for servers that are no longer looked at."""
_PART = re.compile(r"\[([^\[\]]*\{\w+\}[^\[\]]*)\]")
_PLACEHOLDER = re.compile(r"\{(port|model|threads)\}")


@dataclass(frozen=True, slots=True)
class Command:
    """How to start a server: words as a shell would cut them, with {port}, and {model} and {threads} if rows may set
    those. A part in square brackets, as in `[--threads {threads}]`, is left out where nothing is set."""

    template: str
    model: str
    """What {model} stands for, unless a row puts another model there."""
    gguf: Path | None = None
    f16_gguf: Path | None = None
    """The same model as `gguf`, in 16 bits."""
    speculate_args: str = ""
    """More words, which turn speculation on."""

    def __post_init__(self) -> None:
        """Raises `ConfigurationError` for a command that cannot be started."""
        try:
            words = self.words(0)
            shlex.split(self.speculate_args)
        except ValueError as error:
            raise ConfigurationError(f"the command {self.template!r} cannot be read: {error}.") from None
        if "{port}" not in self.template:
            raise ConfigurationError(f"the command {self.template!r} has no {{port}}: the suite chooses the ports.")
        if not words or shutil.which(words[0]) is None:
            raise ConfigurationError(f"the command {self.template!r} begins with no program that is here.")
        for file in (self.gguf, self.f16_gguf):
            if file is not None and not file.is_file():
                raise ConfigurationError(f"there is no file {file}.")

    @property
    def always_sets_threads(self) -> bool:
        return "{threads}" in _PART.sub("", self.template)

    def needs(self, placeholder: str, example: str) -> None:
        """Raises `NotApplicable` if it is missing."""
        if placeholder not in self.template:
            raise NotApplicable(f"needs {placeholder} in --command, as in {example}")

    def words(self, port: int, *, model: str | None = None, threads: int | None = None, more: str = "") -> list[str]:
        """`threads` None leaves them to the server; where the command always sets them: as many as usable cores."""
        values = {"port": str(port), "model": model or str(self.gguf or self.model)}
        if threads is not None:
            values["threads"] = str(threads)

        def kept(part: re.Match[str]) -> str:
            return part[1] if all(name in values for name in _PLACEHOLDER.findall(part[1])) else ""

        text = _PART.sub(kept, self.template)
        values.setdefault("threads", str(len(usable_cores())))
        words = [_PLACEHOLDER.sub(lambda name: values[name[1]], word) for word in shlex.split(text)]
        return words + shlex.split(more)


@dataclass(slots=True)
class Started:
    """A server as a process. It leads a group of its own, in which are all that it starts."""

    process: subprocess.Popen[bytes]
    server: Server
    start_s: float
    """Before the process was made, on `time.monotonic`."""
    output: IO[bytes]
    """What it prints, on either stream."""

    @property
    def group(self) -> int:
        return self.process.pid

    def said(self) -> str:
        """The end of what it printed, as a part of a sentence."""
        self.output.seek(0)
        lines = [line for line in self.output.read().decode("utf-8", "replace").splitlines() if line.strip()]
        telling = [line for line in lines if re.search(r"error|fail|cannot|invalid|no such", line, re.IGNORECASE)]
        return f"it said {show((telling or lines)[-1])!r}" if lines else "it said nothing"

    async def ended(self, timeout_s: float) -> int | None:
        """Its exit status, once it has one; None if it still runs."""
        end_s = time.monotonic() + timeout_s
        while self.process.poll() is None and time.monotonic() < end_s:
            await asyncio.sleep(_POLL_S)
        return self.process.poll()


class Launcher:
    """Starts servers. Leaving it kills what is left of them, whatever happened."""

    def __init__(self, command: Command, target: Target) -> None:
        self.command = command
        self.target = target
        self._live: list[Started] = []

    @contextlib.asynccontextmanager
    async def start(
        self,
        *,
        model: str | Path | None = None,
        threads: int | None = None,
        cores: Sequence[int] = (),
        more: str = "",
        probe: bool = True,
    ) -> AsyncIterator[Started]:
        """A server that has become ready, and has been probed unless told otherwise; ended on leaving.

        `cores`: those that its processes may use; all if empty. Raises `Failed` if it ends or does not become ready in
        the target's time, `NotApplicable` where the command has no place for what is asked.
        """
        if model is not None:
            self.command.needs("{model}", "'headrace serve {model} --port {port}'")
        if threads is not None:
            self.command.needs("{threads}", "'headrace serve --port {port} [--threads {threads}]'")
        port = _free_port()
        words = self.command.words(port, model=None if model is None else str(model), threads=threads, more=more)
        started = self._spawn(words, f"http://{HOST}:{port}", cores)
        try:
            await self._become_ready(started)
            if probe:
                await started.server.probe()
            yield started
        finally:
            await self._end(started)

    def _spawn(self, words: Sequence[str], url: str, cores: Sequence[int]) -> Started:
        output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        start_s = time.monotonic()
        with _only_on(cores):
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        started = Started(process, Server(replace(self.target, url=url)), start_s, output)
        self._live.append(started)
        return started

    async def _become_ready(self, started: Started) -> None:
        """Until /health answers 200, or the list of models where there is no /health."""
        timeout_s = self.target.timeout_s
        while started.process.poll() is None:
            if time.monotonic() - started.start_s > timeout_s:
                raise Failed(f"expected a server that is ready within {timeout_s:.0f} s; {started.said()}")
            with contextlib.suppress(Failed):
                health = await started.server.get("/health", timeout_s=5)
                if health.status == 200:
                    break
                if health.status in (404, 405) and (await started.server.get("/v1/models")).status == 200:
                    break
            await asyncio.sleep(_POLL_S)
        else:
            raise Failed(f"expected a server; it ended with status {started.process.returncode}, and {started.said()}")
        await started.server.use_served_name()

    async def _end(self, started: Started) -> None:
        if started.process.poll() is None:
            started.process.terminate()
            await started.ended(_END_S)
        self._kill(started)

    def _kill(self, started: Started) -> None:
        """What is left of its group, which is nothing after an end in good order."""
        if started not in self._live:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.group, signal.SIGKILL)
        started.process.wait()
        started.output.close()
        self._live.remove(started)

    def __enter__(self) -> Launcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for started in list(self._live):
            self._kill(started)


def usable_cores() -> list[int]:
    """Those that this process may use."""
    if sys.platform == "linux":
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


@contextlib.contextmanager
def _only_on(cores: Sequence[int]) -> Iterator[None]:
    """This thread, and so what it starts, may use those cores only."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
