"""Reader of Hugging Face model folders: config.json and safetensors weights, single or sharded.

A safetensors file is

    | header length u64 | header: JSON, padded with spaces | data |

where the header maps each tensor name to {"dtype", "shape", "data_offsets": [begin, end)} with offsets into
the data, which the tensors fill without gaps. Source: the safetensors format description (safetensors,
README).

Only files that are data are read: pickled weights (pytorch_model.bin) would run code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from headrace.models.loaders.stored import MAX_DIMS, CheckpointError, MappedFile, StoredTensor
from headrace.models.quantization.formats import BY_NAME, Format

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the bound of the safetensors library
MAX_JSON_BYTES = 256 << 20

# Beside the weights: parsed here, or left as a path for who has a parser for it.
PARSED_EXTRAS = ("tokenizer_config.json", "special_tokens_map.json")
PATH_EXTRAS = ("tokenizer.json", "tokenizer.model", "chat_template.jinja")

DTYPES: dict[str, Format] = {
    name: BY_NAME[name]
    for name in ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL")
}


@dataclass(frozen=True, slots=True)
class FolderContents:
    """config, generation_config: the parsed files ({} without the second); tensors: by the names in the
    files.

    extra: those of PARSED_EXTRAS (as dicts) and PATH_EXTRAS (as paths) that exist, by file name.
    """

    config: Mapping[str, object]
    generation_config: Mapping[str, object]
    extra: Mapping[str, object]
    tensors: Mapping[str, StoredTensor]
    files: tuple[MappedFile, ...]


def read_folder(folder: Path) -> FolderContents:
    """Read a model folder. Raises CheckpointError when a file is missing or anything in it is unsound."""
    config = _json_object(folder / "config.json")
    generation = folder / "generation_config.json"
    extra: dict[str, object] = {
        name: _json_object(folder / name) for name in PARSED_EXTRAS if (folder / name).is_file()
    }
    extra.update({name: folder / name for name in PATH_EXTRAS if (folder / name).is_file()})
    tensors, files = _read_weights(folder)
    return FolderContents(
        config=config,
        generation_config=_json_object(generation) if generation.is_file() else {},
        extra=extra,
        tensors=tensors,
        files=files,
    )


def _read_weights(folder: Path) -> tuple[dict[str, StoredTensor], tuple[MappedFile, ...]]:
    if (folder / WEIGHTS).is_file():
        tensors, file = read_safetensors(folder / WEIGHTS)
        return tensors, (file,)
    if (folder / INDEX).is_file():
        return _read_shards(folder)
    other = sorted(p.name for p in folder.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    found = f"; {other[0]} is a pickle, which can run code and is not read" if other else ""
    raise CheckpointError(
        f"{folder} has neither {WEIGHTS} nor {INDEX}{found}: get the model's safetensors files, or a GGUF file"
    )


def _read_shards(folder: Path) -> tuple[dict[str, StoredTensor], tuple[MappedFile, ...]]:
    index = folder / INDEX
    weight_map = _json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f'{index}: "weight_map" is missing or not an object: fetch the model again')
    for name, shard in weight_map.items():
        # The index comes with the model: it must not lead out of the folder.
        if not isinstance(shard, str) or "\0" in shard or Path(shard).name != shard or "\\" in shard:
            raise CheckpointError(
                f"{index}: tensor {name!r} is said to be in {shard!r}: that must be the name of a file in the folder"
            )
    tensors: dict[str, StoredTensor] = {}
    files: list[MappedFile] = []
    for shard in sorted(set(weight_map.values())):
        held, file = read_safetensors(folder / shard)
        files.append(file)
        for name in held:
            if weight_map.get(name) != shard:
                raise CheckpointError(
                    f"{file.path} holds tensor {name!r}, which {INDEX} places in {weight_map.get(name)!r}: "
                    "the files do not belong together, fetch the model again"
                )
        tensors.update(held)
    if missing := weight_map.keys() - tensors.keys():
        name = min(missing)
        raise CheckpointError(
            f"{index}: tensor {name!r} is not in {weight_map[name]} ({len(missing)} missing in all): "
            "the files do not belong together, fetch the model again"
        )
    return tensors, tuple(files)


def read_safetensors(path: Path) -> tuple[dict[str, StoredTensor], MappedFile]:
    """Read one safetensors file without copying its data: tensors by name in file order, and the mapping.

    Raises CheckpointError.
    """
    file = MappedFile.open(path)
    if file.num_bytes < 8:
        raise CheckpointError(f"{path}: {file.num_bytes} bytes are not a safetensors file: fetch it again")
    length = int.from_bytes(file.buffer[:8], "little")
    if length > min(MAX_HEADER_BYTES, file.num_bytes - 8):
        raise CheckpointError(
            f"{path}: its header claims {length} bytes, the file has {file.num_bytes - 8} "
            f"(and {MAX_HEADER_BYTES} are the limit): cut short or not safetensors, fetch it again"
        )
    data_start = 8 + length
    file = replace(file, header_bytes=data_start)
    header = _parse_object(path, file.buffer[8:data_start])
    header.pop("__metadata__", None)

    num_data = file.num_bytes - data_start
    tensors: dict[str, StoredTensor] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        format, shape, begin, end = _check_entry(path, name, entry, num_data)
        spans.append((begin, end, name))
        data = file.window(data_start + begin, end - begin).reshape(format.data_shape(shape))
        tensors[name] = StoredTensor(name, shape, format, data)

    at = 0
    for begin, end, name in sorted(spans):
        if begin != at:
            raise CheckpointError(
                f"{path}: tensor {name!r} begins at data byte {begin} where {at} was expected "
                "(tensors neither overlap nor leave gaps): the file is damaged, fetch it again"
            )
        at = end
    if at != num_data:
        raise CheckpointError(f"{path}: {num_data - at} bytes after the last tensor: damaged, fetch it again")
    return {name: tensors[name] for _, _, name in sorted(spans)}, file


def _check_entry(path: Path, name: str, entry: Any, num_data: int) -> tuple[Format, tuple[int, ...], int, int]:
    """Format, shape, begin and end of one line of the header. Raises CheckpointError."""

    def refuse(what: str, remedy: str = "the file is damaged, fetch it again") -> CheckpointError:
        return CheckpointError(f"{path}: tensor {name!r}: {what}: {remedy}")

    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise refuse(f"{str(entry)[:80]!r} is not a dtype, a shape and data_offsets")
    dtype = entry["dtype"]
    format = DTYPES.get(dtype) if isinstance(dtype, str) else None
    if format is None:
        raise refuse(
            f"stored as {str(dtype)[:40]}, which is not supported",
            "get the model in BF16, F16 or F32, or as GGUF",
        )
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _are_counts(shape) or len(shape) > MAX_DIMS or prod(shape) >= 1 << 63:
        raise refuse(f"shape {str(shape)[:80]} is not a list of at most {MAX_DIMS} sizes")
    if not _are_counts(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= num_data:
        raise refuse(f"data_offsets {str(offsets)[:80]} do not lie in the {num_data} bytes of data")
    begin, end = offsets
    if end - begin != format.num_bytes(shape):
        raise refuse(f"{end - begin} bytes of data where {dtype} {shape} takes {format.num_bytes(shape)}")
    return format, tuple(shape), begin, end


def _are_counts(value: Any) -> bool:
    """Whether this is a list of non-negative integers (JSON's true is not one)."""
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 1 << 63 for v in value)


def _json_object(path: Path) -> dict[str, Any]:
    try:
        if (size := path.stat().st_size) > MAX_JSON_BYTES:
            raise CheckpointError(f"{path} has {size} bytes; at most {MAX_JSON_BYTES} are read")
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"cannot read {path}: {error.strerror or error}: a model folder holds config.json and safetensors files"
        ) from error
    return _parse_object(path, raw)


def _parse_object(path: Path, raw: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a key appears twice in one object")
        return found

    try:
        value = json.loads(raw.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, numbers or nesting without end
        raise CheckpointError(f"{path}: its JSON cannot be read ({error}): fetch it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: its JSON is a {type(value).__name__} where an object belongs: fetch it again")
    return value
