"""The harness's half of the conversation: start a runner, ask it, stop it."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.peers.environments import last_error_line

ROOT = Path(__file__).resolve().parents[2]
STOP_S = 15.0


class RunnerError(Exception):
    """A runner failed, died or did not answer; the text is the reason as it is printed."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one runner did once."""

    num_tokens: int
    seconds: float
    num_steps: int | None = None
    """Of a decode; fewer than asked for when time was up."""

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


def parse_answer(line: str) -> dict[str, Any]:
    """One line of a runner. Raises `RunnerError` for an error it reports and for a line that is no answer."""
    try:
        answer = json.loads(line)
    except ValueError:
        raise RunnerError(f"a line that is not JSON: {line.strip()[:120]!r}") from None
    if not isinstance(answer, dict):
        raise RunnerError(f"an answer that is not an object: {line.strip()[:120]!r}")
    if "error" in answer:
        raise RunnerError(str(answer["error"]))
    return answer


def parse_measurement(answer: dict[str, Any]) -> Measurement:
    """Raises `RunnerError` where tokens or seconds are missing or not positive."""
    num_tokens, seconds = answer.get("num_tokens"), answer.get("seconds")
    if not isinstance(num_tokens, int) or not isinstance(seconds, (int, float)) or num_tokens <= 0 or seconds <= 0:
        raise RunnerError(f"nothing was measured: {num_tokens!r} tokens in {seconds!r} s")
    return Measurement(num_tokens, float(seconds), answer.get("num_steps"))


class Runner:
    """A child process that speaks `wire`. Its standard error goes to `log`."""

    def __init__(self, python: Path, module: str, log: Path, environment: dict[str, str]) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        with log.open("wb") as sink:
            self._child = subprocess.Popen(
                [str(python), "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                text=True,
                cwd=ROOT,  # `-m` finds this package there
                env={**os.environ, **environment},
            )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def ask(self, timeout_s: float, **message: Any) -> dict[str, Any]:
        """Raises `RunnerError`; after one about a missing answer the process is gone."""
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(message) + "\n")
            self._child.stdin.flush()
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            self.stop()
            raise RunnerError(f"no answer to {message['do']!r} within {timeout_s:.0f} s") from None
        except OSError:
            line = None
        if line is None:
            self._child.wait()
            reason = last_error_line(self._log.read_text("utf-8", errors="replace"))
            raise RunnerError(f"the process ended with {self._child.returncode}: {reason or 'it said nothing'}")
        return parse_answer(line)

    @property
    def is_alive(self) -> bool:
        return self._child.poll() is None

    def stop(self) -> None:
        """Ask it to end, then end it: only this child, by its id."""
        if self._child.poll() is None:
            with contextlib.suppress(OSError):
                assert self._child.stdin is not None
                self._child.stdin.write('{"do": "quit"}\n')
                self._child.stdin.close()
            try:
                self._child.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait()

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
