"""What a deployment knows of its parts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.core.errors import ConfigurationError
from headrace.server.build import Deployment, ServeConfig, build
from tests.server.fakes import EOS, make_tokenizer


@pytest.mark.parametrize(
    ("num_rows", "vocab_size", "eos_ids"),
    [(300, 260, {EOS}), (260, 260, {EOS}), (259, 259, {EOS}), (EOS, EOS, set())],
)
def test_ids_are_those_of_tokenizer_and_embedding_alike(num_rows: int, vocab_size: int, eos_ids: set[int]):
    """Embeddings are padded, and some tokenizers have more ids than their embedding has rows (Gemma's folder: one)."""
    parts: Any = {
        "engine": None,
        "template": None,
        "grammars": None,
        "description": SimpleNamespace(vocab_size=num_rows),
    }
    deployment = Deployment(tokenizer=make_tokenizer(), name="x", context_length=8, **parts)
    assert (deployment.vocab_size, deployment.eos_ids) == (vocab_size, eos_ids)


@pytest.mark.parametrize(
    "field", [{"backend": "gpu"}, {"kv_format": "q8"}, {"isa": "mmx"}, {"threads": 0}, {"speculate": "magic"}]
)
def test_a_wrong_setting_is_said_before_anything_is_fetched(field: dict):
    """`kv_format` was a KeyError, and `isa` an error of C++, both after the model had been fetched."""
    (name,) = field
    with pytest.raises(ConfigurationError, match=f"^{name} is "):
        build(ServeConfig("no-such-model", **field))
