"""Fixtures every kind of test may want: where the models are.

The two real models are pulled on first use and cached like a user's; a test that cannot get one fails.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.models.fetch import resolve


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2 135M Instruct, Q4_1: the default model."""
    return resolve("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def gemma_path() -> Path:
    """Gemma 3 270M, Q4_K_M (for tests only, under Gemma's terms)."""
    return resolve("gemma-3-270m")


@pytest.fixture(scope="session")
def data_path() -> Path:
    """tests/data: right values from an independent implementation, and tiny/<name>/ checkpoints."""
    return Path(__file__).parent / "data"
