"""Decoding agrees to the last bit with the `gguf` package, an independent implementation of the formats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from headrace.models.loaders.checkpoint import open_checkpoint
from headrace.models.quantization.decode import KERNELS, dequantize
from headrace.models.quantization.formats import (
    BY_GGUF_TYPE,
    BY_NAME,
    FORMATS,
    UNSUPPORTED_GGUF_TYPES,
    Format,
    FormatError,
)

QUANTIZED = [f for f in FORMATS if f.is_quantized]
DECODED_BY_GGUF = [*QUANTIZED, BY_NAME["BF16"], BY_NAME["F16"], BY_NAME["F32"]]


def named(format: Format) -> str:
    return format.name


def random_blocks(format: Format, num_blocks: int, seed: int = 0) -> np.ndarray:
    """Random bytes for everything but the f16 scales: random finite numbers, subnormals and zeros too."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (num_blocks, format.block_bytes), np.uint8)
    blocks = raw.view(format.layout)[:, 0]
    if format.is_quantized:
        for name in ("d", "m", "dmin"):
            if name in (format.layout.names or ()):
                blocks[name] = (rng.standard_normal(num_blocks) * 10.0 ** rng.integers(-8, 3, num_blocks)).astype("f2")
    elif format.name == "F16":  # every one there is
        blocks[:] = np.resize(np.arange(1 << 16, dtype=np.uint16), num_blocks).view(np.float16)
    return raw


def reference(raw: np.ndarray, format: Format) -> np.ndarray:
    """[n, block_bytes] uint8 -> float32 [n * block_size]."""
    assert format.gguf_type is not None
    with np.errstate(all="ignore"):
        values = gguf.dequantize(raw.reshape(1, -1), gguf.GGMLQuantizationType(format.gguf_type))
    return np.asarray(values, np.float32).reshape(-1)


def assert_same_bits(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Equal as bytes, except that a NaN only has to meet a NaN."""
    assert ours.dtype == np.float32
    a, b = ours.reshape(-1), theirs.reshape(-1)
    assert a.shape == b.shape
    nan = np.isnan(b)
    assert np.array_equal(np.isnan(a), nan)
    assert np.array_equal(a.view(np.uint32)[~nan], b.view(np.uint32)[~nan])


def test_registry_agrees_with_gguf() -> None:
    """Names, type ids and block sizes are those of the gguf package; what we refuse by name exists there."""
    for format in FORMATS:
        if format.gguf_type is not None:
            kind = gguf.GGMLQuantizationType(format.gguf_type)
            assert kind.name == format.name
            assert gguf.GGML_QUANT_SIZES[kind] == (format.block_size, format.block_bytes)
    for number, name in UNSUPPORTED_GGUF_TYPES.items():
        assert gguf.GGMLQuantizationType(number).name == name
    known = {*BY_GGUF_TYPE, *UNSUPPORTED_GGUF_TYPES}
    assert {int(k) for k in gguf.GGMLQuantizationType} <= known
    assert {*KERNELS, "F32"} == set(BY_NAME)


@pytest.mark.parametrize("format", DECODED_BY_GGUF, ids=named)
@pytest.mark.parametrize("num_blocks", [1, 3, 7, 257, 70_000])
def test_random_blocks(format: Format, num_blocks: int) -> None:
    """Counts around the chunk's (65536 weights) and enough for several threads."""
    num_blocks = min(num_blocks, 1_100_000 // format.block_size)
    raw = random_blocks(format, num_blocks, seed=num_blocks)
    ours = dequantize(raw, format, (num_blocks, format.block_size))
    assert ours.shape == (num_blocks, format.block_size)
    theirs = reference(raw, format)
    if format.is_quantized:
        assert np.isfinite(theirs).all()
    assert_same_bits(ours, theirs)


@pytest.mark.parametrize("format", QUANTIZED, ids=named)
def test_any_scale_at_all(format: Format) -> None:
    """All bytes random: infinite and NaN scales come out as in the reference, without a warning."""
    raw = np.random.default_rng(1).integers(0, 256, (5000, format.block_bytes), np.uint8)
    assert_same_bits(dequantize(raw, format, (5000 * format.block_size,)), reference(raw, format))


@pytest.mark.parametrize("format", QUANTIZED, ids=named)
def test_threads_do_not_matter(format: Format) -> None:
    raw = random_blocks(format, (1 << 21) // format.block_size)
    shape = (len(raw), format.block_size)
    one, three = (dequantize(raw, format, shape, num_threads=n) for n in (1, 3))
    assert one.tobytes() == three.tobytes()


@pytest.mark.parametrize("code", ["i1", "<i2", "<i4", "<i8", "u1", "<u2", "<u4", "<u8", "<f8"])
def test_plain_numbers(code: str) -> None:
    dtype = np.dtype(code)
    name = dtype.kind.upper() + str(dtype.itemsize * 8)
    raw = np.random.default_rng(2).integers(0, 256, 64 * dtype.itemsize, np.uint8)
    with np.errstate(all="ignore"):
        assert_same_bits(dequantize(raw, BY_NAME[name], (8, 8)), raw.view(dtype).astype(np.float32))


def test_f32_is_not_copied_and_results_are_read_only() -> None:
    data = np.arange(6, dtype=np.float32).view(np.uint8)
    weights = dequantize(data, BY_NAME["F32"], (2, 3))
    assert np.shares_memory(weights, data)
    assert data.flags.writeable, "looking at an array must not freeze it"
    for result in (weights, dequantize(random_blocks(BY_NAME["Q8_0"], 2), BY_NAME["Q8_0"], (2, 32))):
        with pytest.raises(ValueError, match="read-only"):
            result[0, 0] = 1


def test_unaligned_data() -> None:
    """Tensors of a safetensors file may begin at any byte."""
    for format in (BY_NAME["F32"], BY_NAME["F16"], BY_NAME["Q4_1"]):
        raw = random_blocks(format, 64).reshape(-1)
        shifted = np.concatenate([np.zeros(1, np.uint8), raw])[1:]
        shape = (64 * format.block_size,)
        assert dequantize(shifted, format, shape).tobytes() == dequantize(raw, format, shape).tobytes()


def test_empty_and_scalar_shapes() -> None:
    assert dequantize(np.zeros(0, np.uint8), BY_NAME["F16"], (0, 4)).shape == (0, 4)
    assert dequantize(np.zeros(2, np.uint8), BY_NAME["F16"], ()).shape == ()


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(FormatError, match=r"row of 33 weights .* Q4_0.* multiple of its block of 32"):
        dequantize(np.zeros(18, np.uint8), BY_NAME["Q4_0"], (1, 33))
    with pytest.raises(FormatError, match=r"\[2, 32\] takes 36 bytes; this one has 18"):
        dequantize(np.zeros(18, np.uint8), BY_NAME["Q4_0"], (2, 32))
    with pytest.raises(FormatError, match="uint8"):
        dequantize(np.zeros(8, np.float32), BY_NAME["F32"], (8,))


@pytest.mark.parametrize("model", ["smollm2_path", "gemma_path"])
def test_every_tensor_of_the_real_models(
    model: str, request: pytest.FixtureRequest, gguf_reader: Callable[[Path], gguf.GGUFReader]
) -> None:
    """All weights of both models, read and decoded by us and by the gguf package."""
    path: Path = request.getfixturevalue(model)
    ours = open_checkpoint(path).tensors
    theirs = gguf_reader(path).tensors
    assert list(ours) == [t.name for t in theirs]
    for t in theirs:
        tensor = ours[t.name]
        assert tensor.format.name == t.tensor_type.name
        assert tensor.shape == tuple(int(d) for d in reversed(t.shape))
        assert tensor.nbytes == t.n_bytes
        rows = np.asarray(t.data)
        values = tensor.dequantize()
        assert values.shape == tensor.shape
        # In slices: the reference takes several times the memory of its result.
        for start in range(0, len(rows), 65536):
            part = slice(start, start + 65536)
            expected = np.asarray(gguf.dequantize(rows[part], t.tensor_type))
            assert values[part].tobytes() == expected.tobytes(), (t.name, start)
