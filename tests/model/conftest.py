"""Fixtures of the model tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import gguf
import pytest


@pytest.fixture(scope="session")
def gguf_reader() -> Callable[[Path], gguf.GGUFReader]:
    """A file as the gguf package reads it, once per file: a large vocabulary takes it ten seconds."""

    @cache
    def read(path: Path) -> gguf.GGUFReader:
        return gguf.GGUFReader(path)

    return read
