"""Reader of GGUF files, versions 2 and 3, single or split.

    | magic "GGUF" | version u32 | num_tensors u64 | num_keys u64 |
    | num_keys    x (key string, value type u32, value)                                        |
    | num_tensors x (name string, num_dims u32, dims u64 each, fastest first, type u32, offset u64) |
    | padding to `general.alignment` | tensor data; offsets count from here                     |

A string is a u64 length and that many bytes of UTF-8. An array is (item type u32, count u64, items).
Everything is little-endian. Source: the GGUF specification (ggml, docs/gguf.md).
"""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from headrace.models.loaders.stored import CheckpointError, MappedFile, StoredTensor
from headrace.models.quantization.formats import (
    BY_GGUF_TYPE,
    BY_NAME,
    UNSUPPORTED_GGUF_TYPES,
    Format,
    FormatError,
)

# What a sane file stays under. The file's size bounds everything too, but a weight file of 100 GB could still
# claim an array of 100 billion items.
MAX_DIMS = 4
MAX_KEY_BYTES = 65535
MAX_NAME_BYTES = 255
MAX_STRING_BYTES = 256 << 20  # a whole tokenizer.json may be one string
MAX_ARRAY_ITEMS = 1 << 24
MAX_ARRAY_BYTES = 1 << 30  # of all strings of one array
MAX_ARRAY_DEPTH = 4
MAX_TENSORS = 1 << 20
MAX_FILES = 1000
DEFAULT_ALIGNMENT = 32

STRING, ARRAY, BOOL = 8, 9, 7
NUMBER_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
NUMBERS = {kind: struct.Struct("<" + code) for kind, code in NUMBER_CODES.items()}
U32, U64 = NUMBERS[4], NUMBERS[10]
SMALLEST_TENSOR_ENTRY = 8 + 4 + 8 + 4 + 8  # empty name, one dimension
SMALLEST_KEY_ENTRY = 8 + 4 + 1

SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True, slots=True)
class GgufContents:
    """metadata: every key with its value as plain Python; tensors: by the names in the file, in its order."""

    metadata: Mapping[str, object]
    tensors: Mapping[str, StoredTensor]
    files: tuple[MappedFile, ...]


def read_gguf(path: Path) -> GgufContents:
    """Read a GGUF file, or all files of a split model given any one of them.

    Raises CheckpointError for anything that is not a sound GGUF v2 or v3 file of a type we decode.
    """
    parts = [_read_file(p) for p in _split_paths(path)]
    first = parts[0]
    if len(parts) == 1:
        count = first.metadata.get("split.count", 1)
        if isinstance(count, int) and count > 1:
            raise CheckpointError(
                f"{path} is one of {count} files of a split model: give it back its name ending in "
                f"-00001-of-{count:05}.gguf and put the others beside it"
            )
        return first

    tensors: dict[str, StoredTensor] = {}
    for number, part in enumerate(parts):
        where = part.files[0].path
        for key, expected in (("split.no", number), ("split.count", len(parts))):
            if part.metadata.get(key) != expected:
                raise CheckpointError(
                    f"{where}: {key} is {part.metadata.get(key)!r} but its file name says {expected}: "
                    "fetch the files of the split model again"
                )
        if twice := tensors.keys() & part.tensors.keys():
            raise CheckpointError(
                f"{where}: tensor {min(twice)!r} is also in an earlier file of the split: fetch them again"
            )
        tensors.update(part.tensors)
    total = first.metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise CheckpointError(
            f"{path}: the {len(parts)} files hold {len(tensors)} tensors, split.tensors.count says {total}: "
            "fetch the files of the split model again"
        )
    return GgufContents(first.metadata, tensors, tuple(file for part in parts for file in part.files))


def _split_paths(path: Path) -> list[Path]:
    """All files of a split model in order, or just `path`."""
    match = SPLIT_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count <= MAX_FILES:
        raise CheckpointError(f"{path}: not a sensible part number; a split model has 1 to {MAX_FILES} files")
    paths = [path.with_name(f"{match['stem']}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    if missing := [p.name for p in paths if not p.exists()]:
        raise CheckpointError(
            f"{path} belongs to a model split into {count} files; {len(missing)} are missing, "
            f"first {missing[0]}: put all of them into one folder"
        )
    return paths


def _read_file(path: Path) -> GgufContents:
    if sys.byteorder != "little":
        raise CheckpointError(f"{path}: GGUF files are read in place, which needs a little-endian machine")
    file = MappedFile.open(path)
    cursor = _Cursor(file)
    num_tensors, num_keys = _read_preamble(cursor)
    metadata = _read_metadata(cursor, num_keys)
    alignment = _alignment(cursor, metadata)
    entries = _read_directory(cursor, num_tensors, alignment)
    data_start = -(-cursor.at // alignment) * alignment
    if entries and data_start > file.num_bytes:
        raise cursor.error("data", f"starts at byte {data_start}, past the end of the file", "fetch the file again")
    file = replace(file, header_bytes=min(data_start, file.num_bytes))
    _check_places(cursor, entries, data_start)
    tensors = {
        e.name: StoredTensor(
            e.name,
            e.shape,
            e.format,
            file.window(data_start + e.offset, e.num_bytes).reshape(e.format.data_shape(e.shape)),
        )
        for e in entries
    }
    return GgufContents(metadata, tensors, (file,))


@dataclass(frozen=True, slots=True)
class _Entry:
    """One line of the tensor directory; `offset` counts from the start of the data."""

    name: str
    shape: tuple[int, ...]
    format: Format
    offset: int
    num_bytes: int


class _Cursor:
    """A place in the header. Every read is checked against the end of the file first."""

    def __init__(self, file: MappedFile) -> None:
        self.path = file.path
        self.buffer = file.buffer
        self.size = file.num_bytes
        self.at = 0

    def error(self, what: str, value: str, remedy: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what}: {value}: {remedy} (near byte {self.at})")

    def need(self, num_bytes: int, what: str) -> None:
        if num_bytes > self.size - self.at:
            raise self.error(
                what,
                f"needs {num_bytes} bytes, the file has {self.size - self.at} left",
                "the file is cut short or damaged, fetch it again",
            )

    def number(self, kind: struct.Struct, what: str) -> Any:
        self.need(kind.size, what)
        (value,) = kind.unpack_from(self.buffer, self.at)
        self.at += kind.size
        return value

    def string(self, what: str, max_bytes: int) -> str:
        length = self.number(U64, what)
        if length > max_bytes:
            raise self.error(what, f"a string of {length} bytes", f"at most {max_bytes} are allowed here")
        self.need(length, what)
        raw = self.buffer[self.at : self.at + length]
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            raise self.error(what, f"{raw[:40]!r} is not UTF-8", "fetch or convert the file again") from error
        self.at += length
        return text

    def count(self, what: str, smallest: int, limit: int) -> int:
        """A number of things that follow, each of at least `smallest` bytes."""
        count: int = self.number(U64, what)
        if count > limit or count * smallest > self.size - self.at:
            raise self.error(
                what,
                f"{count} do not fit in the {self.size - self.at} bytes left (the limit is {limit})",
                "the file is cut short or damaged, fetch it again",
            )
        return count

    def value(self, kind: int, what: str, depth: int = 0) -> object:
        if kind == STRING:
            return self.string(what, MAX_STRING_BYTES)
        if kind == BOOL:
            return self.boolean(what)
        if kind in NUMBERS:
            return self.number(NUMBERS[kind], what)
        if kind == ARRAY:
            return self.array(what, depth)
        raise self.error(what, f"unknown value type {kind}", "the file is damaged or newer than GGUF version 3")

    def boolean(self, what: str) -> bool:
        # Not struct's "?": that reads any non-zero byte as True, and then a damaged file reads as a sound
        # one.
        byte = self.number(NUMBERS[0], what)
        if byte > 1:
            raise self.error(what, f"{byte} is neither true (1) nor false (0)", "the file is damaged, fetch it again")
        return bool(byte)

    def array(self, what: str, depth: int) -> list[object]:
        kind = self.number(U32, what)
        if kind == STRING:
            return self.strings(self.count(what, 8, MAX_ARRAY_ITEMS), what)
        if kind == ARRAY:
            if depth == MAX_ARRAY_DEPTH:
                raise self.error(what, f"arrays nested more than {MAX_ARRAY_DEPTH} deep", "the file is damaged")
            count = self.count(what, 4 + 8, MAX_ARRAY_ITEMS)
            return [self.array(what, depth + 1) for _ in range(count)]
        if kind not in NUMBERS:
            raise self.error(what, f"unknown item type {kind}", "the file is damaged or newer than GGUF version 3")
        count = self.count(what, NUMBERS[kind].size, MAX_ARRAY_ITEMS)
        dtype = "u1" if kind == BOOL else "<" + np.dtype(NUMBER_CODES[kind]).str[1:]
        items = np.frombuffer(self.buffer, dtype, count, self.at)
        if kind == BOOL:
            if count and items.max() > 1:
                raise self.error(what, f"{items.max()} is neither true (1) nor false (0)", "the file is damaged")
            items = items.astype(bool)
        self.at += count * NUMBERS[kind].size
        return items.tolist()

    def strings(self, count: int, what: str) -> list[object]:
        """The vocabulary and merges of a tokenizer come through here: about 0.3 us per string.

        The same checks as `string`, with the attribute look-ups and calls taken out of the loop.
        """
        buffer, at = self.buffer, self.at
        limit = min(self.size, at + MAX_ARRAY_BYTES)
        length_at: Callable[..., tuple[int]] = U64.unpack_from
        texts: list[object] = []
        append = texts.append
        try:
            for _ in range(count):
                (length,) = length_at(buffer, at)
                at += 8
                end = at + length
                if end > limit:
                    break
                append(buffer[at:end].decode())
                at = end
        except struct.error:
            pass  # the length itself is past the end: told below like a string that is
        except UnicodeDecodeError as error:
            self.at = at
            raise self.error(
                f"{what}[{len(texts)}]",
                f"{error.object[:40]!r} is not UTF-8",
                "fetch or convert the file again",
            ) from error
        self.at = at
        if len(texts) < count:
            raise self.error(
                f"{what}[{len(texts)}]",
                f"the string ends past the end of the file, or the array has over {MAX_ARRAY_BYTES} bytes",
                "the file is cut short or damaged, fetch it again",
            )
        return texts


def _read_preamble(cursor: _Cursor) -> tuple[int, int]:
    """Magic, version and the two counts: (num_tensors, num_keys)."""
    magic = cursor.buffer[:4]
    if magic != b"GGUF":
        raise cursor.error("magic", f"{magic!r} where b'GGUF' should be", "this is not a GGUF file")
    cursor.at = 4
    version = cursor.number(U32, "version")
    if version & 0xFFFF == 0 and version:
        raise cursor.error(
            "version",
            f"{version:#010x} has its bytes reversed",
            "big-endian GGUF is not read; convert it again",
        )
    if version not in (2, 3):
        raise cursor.error(
            "version",
            f"GGUF version {version}",
            "versions 2 and 3 are read; convert the model again with current tools",
        )
    num_tensors = cursor.count("number of tensors", SMALLEST_TENSOR_ENTRY, MAX_TENSORS)
    num_keys = cursor.count("number of metadata keys", SMALLEST_KEY_ENTRY, MAX_ARRAY_ITEMS)
    return num_tensors, num_keys


def _read_metadata(cursor: _Cursor, num_keys: int) -> dict[str, object]:
    metadata: dict[str, object] = {}
    for i in range(num_keys):
        key = cursor.string(f"metadata key {i}", MAX_KEY_BYTES)
        if key in metadata:
            raise cursor.error("metadata", f"key {key!r} appears twice", "the file is damaged, fetch it again")
        metadata[key] = cursor.value(cursor.number(U32, key), key)
    return metadata


def _alignment(cursor: _Cursor, metadata: Mapping[str, object]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= 1 << 30 or alignment & (alignment - 1):
        raise cursor.error("general.alignment", repr(alignment)[:40], "it must be a power of two, usually 32")
    return alignment


def _read_directory(cursor: _Cursor, num_tensors: int, alignment: int) -> list[_Entry]:
    entries: dict[str, _Entry] = {}
    for i in range(num_tensors):
        name = cursor.string(f"name of tensor {i}", MAX_NAME_BYTES)
        what = f"tensor {name!r}"
        if name in entries:
            raise cursor.error(what, "appears twice", "the file is damaged, fetch it again")
        num_dims = cursor.number(U32, what)
        if not 1 <= num_dims <= MAX_DIMS:
            raise cursor.error(what, f"{num_dims} dimensions", f"1 to {MAX_DIMS} are allowed; the file is damaged")
        dims = [cursor.number(U64, what) for _ in range(num_dims)]
        if 0 in dims or prod(dims) >= 1 << 63:
            raise cursor.error(what, f"dimensions {dims}", "each must be at least 1; the file is damaged")
        format = _format(cursor, what, cursor.number(U32, what))
        offset = cursor.number(U64, what)
        if offset % alignment:
            raise cursor.error(what, f"offset {offset}", f"it must be a multiple of the alignment {alignment}")
        shape = tuple(reversed(dims))
        try:
            num_bytes = format.num_bytes(shape)
        except FormatError as error:
            raise cursor.error(what, str(error), "the file is damaged, fetch or convert it again") from error
        entries[name] = _Entry(name, shape, format, offset, num_bytes)
    return list(entries.values())


def _format(cursor: _Cursor, what: str, gguf_type: int) -> Format:
    if format := BY_GGUF_TYPE.get(gguf_type):
        return format
    if name := UNSUPPORTED_GGUF_TYPES.get(gguf_type):
        supported = ", ".join(f.name for f in BY_NAME.values() if f.is_quantized)
        raise cursor.error(
            what,
            f"stored as {name}, which is not supported",
            f"get the model in F32, F16, BF16 or one of {supported}",
        )
    raise cursor.error(what, f"unknown tensor type {gguf_type}", "the file is damaged or made by newer tools")


def _check_places(cursor: _Cursor, entries: list[_Entry], data_start: int) -> None:
    """Every tensor lies inside the file and on its own bytes. Raises CheckpointError."""
    available = cursor.size - data_start
    end, before = 0, ""
    for e in sorted(entries, key=lambda e: e.offset):
        if e.offset > available or e.num_bytes > available - e.offset:
            raise cursor.error(
                f"tensor {e.name!r}",
                f"its data ends at byte {e.offset + e.num_bytes} of {max(available, 0)} in the file",
                "the file is cut short or damaged, fetch it again",
            )
        if e.offset < end:
            raise cursor.error(
                f"tensor {e.name!r}",
                f"its data overlaps that of {before!r}",
                "the file is damaged, fetch it again",
            )
        end, before = e.offset + e.num_bytes, e.name
