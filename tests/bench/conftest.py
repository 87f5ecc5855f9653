"""A prompt maker without a model, and one with SmolLM2's tokenizer."""

from __future__ import annotations

import pytest

from headrace.bench.prompts import PromptMaker
from headrace.bench.settings import open_tokenizer
from headrace.text.tokenizer import Tokenizer
from tests.server.fakes import make_tokenizer


@pytest.fixture(scope="session")
def letters() -> PromptMaker:
    """Its words are letters: 26 tokens."""
    return PromptMaker(make_tokenizer())


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_path) -> Tokenizer:
    return open_tokenizer(str(smollm2_path))


@pytest.fixture(scope="session")
def words(smollm2_tokenizer) -> PromptMaker:
    return PromptMaker(smollm2_tokenizer)
