"""Servers as processes of their own, that never outlive their test."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import httpx


@contextlib.contextmanager
def served(*arguments: str, timeout_s: float = 60) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `python ARGUMENTS` until its ready line: (process, URL that ends in /v1)."""
    # One BLAS thread: with two on a machine whose cores are busy, each product waits for the slower one.
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.match(r"Headrace ready: (http://\S+/v1)  model (\S+)", line)
        assert match, (line, process.communicate(timeout=timeout_s)[1] if process.poll() is not None else "")
        yield process, match[1]
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def get(url: str, path: str) -> httpx.Response:
    """A path beside /v1."""
    return httpx.get(url.removesuffix("/v1") + path, timeout=20, verify=False)  # certificates take 70 ms to load


def value_of(name: str, text: str) -> float:
    """Of a metric without labels, in Prometheus's text format."""
    (line,) = (line for line in text.splitlines() if line.startswith(f"{name} "))
    return float(line.split()[-1])
