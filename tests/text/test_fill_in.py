"""Where a model's fill-in tokens are found, and the order they give a prompt."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.text.fill_in import FillIn, fill_in_of
from headrace.text.tokenizer import CONTROL, NORMAL, Tokenizer

TEXTS = ["a", "b", "<end>", "<P>", "<S>", "<M>"]


def gguf(texts: list[str], **keys: Any) -> dict[str, Any]:
    fields = {
        "model": "llama",
        "tokens": texts,
        "scores": [0.0] * len(texts),
        "token_type": [NORMAL, NORMAL, *[CONTROL] * (len(texts) - 2)],
        "bos_token_id": 2,
        "eos_token_id": 2,
        "unknown_token_id": 2,
        **keys,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items()}


@pytest.mark.parametrize("names", [("fim_pre", "fim_suf", "fim_mid"), ("prefix", "suffix", "middle")])
def test_a_gguf_file_names_them(names: tuple[str, str, str]):
    keys = {f"{name}_token_id": token for name, token in zip(names, (3, 4, 5), strict=True)}
    assert Tokenizer.from_gguf(gguf(TEXTS, **keys)).fill_in == FillIn(3, 4, 5)


def test_a_file_that_names_only_some_or_none_has_none():
    assert Tokenizer.from_gguf(gguf(TEXTS)).fill_in is None
    assert Tokenizer.from_gguf(gguf(TEXTS, fim_pre_token_id=3, fim_suf_token_id=4)).fill_in is None
    ids = {"fim_pre_token_id": 3, "fim_suf_token_id": 4, "fim_mid_token_id": 6}
    assert Tokenizer.from_gguf(gguf(TEXTS, **ids)).fill_in is None, "an id outside of the vocabulary"


@pytest.mark.parametrize(
    ("texts", "prompt"),
    [
        (("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), "<|fim_prefix|>A<|fim_suffix|>B<|fim_middle|>"),
        (("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), "<fim_prefix>A<fim_suffix>B<fim_middle>"),
        (
            ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
            "<｜fim▁begin｜>A<｜fim▁hole｜>B<｜fim▁end｜>",
        ),
    ],
)
def test_known_texts_in_the_order_of_the_models_own_documentation(texts: tuple[str, ...], prompt: str):
    vocabulary = ["A", "B", *texts]
    fill_in = fill_in_of({text: i for i, text in enumerate(vocabulary)})
    assert fill_in is not None
    assert "".join(vocabulary[i] for i in fill_in.arrange([0], [1])) == prompt


def test_the_default_model_has_none(smollm2: Tokenizer):
    assert smollm2.fill_in is None
