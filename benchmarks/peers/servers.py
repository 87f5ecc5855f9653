"""Servers from birth to death: a free port, a process, a wait until it answers, an end by its own id."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from benchmarks.peers.environments import cache_root, last_error_line
from benchmarks.peers.runner import ROOT

HOST = "127.0.0.1"
READY_S = 300.0
STOP_S = 20.0
POLL_S = 0.05
SLOTS = 16
SLOT_TOKENS = 1280
"""Of one slot's context: a shared prefix of 1000, 30 more, 32 out, and some air."""


class ServerError(Exception):
    """A server did not come up; the text is the reason as it is printed."""


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """How to start one server."""

    peer: str
    title: str
    """With the file's format."""
    command: tuple[str, ...]
    """{port} stands for the port."""
    environment: tuple[tuple[str, str], ...] = ()
    extra: tuple[tuple[str, object], ...] = ()
    """More fields of request bodies, for a server that does not know `ignore_eos`."""
    note: str = ""


class Server:
    """A running server. Leaving it ends the process that was started here and no other."""

    def __init__(self, spec: ServerSpec) -> None:
        self.spec = spec
        self.port = free_port()
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", spec.title)
        self._log = cache_root() / "logs" / f"server-{name}.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("wb") as sink:
            self._child = subprocess.Popen(
                [part.replace("{port}", str(self.port)) for part in spec.command],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**os.environ, **dict(spec.environment)},
            )

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def wait_ready(self) -> float:
        """Seconds until the list of models is answered. Raises `ServerError`."""
        begin = time.monotonic()
        while time.monotonic() - begin < READY_S:
            if self._child.poll() is not None:
                reason = last_error_line(self._log.read_text("utf-8", errors="replace"))
                raise ServerError(f"the server ended with {self._child.returncode}: {reason or 'it said nothing'}")
            if self._answers("/v1/models") and self._is_loaded():
                return time.monotonic() - begin
            time.sleep(POLL_S)
        raise ServerError(f"not ready within {READY_S:.0f} s")

    def _answers(self, path: str) -> bool:
        return self._status(path) == 200

    def _is_loaded(self) -> bool:
        """llama-server lists its model before it is loaded; its /health says 503 until then. Others may have none."""
        return self._status("/health") not in (0, 503)

    def _status(self, path: str) -> int:
        """0 while nobody listens."""
        try:
            with urllib.request.urlopen(f"{self.url}{path}", timeout=5) as reply:
                return int(reply.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def stop(self) -> None:
        if self._child.poll() is None:
            self._child.terminate()
            try:
                self._child.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait()

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def headrace_server(python: Path, model: str, title: str, threads: int, *flags: str) -> ServerSpec:
    command = [str(python), "-m", "headrace.cli", "serve", model, "--host", HOST, "--port", "{port}"]
    command += ["--no-log-requests"]
    command += ["--threads", str(threads), *flags]
    return ServerSpec(title, title, tuple(command), _threads(threads))


def llama_cpp_server(python: Path, model: Path, title: str, threads: int, eos_ids: tuple[int, ...]) -> ServerSpec:
    options = {
        "model": str(model),
        "host": HOST,
        "port": "{port}",
        "n_ctx": str(SLOT_TOKENS),
        "n_batch": "512",
        "n_threads": str(threads),
        "n_threads_batch": str(threads),
        "flash_attn": "true",
        "interrupt_requests": "false",  # by default the next request cuts a running stream off
    }
    return ServerSpec(
        "llama.cpp",
        title,
        (str(python), "-m", "llama_cpp.server", *_flags("--", options)),
        extra=(("logit_bias", {str(each): -100.0 for each in eos_ids}),),  # it has no ignore_eos
        note="serves one request at a time",
    )


def llama_server(program: Path, model: Path, title: str, threads: int) -> ServerSpec:
    options = {
        "model": str(model),
        "host": HOST,
        "port": "{port}",
        "ctx-size": str(SLOTS * SLOT_TOKENS),
        "parallel": str(SLOTS),
        "batch-size": "512",
        "threads": str(threads),
        "flash-attn": "on",
    }
    return ServerSpec("llama-server", title, (str(program), *_flags("--", options)), note=f"{SLOTS} slots")


def _flags(prefix: str, options: dict[str, str]) -> list[str]:
    return [word for name, value in options.items() for word in (prefix + name, value)]


def _threads(threads: int) -> tuple[tuple[str, str], ...]:
    return tuple((name, str(threads)) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"))
