"""A model of 115 thousand random weights whose right logprobs are known, as a GGUF file with any scaling of rope.

Written by hand from the GGUF specification (version 3), because a suite that measures servers must not depend on the
readers and writers of one of them. The logprobs in rope.json are those of another implementation on the same weights:
scripts/rope_reference.py makes them anew. Weights and ids come from `random.random()` under a fixed seed, which Python
promises not to change.
"""

from __future__ import annotations

import json
import math
import random
import struct
import sys
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

VOCAB_SIZE, WIDTH, HIDDEN, NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 320, 64, 128, 2, 4, 2, 16
NORM_EPS = 1e-6
CONTEXT_LENGTH = 8192
ORIGINAL_LENGTH = 512
"""Before the context was stretched."""
POSITIONS = (10, 900, 5000)
"""Lengths of the prompts after which logprobs are known: inside the original context, beyond it, far beyond."""
NUM_TOP = 5
FILL_IN = (VOCAB_SIZE - 3, VOCAB_SIZE - 2, VOCAB_SIZE - 1)
"""Marks of prefix, suffix and middle, in a model that fills in."""

_CONTROL = ("<unk>", "<s>", "</s>")
_SPACE, _NEWLINE = "Ġ", "Ċ"  # how byte-level vocabularies write them
_ALIGNMENT = 32
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
_NORMAL, _IS_CONTROL = 1, 3


@dataclass(frozen=True, slots=True)
class Rope:
    """Rope's base, and how it is stretched."""

    base: float = 10000.0
    kind: str = "default"
    """As transformers calls it: default, linear, yarn or llama3."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


ROPES: Mapping[str, Rope] = {
    "base": Rope(base=500000.0),
    "linear": Rope(kind="linear", factor=16.0),
    "yarn": Rope(kind="yarn", factor=16.0),
    "llama3": Rope(kind="llama3", factor=16.0),
}


@dataclass(frozen=True, slots=True)
class Tensor:
    name: str
    """As GGUF calls it."""
    shape: tuple[int, ...]
    """(outputs, inputs), or (width,)."""
    values: array[float]
    """Row by row. Rows of queries and keys are in transformers' order, where a pair lies half a head apart."""


def tensors() -> list[Tensor]:
    """All but those of rope."""
    draw = random.Random(20261130)

    def matrix(name: str, num_out: int, num_in: int, scale: float) -> Tensor:
        values = array("f", (scale * (2 * draw.random() - 1) for _ in range(num_out * num_in)))
        return Tensor(name, (num_out, num_in), values)

    def norm(name: str) -> Tensor:
        return Tensor(name, (WIDTH,), array("f", (0.8 + 0.4 * draw.random() for _ in range(WIDTH))))

    head = matrix("output.weight", VOCAB_SIZE, WIDTH, 0.35)
    head.values[: len(_CONTROL) * WIDTH] = array("f", bytes(4 * len(_CONTROL) * WIDTH))  # never among the likeliest
    found = [matrix("token_embd.weight", VOCAB_SIZE, WIDTH, 1.0), norm("output_norm.weight"), head]
    for layer in range(NUM_LAYERS):
        at = f"blk.{layer}."
        found += [
            norm(f"{at}attn_norm.weight"),
            matrix(f"{at}attn_q.weight", NUM_HEADS * HEAD_DIM, WIDTH, 0.4),
            matrix(f"{at}attn_k.weight", NUM_KV_HEADS * HEAD_DIM, WIDTH, 0.4),
            matrix(f"{at}attn_v.weight", NUM_KV_HEADS * HEAD_DIM, WIDTH, 0.4),
            matrix(f"{at}attn_output.weight", WIDTH, NUM_HEADS * HEAD_DIM, 0.4),
            norm(f"{at}ffn_norm.weight"),
            matrix(f"{at}ffn_gate.weight", HIDDEN, WIDTH, 0.25),
            matrix(f"{at}ffn_up.weight", HIDDEN, WIDTH, 0.25),
            matrix(f"{at}ffn_down.weight", WIDTH, HIDDEN, 0.25),
        ]
    return found


def token_ids(count: int) -> list[int]:
    """The first `count` tokens of the text whose logprobs are known."""
    draw = random.Random(5)
    return [len(_CONTROL) + int(draw.random() * (VOCAB_SIZE - len(_CONTROL))) for _ in range(count)]


def logprobs(name: str) -> dict[int, list[float]]:
    """Length of the prompt -> the `NUM_TOP` largest logprobs of what follows, by another implementation."""
    text = resources.files("headrace.conformance").joinpath("rope.json").read_text("utf-8")
    return {int(length): values for length, values in json.loads(text)["logprobs"][name].items()}


def write(path: Path, rope: Rope, *, fills_in: bool = False) -> None:
    """The model as a GGUF file that converters would make: llama architecture, float32, a byte-level vocabulary.
    `fills_in`: its last tokens are the marks of a text to fill in."""
    stored = [_as_stored(tensor) for tensor in tensors()]
    if rope.kind == "llama3":
        stored.append(Tensor("rope_freqs.weight", (HEAD_DIM // 2,), array("f", llama3_divisors(rope))))
    pairs = _metadata(rope, fills_in)
    out = bytearray(struct.pack("<4sIQQ", b"GGUF", 3, len(stored), len(pairs)))
    for key, value in pairs.items():
        out += _string(key) + value
    offset = 0
    for tensor in stored:
        out += _string(tensor.name) + struct.pack("<I", len(tensor.shape))
        out += struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape)) + struct.pack("<IQ", 0, offset)
        offset += _padded(4 * len(tensor.values))
    out += bytes(_padded(len(out)) - len(out))
    for tensor in stored:
        values = array("f", tensor.values)
        if sys.byteorder == "big":
            values.byteswap()
        data = values.tobytes()
        out += data + bytes(_padded(len(data)) - len(data))
    path.write_bytes(out)


def llama3_divisors(rope: Rope) -> list[float]:
    """What Llama 3's scaling divides each frequency by (Llama 3.1's reference code, `apply_scaling`)."""
    found = []
    for j in range(HEAD_DIM // 2):
        wavelength = 2 * math.pi * rope.base ** (2 * j / HEAD_DIM)
        if wavelength < ORIGINAL_LENGTH / rope.high_freq_factor:
            found.append(1.0)
        elif wavelength > ORIGINAL_LENGTH / rope.low_freq_factor:
            found.append(rope.factor)
        else:
            span = rope.high_freq_factor - rope.low_freq_factor
            smooth = (ORIGINAL_LENGTH / wavelength - rope.low_freq_factor) / span
            found.append(1 / ((1 - smooth) / rope.factor + smooth))
    return found


def _as_stored(tensor: Tensor) -> Tensor:
    """GGUF's llama has the two values that rope turns together side by side: rows 0, n, 1, n + 1, ... of each head."""
    if not tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
        return tensor
    values, half = array("f"), HEAD_DIM // 2
    for head in range(tensor.shape[0] // HEAD_DIM):
        for row in range(HEAD_DIM):
            source = head * HEAD_DIM + row // 2 + half * (row % 2)
            values += tensor.values[source * WIDTH : (source + 1) * WIDTH]
    return Tensor(tensor.name, tensor.shape, values)


def _metadata(rope: Rope, fills_in: bool) -> dict[str, bytes]:
    """Key -> type and value."""
    tokens, merges = _vocabulary()
    kinds = [_IS_CONTROL] * len(_CONTROL) + [_NORMAL] * (len(tokens) - len(_CONTROL))
    pairs: dict[str, tuple[int, Any]] = {
        "general.architecture": (_STRING, "llama"),
        "general.name": (_STRING, f"toy {rope.kind}"),
        "llama.block_count": (_UINT32, NUM_LAYERS),
        "llama.context_length": (_UINT32, CONTEXT_LENGTH),
        "llama.embedding_length": (_UINT32, WIDTH),
        "llama.feed_forward_length": (_UINT32, HIDDEN),
        "llama.attention.head_count": (_UINT32, NUM_HEADS),
        "llama.attention.head_count_kv": (_UINT32, NUM_KV_HEADS),
        "llama.attention.layer_norm_rms_epsilon": (_FLOAT32, NORM_EPS),
        "llama.vocab_size": (_UINT32, VOCAB_SIZE),
        "llama.rope.dimension_count": (_UINT32, HEAD_DIM),
        "llama.rope.freq_base": (_FLOAT32, rope.base),
        "tokenizer.ggml.model": (_STRING, "gpt2"),
        "tokenizer.ggml.pre": (_STRING, "gpt-2"),
        "tokenizer.ggml.bos_token_id": (_UINT32, 1),
        "tokenizer.ggml.eos_token_id": (_UINT32, 2),
        "tokenizer.ggml.add_bos_token": (_BOOL, False),
    }
    if fills_in:
        del merges[-len(FILL_IN) :]
        for name, token in zip(("pre", "suf", "mid"), FILL_IN, strict=True):
            tokens[token] = f"<|fim_{name}|>"
            pairs[f"tokenizer.ggml.fim_{name}_token_id"] = (_UINT32, token)
            kinds[token] = _IS_CONTROL
    if rope.kind in ("linear", "yarn"):
        pairs["llama.rope.scaling.type"] = (_STRING, rope.kind)
        pairs["llama.rope.scaling.factor"] = (_FLOAT32, rope.factor)
    if rope.kind == "yarn":
        pairs["llama.rope.scaling.original_context_length"] = (_UINT32, ORIGINAL_LENGTH)
    written = {key: struct.pack("<I", kind) + _value(kind, value) for key, (kind, value) in pairs.items()}
    arrays = (("tokens", _STRING, tokens), ("merges", _STRING, merges), ("token_type", _INT32, kinds))
    for name, kind, values in arrays:
        head = struct.pack("<IIQ", _ARRAY, kind, len(values))
        written[f"tokenizer.ggml.{name}"] = head + b"".join(_value(kind, value) for value in values)
    return written


def _vocabulary() -> tuple[list[str], list[str]]:
    """(tokens, merges): printable ASCII, and pairs of small letters until it is full."""
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    single = [chr(code) for code in range(33, 127)] + [_SPACE, _NEWLINE]
    pairs = [(a, b) for a in letters for b in letters][: VOCAB_SIZE - len(_CONTROL) - len(single)]
    return [*_CONTROL, *single, *(a + b for a, b in pairs)], [f"{a} {b}" for a, b in pairs]


def _value(kind: int, value: Any) -> bytes:
    if kind == _STRING:
        return _string(value)
    return struct.pack({_UINT32: "<I", _INT32: "<i", _FLOAT32: "<f", _BOOL: "<?"}[kind], value)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
