"""What is scored: token rows from files, cut into windows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headrace.core.errors import ConfigurationError
from headrace.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Window:
    """A prompt to score. Its first `num_known` tokens are context only: an earlier window has scored them."""

    tokens: tuple[int, ...] = field(repr=False)
    num_known: int


def read_tokens(path: Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens of a file: of a .json file the ids it lists, of any other its text, encoded without special tokens.

    Raises `ConfigurationError` for a file that cannot be read or holds fewer than two tokens.
    """
    try:
        text = path.read_text("utf-8")
        tokens = json.loads(text) if path.suffix == ".json" else tokenizer.encode(text)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise ConfigurationError(f"{path} must hold a JSON list of token ids.")
    wrong = next((token for token in tokens if not 0 <= token < tokenizer.vocab_size), None)
    if wrong is not None:
        raise ConfigurationError(f"{path} names token {wrong}; this vocabulary has {tokenizer.vocab_size}.")
    if len(tokens) < 2:
        raise ConfigurationError(f"{path} has {len(tokens)} tokens; at least 2 are needed to predict one.")
    return tuple(tokens)


def first_token(tokenizer: Tokenizer) -> tuple[int, ...]:
    """What the model wants at the head of every text: its BOS token, or nothing."""
    bos_id = tokenizer.bos_id
    if bos_id is None or tokenizer.encode("a", add_special_tokens=True)[:1] != [bos_id]:
        return ()
    return (bos_id,)


def windows(tokens: Sequence[int], context: int, overlap: int, head: tuple[int, ...] = ()) -> Iterator[Window]:
    """Windows of at most `context` tokens that share `overlap` with the one before, each behind `head` (BOS).

    Every token is scored exactly once (the first one only behind a head), with at least `overlap` tokens before it but
    at the beginning. Raises `ConfigurationError` unless 1 <= overlap < context - len(head).
    """
    size = context - len(head)
    if not 1 <= overlap < size:
        raise ConfigurationError(
            f"the overlap is {overlap} tokens of a context of {context}; it must be from 1 to {max(1, size - 1)}."
        )
    start = 0
    while True:
        end = min(start + size, len(tokens))
        known = (overlap if start else 0) + len(head)
        yield Window((*head, *tokens[start:end]), max(1, known))
        if end == len(tokens):
            return
        start = end - overlap
