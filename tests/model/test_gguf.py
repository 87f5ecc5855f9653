"""The GGUF reader: what another implementation wrote reads back; no broken file does worse than an error."""

from __future__ import annotations

import random
import struct
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from headrace.models.loaders.checkpoint import CheckpointError, open_checkpoint
from headrace.models.loaders.gguf import read_gguf

RNG = np.random.default_rng(0)
MATRIX = RNG.standard_normal((3, 64)).astype(np.float32)
CUBE = RNG.standard_normal((2, 3, 32)).astype(np.float16)


def write(path: Path, *, alignment: int | None = None) -> Path:
    """A small file with every kind of value, by the gguf package's writer."""
    w = gguf.GGUFWriter(path, "llama")
    if alignment:
        w.add_custom_alignment(alignment)
    w.add_uint8("u8", 255)
    w.add_int8("i8", -128)
    w.add_uint16("u16", 65535)
    w.add_int16("i16", -32768)
    w.add_uint32("u32", 2**32 - 1)
    w.add_int32("i32", -(2**31))
    w.add_uint64("u64", 2**64 - 1)
    w.add_int64("i64", -(2**63))
    w.add_float32("f32", 0.1)
    w.add_float64("f64", 0.1)
    w.add_bool("yes", True)
    w.add_bool("no", False)
    w.add_string("text", "naïve ↯")
    w.add_array("tokens", ["<s>", "", "é", "a\nb\0c", "x" * 300])
    w.add_array("ints", [1, -2, 3])
    w.add_array("floats", [0.5, -1.25])
    w.add_array("bools", [True, False])
    w.add_array("nested", [[1, 2], [3]])
    w.add_tensor("blk.0.weight", MATRIX)
    w.add_tensor("cube", CUBE)
    w.add_tensor(
        "quantized",
        gguf.quantize(MATRIX, gguf.GGMLQuantizationType.Q4_1),
        raw_dtype=gguf.GGMLQuantizationType.Q4_1,
    )
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


@pytest.mark.parametrize("alignment", [None, 8, 4096])
def test_reads_what_gguf_writes(tmp_path: Path, alignment: int | None) -> None:
    checkpoint = open_checkpoint(write(tmp_path / "small.gguf", alignment=alignment))
    assert (checkpoint.kind, checkpoint.architecture) == ("gguf", "llama")
    expected: dict[str, Any] = {
        "u8": 255, "i8": -128, "u16": 65535, "i16": -32768, "u32": 2**32 - 1, "i32": -(2**31),
        "u64": 2**64 - 1, "i64": -(2**63), "f32": float(np.float32(0.1)), "f64": 0.1,
        "yes": True, "no": False,
        "text": "naïve ↯", "tokens": ["<s>", "", "é", "a\nb\0c", "x" * 300], "ints": [1, -2, 3],
        "floats": [0.5, -1.25], "bools": [True, False], "nested": [[1, 2], [3]],
    }  # fmt: skip
    for key, value in expected.items():
        assert checkpoint.config[key] == value, key
        assert type(checkpoint.config[key]) is type(value), key
    assert list(checkpoint.tensors) == ["blk.0.weight", "cube", "quantized"]
    assert checkpoint.tensors["blk.0.weight"].dequantize().tobytes() == MATRIX.tobytes()
    cube = checkpoint.tensors["cube"]
    assert (cube.shape, cube.format.name, cube.data.shape) == ((2, 3, 32), "F16", (2, 3, 64))
    assert np.array_equal(cube.dequantize(), CUBE.astype(np.float32))
    assert checkpoint.tensors["quantized"].data.shape == (3, 40)
    assert checkpoint.num_parameters == 192 + 192 + 192
    assert checkpoint.num_bytes == 768 + 384 + 120


def test_version_2_reads(tmp_path: Path) -> None:
    path = write(tmp_path / "v2.gguf")
    raw = bytearray(path.read_bytes())
    raw[4:8] = struct.pack("<I", 2)
    path.write_bytes(raw)
    assert read_gguf(path).metadata["text"] == "naïve ↯"


@pytest.mark.parametrize("model", ["smollm2_path", "gemma_path"])
def test_real_metadata_agrees_with_gguf(
    model: str, request: pytest.FixtureRequest, gguf_reader: Callable[[Path], gguf.GGUFReader]
) -> None:
    """Every key of the real models, vocabularies included (every 97th item: the package takes its time)."""
    path: Path = request.getfixturevalue(model)
    config = open_checkpoint(path).config
    fields = {k: f for k, f in gguf_reader(path).fields.items() if not k.startswith("GGUF.")}
    assert config.keys() == fields.keys()
    for key, field in fields.items():
        value = config[key]
        if isinstance(value, list):
            assert len(value) == len(field.data), key
            assert value[::97] == field.contents(slice(None, None, 97)), key
        else:
            assert value == field.contents(), key


def test_a_vocabulary_of_49_thousand_reads_fast(smollm2_path: Path) -> None:
    """Start-up is a promise: the header of the default model in 0.15 s (about 0.04 on an idle core)."""
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        read_gguf(smollm2_path)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.15, seconds


# ---- digest


def test_digest_follows_the_content(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf")
    digest = open_checkpoint(path).digest()
    (tmp_path / "elsewhere").mkdir()
    assert open_checkpoint(write(tmp_path / "elsewhere" / "b.gguf")).digest() == digest
    raw = path.read_bytes()
    for change in (raw[:-30] + b"\1" + raw[-29:], raw.replace(b"na\xc3\xafve", b"native"), raw + b"\0"):
        path.write_bytes(change)
        assert open_checkpoint(path).digest() != digest


# ---- split models


def write_split(folder: Path, **changes: Any) -> list[Path]:
    """Two files as llama.cpp's gguf-split makes them; `changes` break the keys of the second."""
    paths = []
    for number in range(2):
        path = folder / f"m-{number + 1:05}-of-00002.gguf"
        w = gguf.GGUFWriter(path, "llama")
        keys = {"no": number, "count": 2, "tensors": 2} | (changes if number else {})
        w.add_uint16("split.no", keys["no"])
        w.add_uint16("split.count", keys["count"])
        w.add_int32("split.tensors.count", keys["tensors"])
        if number == 0:
            w.add_string("general.name", "both")
        w.add_tensor(changes.get("name", f"t{number}") if number else "t0", MATRIX + number)
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.write_tensors_to_file()
        w.close()
        paths.append(path)
    return paths


def test_split_model(tmp_path: Path) -> None:
    """Any of its files, or the folder, opens the whole."""
    paths = write_split(tmp_path)
    for path in (*paths, tmp_path):
        checkpoint = open_checkpoint(path)
        assert checkpoint.files == tuple(paths)
        assert checkpoint.config["general.name"] == "both"
        for number in range(2):
            assert np.array_equal(checkpoint.tensors[f"t{number}"].dequantize(), MATRIX + number)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"no": 5}, "split.no is 5 but its file name says 1"),
        ({"count": 3}, "split.count is 3 but its file name says 2"),
        ({"name": "t0"}, "'t0' is also in an earlier file"),
    ],
)
def test_split_files_that_do_not_belong_together(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    paths = write_split(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=says):
        read_gguf(paths[0])


def test_split_model_with_a_file_missing(tmp_path: Path) -> None:
    first, second = write_split(tmp_path)
    second.unlink()
    with pytest.raises(CheckpointError, match=r"1 are missing, first m-00002-of-00002\.gguf: put all"):
        read_gguf(first)
    alone = first.rename(tmp_path / "renamed.gguf")
    with pytest.raises(CheckpointError, match="one of 2 files of a split model"):
        read_gguf(alone)


# ---- broken files


class Header:
    """A hand-made GGUF file: what a writer would not write."""

    def __init__(self, version: int = 3, num_tensors: int = 0, num_keys: int = 0, order: str = "<") -> None:
        self.raw = b"GGUF" + struct.pack(f"{order}IQQ", version, num_tensors, num_keys)

    def string(self, text: bytes) -> Header:
        self.raw += struct.pack("<Q", len(text)) + text
        return self

    def pack(self, code: str, *values: Any) -> Header:
        self.raw += struct.pack("<" + code, *values)
        return self

    def key(self, name: bytes, kind: int, code: str, *values: Any) -> Header:
        return self.string(name).pack("I", kind).pack(code, *values)

    def tensor(self, name: bytes, dims: list[int], kind: int = 0, offset: int = 0) -> Header:
        return self.string(name).pack(f"I{len(dims)}QIQ", len(dims), *dims, kind, offset)

    def data(self, num_bytes: int) -> Header:
        self.raw += bytes(-len(self.raw) % 32 + num_bytes)
        return self


BIG = 2**64 - 1
one_key = partial(Header, num_keys=1)
one_tensor = partial(Header, num_tensors=1)
two_tensors = partial(Header, num_tensors=2)
BROKEN = {
    "empty": (b"", "is empty"),
    "magic": (b"GGML" + bytes(60), "b'GGML' where b'GGUF' should be"),
    "version 1": (Header(version=1), "GGUF version 1: versions 2 and 3 are read"),
    "version 4": (Header(version=4), "GGUF version 4"),
    "big-endian": (Header(order=">"), "big-endian GGUF is not read"),
    "preamble cut": (Header().raw[:20], "number of metadata keys: needs 8 bytes, the file has 4 left"),
    "tensor count": (Header(num_tensors=BIG), f"number of tensors: {BIG} do not fit"),
    "key count": (Header(num_keys=2**40), "number of metadata keys"),
    "key length": (one_key().pack("Q", BIG).data(64), f"a string of {BIG} bytes"),
    "key not UTF-8": (one_key().key(b"\xff\xfe", 0, "B", 1), "is not UTF-8"),
    "key twice": (Header(num_keys=2).key(b"a", 0, "B", 1).key(b"a", 0, "B", 1), "key 'a' appears twice"),
    "value type": (one_key().key(b"a", 13, "B", 1), "unknown value type 13"),
    "bool": (one_key().key(b"a", 7, "B", 2), "a: 2 is neither true"),
    "bool array": (one_key().key(b"a", 9, "IQBB", 7, 2, 1, 9), "9 is neither true"),
    "string length": (one_key().key(b"a", 8, "Q", 1000), "a: needs 1000 bytes, the file has 0 left"),
    "array count": (one_key().key(b"a", 9, "IQ", 6, 2**61), f"a: {2**61} do not fit"),
    "array of strings count": (one_key().key(b"a", 9, "IQ", 8, 2**40), "do not fit"),
    "array of nothing": (one_key().key(b"a", 9, "IQ", 99, 1).data(8), "unknown item type 99"),
    "string in array": (
        one_key().key(b"a", 9, "IQ", 8, 2).string(b"ok").pack("Q", BIG),
        r"a\[1\]: the string ends past the end of the file",
    ),
    "token not UTF-8": (
        one_key().key(b"toks", 9, "IQ", 8, 2).string(b"ok").string(b"\xc3"),
        r"toks\[1\]: b'\\xc3' is not UTF-8",
    ),
    "deep arrays": (one_key().key(b"a", 9, "IQ" * 9, *[9, 1] * 9).data(8), "nested more than 4 deep"),
    "alignment 0": (one_key().key(b"general.alignment", 4, "I", 0), "general.alignment: 0"),
    "alignment 24": (one_key().key(b"general.alignment", 4, "I", 24), "must be a power of two"),
    "alignment text": (one_key().key(b"general.alignment", 8, "Q", 0), "general.alignment: ''"),
    "no dimensions": (one_tensor().tensor(b"t", []).data(32), "0 dimensions: 1 to 4"),
    "5 dimensions": (one_tensor().tensor(b"t", [1] * 5).data(32), "5 dimensions"),
    "many dimensions": (one_tensor().string(b"t").pack("I", 2**32 - 1).data(32), "4294967295 dimensions"),
    "empty dimension": (one_tensor().tensor(b"t", [4, 0]).data(32), r"dimensions \[4, 0\]"),
    "overflow": (one_tensor().tensor(b"t", [2**32, 2**32, 2**32]).data(32), "dimensions"),
    "tensor type": (one_tensor().tensor(b"t", [4], kind=77).data(32), "unknown tensor type 77"),
    "refused type": (one_tensor().tensor(b"t", [256], kind=10).data(99), "stored as Q2_K, .* Q4_K, Q5_K"),
    "removed type": (one_tensor().tensor(b"t", [32], kind=4).data(99), "unknown tensor type 4"),
    "row of 33": (one_tensor().tensor(b"t", [33], kind=2).data(99), "multiple of its block of 32"),
    "offset unaligned": (one_tensor().tensor(b"t", [4], offset=4).data(99), "multiple of the alignment 32"),
    "offset outside": (one_tensor().tensor(b"t", [4], offset=2**63).data(32), "ends at byte 92233"),
    "data cut": (one_tensor().tensor(b"t", [9]).data(32), "its data ends at byte 36 of 32 in the file"),
    "no data": (one_tensor().tensor(b"t", [1]), "data: starts at byte .* past the end"),
    "name twice": (two_tensors().tensor(b"t", [4]).tensor(b"t", [4], offset=32).data(64), "appears twice"),
    "overlap": (
        two_tensors().tensor(b"a", [16]).tensor(b"b", [4], offset=32).data(64),
        "overlaps that of 'a'",
    ),
    "no architecture": (Header().data(0), "general.architecture is None"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_say_what_is_wrong(name: str, tmp_path: Path) -> None:
    content, says = BROKEN[name]
    path = tmp_path / "broken.gguf"
    path.write_bytes(content if isinstance(content, bytes) else content.raw)
    with pytest.raises(CheckpointError, match=says) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(tmp_path / "none.gguf")
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"neither a \.gguf file nor a folder"):
        open_checkpoint(tmp_path / "weights.bin")
    for name in ("a.gguf", "b.gguf"):
        write(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"2 GGUF models \(a.gguf, b.gguf\): give the path of one"):
        open_checkpoint(tmp_path)


INTERESTING = (0, 1, 2, 7, 8, 9, 31, 255, 256, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, BIG)


def mutate(raw: bytes, header_bytes: int, rng: random.Random) -> bytes:
    """One to three wounds, nearly all of them in the header."""
    out = bytearray(raw)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(header_bytes)
        match rng.randrange(7):
            case 0:  # a flipped bit
                out[at] ^= 1 << rng.randrange(8)
            case 1:  # a field of 8 bytes: counts, lengths, dimensions, offsets
                out[at : at + 8] = struct.pack("<Q", rng.choice(INTERESTING))
            case 2:  # a field of 4: types, numbers of dimensions
                out[at : at + 4] = struct.pack("<I", rng.choice(INTERESTING) & 0xFFFFFFFF)
            case 3:  # cut short
                del out[rng.randrange(len(out)) :]
            case 4:  # bytes lost: everything after is out of step
                del out[at : at + rng.randint(1, 16)]
            case 5:  # bytes repeated
                out[at:at] = out[at : at + rng.randint(1, 64)]
            case 6:  # noise
                out[at : at + 16] = rng.randbytes(16)
        if len(out) < header_bytes:
            break
    return bytes(out)


def test_500_wounded_files(tmp_path: Path) -> None:
    """Each is refused by name or reads as something consistent; none costs memory or another exception."""
    raw = write(tmp_path / "whole.gguf").read_bytes()
    header_bytes = read_gguf(tmp_path / "whole.gguf").files[0].header_bytes
    path = tmp_path / "wounded.gguf"
    num_refused = 0
    tracemalloc.start()
    try:
        for seed in range(500):
            path.unlink(missing_ok=True)  # a new file: the old one may still be mapped
            path.write_bytes(mutate(raw, header_bytes, random.Random(seed)))
            tracemalloc.reset_peak()
            try:
                contents = read_gguf(path)
                for tensor in contents.tensors.values():
                    assert tensor.dequantize().shape == tensor.shape
            except CheckpointError:
                num_refused += 1
            assert tracemalloc.get_traced_memory()[1] < 100e6, seed
    finally:
        tracemalloc.stop()
    assert 250 < num_refused < 500, num_refused
