"""Filling in: a model that was taught to write what stands between two texts has tokens that mark them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_TEXTS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder 2, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
)
_GGUF_KEYS = (
    ("fim_pre_token_id", "fim_suf_token_id", "fim_mid_token_id"),
    ("prefix_token_id", "suffix_token_id", "middle_token_id"),  # older files
)


@dataclass(frozen=True, slots=True)
class FillIn:
    """The tokens before the text that comes first, before the text that follows, and before the reply."""

    prefix: int
    suffix: int
    middle: int

    def arrange(self, before: Sequence[int], after: Sequence[int]) -> tuple[int, ...]:
        return (self.prefix, *before, self.suffix, *after, self.middle)


def fill_in_of(ids: Mapping[str, int], metadata: Mapping[str, Any] | None = None) -> FillIn | None:
    """From the `tokenizer.ggml` keys of a GGUF file, or by the known texts in a vocabulary; None where neither is."""
    for keys in _GGUF_KEYS:
        named = [(metadata or {}).get(f"tokenizer.ggml.{key}") for key in keys]
        found = [token for token in named if isinstance(token, int) and 0 <= token < len(ids)]
        if len(found) == len(keys):
            return FillIn(*found)
    for texts in _TEXTS:
        if all(text in ids for text in texts):
            return FillIn(*(ids[text] for text in texts))
    return None
