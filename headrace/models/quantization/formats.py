"""Storage formats of weights: how many weights a block holds and where its bytes are.

A quantized tensor is stored row by row; a row is cut into blocks of `block_size` consecutive weights and
every block has the same `layout`. Plain number types are the same thing with one weight per block.

Sources: the GGUF specification (ggml, docs/gguf.md) for the type ids, ggml-common.h for the block layouts.
All numbers are little-endian.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from headrace.core.errors import HeadraceError


class FormatError(HeadraceError, ValueError):
    """A tensor's shape or bytes do not fit its storage format."""


@dataclass(frozen=True, slots=True)
class Format:
    """One way to store weights.

    name        the field's name for it, as GGUF tools print it
    gguf_type   type id in a GGUF tensor directory; None for types only safetensors has
    block_size  weights per block
    layout      the bytes of one block
    """

    name: str
    gguf_type: int | None
    block_size: int
    layout: np.dtype[Any]

    @property
    def block_bytes(self) -> int:
        return int(self.layout.itemsize)

    @property
    def is_quantized(self) -> bool:
        """Whether a weight needs its block's scale to mean something."""
        return self.block_size > 1

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.block_bytes / self.block_size

    def row_bytes(self, width: int) -> int:
        """Bytes of one row of `width` weights. Raises FormatError when blocks would straddle rows."""
        if width % self.block_size:
            raise FormatError(
                f"a row of {width} weights cannot be stored as {self.name}: "
                f"the width must be a multiple of its block of {self.block_size} weights"
            )
        return width // self.block_size * self.block_bytes

    def data_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the raw bytes of a tensor of `shape`: the last dimension becomes bytes per row."""
        if not shape:
            return (self.row_bytes(1),)
        return (*shape[:-1], self.row_bytes(shape[-1]))

    def num_bytes(self, shape: Sequence[int]) -> int:
        """Bytes of a tensor of `shape` (Python integers: cannot overflow)."""
        return prod(self.data_shape(shape))


def _number(name: str, gguf_type: int | None, code: str) -> Format:
    return Format(name, gguf_type, 1, np.dtype(code))


def _blocks(name: str, gguf_type: int, block_size: int, fields: list[tuple[str, str]]) -> Format:
    return Format(name, gguf_type, block_size, np.dtype(fields))


# In the drawings below one box is one field, with its bytes underneath; w is a decoded weight, d an f16
# scale, m an f16 minimum. Byte strings are V fields, so that gathering them out of blocks moves whole strings
# at a time.

F32 = _number("F32", 0, "<f4")
F16 = _number("F16", 1, "<f2")
F64 = _number("F64", 28, "<f8")
BF16 = _number("BF16", 30, "<u2")  # the upper half of an F32; NumPy has no such type

I8 = _number("I8", 24, "i1")
I16 = _number("I16", 25, "<i2")
I32 = _number("I32", 26, "<i4")
I64 = _number("I64", 27, "<i8")
U8 = _number("U8", None, "u1")
U16 = _number("U16", None, "<u2")
U32 = _number("U32", None, "<u4")
U64 = _number("U64", None, "<u8")
BOOL = _number("BOOL", None, "u1")

# Blocks of 32. Byte j of qs holds weight j in its low nibble and weight j + 16 in its high one.
#
#   Q4_0  | d | qs      |    18 bytes    w = d (q - 8)
#           2   16
#   Q4_1  | d | m | qs      |    20 bytes    w = d q + m
#           2   2   16
#   Q5_0  | d | qh | qs      |    22 bytes    w = d (q - 16)     bit j of qh is the fifth bit of weight j
#           2   4    16
#   Q5_1  | d | m | qh | qs      |    24 bytes    w = d q + m
#           2   2   4    16
#   Q8_0  | d | qs (int8)     |    34 bytes    w = d q           byte j is weight j
#           2   32
Q4_0 = _blocks("Q4_0", 2, 32, [("d", "<f2"), ("qs", "V16")])
Q4_1 = _blocks("Q4_1", 3, 32, [("d", "<f2"), ("m", "<f2"), ("qs", "V16")])
Q5_0 = _blocks("Q5_0", 6, 32, [("d", "<f2"), ("qh", "V4"), ("qs", "V16")])
Q5_1 = _blocks("Q5_1", 7, 32, [("d", "<f2"), ("m", "<f2"), ("qh", "V4"), ("qs", "V16")])
Q8_0 = _blocks("Q8_0", 8, 32, [("d", "<f2"), ("qs", "V32")])

# Blocks of 256, in 8 groups of 32 that each have a 6-bit scale s and a 6-bit minimum t.
#
#   Q4_K  | d | dmin | st | qs        |    144 bytes    w = (d s) q - (dmin t)
#           2   2      12   128
#   Q5_K  | d | dmin | st | qh | qs        |    176 bytes    the same with 5-bit q
#           2   2      12   32   128
#
#   qs: 4 runs of 32 bytes; byte j of run r holds weight j of group 2r (low nibble) and of 2r + 1 (high).
#   qh: bit g of byte j is the fifth bit of weight j of group g.
#   st: 12 bytes as 3 rows of 4; for g in 0..3
#         row 0   s[g] in bits 0-5,     bits 4-5 of s[g+4] in bits 6-7
#         row 1   t[g] in bits 0-5,     bits 4-5 of t[g+4] in bits 6-7
#         row 2   bits 0-3 of s[g+4] low, bits 0-3 of t[g+4] high
Q4_K = _blocks("Q4_K", 12, 256, [("d", "<f2"), ("dmin", "<f2"), ("st", "V12"), ("qs", "V128")])
Q5_K = _blocks("Q5_K", 13, 256, [("d", "<f2"), ("dmin", "<f2"), ("st", "V12"), ("qh", "V32"), ("qs", "V128")])

# Blocks of 256, in 16 groups of 16 that each have an int8 scale s.
#
#   Q6_K  | ql       | qh      | s  | d |    210 bytes    w = (d s) (q - 32)
#           128        64        16   2
#
#   For each half h of 128 weights, as 4 runs of 32: run 0 and 1 have their low nibbles in the low nibbles of
#   bytes 64h .. 64h+63 of ql, run 2 and 3 in the high nibbles of the same bytes; bits 2r and 2r + 1 of byte
#   32h + j of qh are the upper two bits of weight j of run r.
Q6_K = _blocks("Q6_K", 14, 256, [("ql", "V128"), ("qh", "V64"), ("s", "V16"), ("d", "<f2")])

FORMATS: tuple[Format, ...] = (
    *(F32, F16, BF16, F64, I8, I16, I32, I64, U8, U16, U32, U64, BOOL),
    *(Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K),
)
BY_NAME: dict[str, Format] = {f.name: f for f in FORMATS}
BY_GGUF_TYPE: dict[int, Format] = {f.gguf_type: f for f in FORMATS if f.gguf_type is not None}

# Types that GGUF files may name and that we do not decode: known by name so that the refusal can say which it
# is.
UNSUPPORTED_GGUF_TYPES: dict[int, str] = {
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
}
