"""The tokenizers of the two real models, built once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.models.loaders.checkpoint import open_checkpoint
from headrace.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def smollm2_config(smollm2_path: Path) -> dict[str, Any]:
    return dict(open_checkpoint(smollm2_path).config)


@pytest.fixture(scope="session")
def gemma_config(gemma_path: Path) -> dict[str, Any]:
    return dict(open_checkpoint(gemma_path).config)


@pytest.fixture(scope="session")
def smollm2(smollm2_config: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(smollm2_config)


@pytest.fixture(scope="session")
def gemma(gemma_config: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(gemma_config)


@pytest.fixture(scope="session")
def smollm2_reference(data_path: Path) -> dict[str, Any]:
    return json.loads((data_path / "smollm2-135m-instruct.q4_1.json").read_text("utf-8"))


@pytest.fixture(scope="session")
def gemma_reference(data_path: Path) -> dict[str, Any]:
    return json.loads((data_path / "gemma-3-270m.q4_k_m.json").read_text("utf-8"))
