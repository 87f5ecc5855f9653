"""Decode stored weights to float32, exactly.

The values are those of ggml's reference decoders, bit for bit: the products and sums below are taken in
float32 in the same order, and NumPy rounds each of them (it never fuses a multiply with an add).

Cost on one core, result in cache: 0.6 (Q8_0) to 2.6 ns (Q5_K) per weight; fresh memory for the result comes
on top. Tensors are decoded in chunks whose temporaries stay in the L2 cache; large ones by several threads,
because NumPy releases the GIL inside each operation.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.models.quantization.formats import Format, FormatError

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Kernel = Callable[[NDArray[Any], Floats], None]  # (blocks [n] of the format's layout, out [n, block_size])

CHUNK_WEIGHTS = 1 << 16  # 256 KiB of result, and about as much again of temporaries
MIN_WEIGHTS_PER_THREAD = 1 << 19  # below this, starting a thread costs more than it saves
MAX_THREADS = 8  # memory bandwidth is the limit long before this


def dequantize(data: Bytes, format: Format, shape: Sequence[int], *, num_threads: int | None = None) -> Floats:
    """Decode a tensor.

    data         uint8, any shape, exactly `format.num_bytes(shape)` bytes in the file's order
    shape        of the result; the last dimension is the one cut into blocks
    num_threads  upper bound; None takes what this process may run on

    Returns a read-only float32 array of `shape`. F32 tensors are not copied: the result is `data` itself.
    Raises FormatError when the number of bytes is not that of the shape.
    """
    shape = tuple(shape)
    if data.dtype != np.uint8:
        raise FormatError(f"stored weights are raw bytes (uint8); this array is {data.dtype}")
    if data.nbytes != format.num_bytes(shape):
        raise FormatError(
            f"a {format.name} tensor of shape {list(shape)} takes {format.num_bytes(shape)} bytes; "
            f"this one has {data.nbytes}"
        )
    flat = data.reshape(-1)
    if format.name == "F32":
        weights = flat.view(format.layout).reshape(shape)
        weights.flags.writeable = False
        return weights

    blocks = flat.view(format.layout)
    out = np.empty((len(blocks), format.block_size), np.float32)
    kernel = KERNELS[format.name]
    per_chunk = max(1, CHUNK_WEIGHTS // format.block_size)

    def decode(start: int, stop: int) -> None:
        # Random or broken scales may be infinite: inf * 0 is a NaN there as in the reference, not news for
        # the user.
        with np.errstate(all="ignore"):
            for at in range(start, stop, per_chunk):
                end = min(at + per_chunk, stop)
                kernel(blocks[at:end], out[at:end])

    threads = min(_usable_cores() if num_threads is None else num_threads, MAX_THREADS)
    threads = max(1, min(threads, prod(shape) // MIN_WEIGHTS_PER_THREAD))
    if threads == 1:
        decode(0, len(blocks))
    else:
        bounds = [len(blocks) * i // threads for i in range(threads + 1)]
        with ThreadPoolExecutor(threads, thread_name_prefix="dequantize") as pool:
            list(pool.map(decode, bounds[:-1], bounds[1:]))
    weights = out.reshape(shape)
    weights.flags.writeable = False
    return weights


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _bytes(field: NDArray[Any]) -> Bytes:
    """Gather a V field of n blocks into contiguous bytes [n, width]."""
    return np.ascontiguousarray(field).view(np.uint8).reshape(len(field), -1)


def _planes(packed: Bytes, bits: int) -> Bytes:
    """Split bytes [m, w] into their 8 / bits fields, lowest first: [m, 8 / bits, w].

    Each plane is computed flat and then dropped into place in whole rows: a loop over rows of w bytes costs
    several times more.
    """
    m, width = packed.shape
    mask = np.uint8((1 << bits) - 1)
    planes = np.empty((m, 8 // bits, width), np.uint8)
    rows = planes.view(f"V{width}")[:, :, 0]
    for i in range(8 // bits):
        plane = (packed >> np.uint8(i * bits)) & mask if i else packed & mask
        rows[:, i] = plane.view(f"V{width}")[:, 0]
    return planes


def _f32(field: NDArray[Any]) -> Floats:
    """f16 scales [n] as a float32 column [n, 1]."""
    return field.astype(np.float32)[:, None]


def _q4_0(blocks: NDArray[Any], out: Floats) -> None:
    q = _planes(_bytes(blocks["qs"]), 4).reshape(out.shape).view(np.int8)
    q -= np.int8(8)
    out[...] = q
    out *= _f32(blocks["d"])


def _q4_1(blocks: NDArray[Any], out: Floats) -> None:
    out[...] = _planes(_bytes(blocks["qs"]), 4).reshape(out.shape)
    out *= _f32(blocks["d"])
    out += _f32(blocks["m"])


def _five_bits(blocks: NDArray[Any]) -> Bytes:
    """The 5-bit values [n, 32] of Q5_0 and Q5_1."""
    q = _planes(_bytes(blocks["qs"]), 4).reshape(-1)
    fifth = np.unpackbits(_bytes(blocks["qh"]).reshape(-1), bitorder="little")
    fifth <<= np.uint8(4)
    q |= fifth
    return q.reshape(len(blocks), 32)


def _q5_0(blocks: NDArray[Any], out: Floats) -> None:
    q = _five_bits(blocks).view(np.int8)
    q -= np.int8(16)
    out[...] = q
    out *= _f32(blocks["d"])


def _q5_1(blocks: NDArray[Any], out: Floats) -> None:
    out[...] = _five_bits(blocks)
    out *= _f32(blocks["d"])
    out += _f32(blocks["m"])


def _q8_0(blocks: NDArray[Any], out: Floats) -> None:
    out[...] = _bytes(blocks["qs"]).view(np.int8)
    out *= _f32(blocks["d"])


def _scales_and_minimums(blocks: NDArray[Any]) -> tuple[Floats, Floats]:
    """The products d s and dmin t of Q4_K and Q5_K, one per group of 32: two columns [8 n, 1]."""
    st = _bytes(blocks["st"]).reshape(-1, 3, 4)
    low_s, low_t, high = st[:, 0], st[:, 1], st[:, 2]
    s = np.concatenate([low_s & 63, (high & 15) | ((low_s >> 2) & 48)], axis=1)
    t = np.concatenate([low_t & 63, (high >> 4) | ((low_t >> 2) & 48)], axis=1)
    scales = _f32(blocks["d"]) * s.astype(np.float32)  # [n, 8]
    minimums = _f32(blocks["dmin"]) * t.astype(np.float32)
    return scales.reshape(-1, 1), minimums.reshape(-1, 1)


def _scale_groups(q: Bytes, blocks: NDArray[Any], out: Floats) -> None:
    scales, minimums = _scales_and_minimums(blocks)
    groups = out.reshape(-1, 32)
    groups[...] = q.reshape(-1, 32)
    groups *= scales
    groups -= minimums


def _q4_k(blocks: NDArray[Any], out: Floats) -> None:
    _scale_groups(_planes(_bytes(blocks["qs"]).reshape(-1, 32), 4), blocks, out)


def _q5_k(blocks: NDArray[Any], out: Floats) -> None:
    q = _planes(_bytes(blocks["qs"]).reshape(-1, 32), 4).reshape(-1)
    fifth = _planes(_bytes(blocks["qh"]), 1).reshape(-1)
    fifth <<= np.uint8(4)
    q |= fifth
    _scale_groups(q, blocks, out)


def _q6_k(blocks: NDArray[Any], out: Floats) -> None:
    low = _planes(_bytes(blocks["ql"]).reshape(-1, 64), 4).reshape(-1)
    high = _planes(_bytes(blocks["qh"]).reshape(-1, 32), 2).reshape(-1)
    high <<= np.uint8(4)
    low |= high
    q = low.view(np.int8)
    q -= np.int8(32)
    scales = _f32(blocks["d"]) * _bytes(blocks["s"]).view(np.int8).astype(np.float32)  # [n, 16]
    groups = out.reshape(-1, 16)
    groups[...] = q.reshape(-1, 16)
    groups *= scales.reshape(-1, 1)


def _number(blocks: NDArray[Any], out: Floats) -> None:
    out[:, 0] = blocks


@cache
def _halves() -> Floats:
    """Every f16 as f32, by its bits: a look-up (256 KiB) is over twice as fast as NumPy's conversion."""
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


def _f16(blocks: NDArray[Any], out: Floats) -> None:
    np.take(_halves(), blocks.view("<u2"), out=out[:, 0], mode="clip")  # "clip": every index is valid, skip the check


def _bf16(blocks: NDArray[Any], out: Floats) -> None:
    bits = out[:, 0].view(np.uint32)
    bits[...] = blocks
    bits <<= np.uint32(16)


KERNELS: dict[str, Kernel] = {
    **dict.fromkeys(("F64", "I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64", "BOOL"), _number),
    "F16": _f16,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
