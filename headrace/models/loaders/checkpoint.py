"""A checkpoint: a model's configuration and stored weights, whatever kind of file they came in."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from headrace.models.loaders.gguf import SPLIT_NAME, read_gguf
from headrace.models.loaders.huggingface import read_folder
from headrace.models.loaders.stored import CheckpointError, MappedFile, StoredTensor

__all__ = ["Checkpoint", "CheckpointError", "StoredTensor", "open_checkpoint"]

SAMPLE_BYTES = 4096  # one memory page


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A model on disk. Opening maps the files and reads their headers; weights are read when they are used.

    source             the file or folder it was opened from
    kind               which names the tensors and the config follow
    architecture       "llama", "gemma3", ...: GGUF `general.architecture`, or `model_type` of config.json
    config             all GGUF metadata (the tokenizer's arrays included), or config.json as it is
    tensors            by the names in the files, in their order
    mapped             the weight files; `files` are their paths
    generation_config  generation_config.json, {} without one
    extra              further files of a folder by name: tokenizer.json, tokenizer.model and
                       chat_template.jinja as paths, tokenizer_config.json and special_tokens_map.json as
                       dicts; {} for GGUF
    """

    source: Path
    kind: Literal["gguf", "huggingface"]
    architecture: str
    config: Mapping[str, object] = field(repr=False)
    tensors: Mapping[str, StoredTensor] = field(repr=False)
    mapped: tuple[MappedFile, ...] = field(repr=False)
    generation_config: Mapping[str, object] = field(default_factory=dict, repr=False)
    extra: Mapping[str, object] = field(default_factory=dict, repr=False)

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(file.path for file in self.mapped)

    @property
    def num_parameters(self) -> int:
        return sum(t.nbytes // t.format.block_bytes * t.format.block_size for t in self.tensors.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(t.nbytes for t in self.tensors.values())

    def forget_pages(self) -> None:
        """Let the process's memory of the weight files go: read again, pages come back from the system's cache."""
        for file in self.mapped:
            file.forget_pages()

    def digest(self) -> str:
        """Identity of the weights as 64 hex digits, wherever the files lie and whatever they are called.

        Covers the size and the whole header of each weight file (so every name, shape, type and offset, and
        all GGUF metadata), config.json of a folder, and of each tensor one window of 4 KiB in its middle. A
        file with other weights for any tensor as a whole differs; a change of a few bytes outside the windows
        is not seen. It guards caches against mixing models up, not against tampering. Costs a few
        milliseconds; not kept.
        """
        sha = hashlib.sha256(self.kind.encode())
        if self.kind == "huggingface":
            sha.update(json.dumps(self.config, sort_keys=True).encode())
        for file in self.mapped:
            sha.update(file.num_bytes.to_bytes(8, "little"))
            sha.update(file.window(0, file.header_bytes).data)
        for tensor in self.tensors.values():
            flat = tensor.data.reshape(-1)
            start = max(0, (len(flat) - SAMPLE_BYTES) // 2)
            sha.update(flat[start : start + SAMPLE_BYTES].data)
        return sha.hexdigest()


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Open a .gguf file (of a split model, any one of its files), a model folder, or a folder holding one
    GGUF model.

    Raises CheckpointError.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist: give a .gguf file or a folder with config.json")
    if path.is_dir():
        if (path / "config.json").exists():
            return _open_folder(path)
        if (gguf := _gguf_in(path)) is None:
            raise CheckpointError(f"{path} is no model folder (no config.json, no .gguf)")
        return _open_gguf(gguf)
    if path.suffix.lower() == ".gguf":
        return _open_gguf(path)
    raise CheckpointError(f"{path} is neither a .gguf file nor a folder: for safetensors give the folder they are in")


def _gguf_in(folder: Path) -> Path | None:
    """The one GGUF model of a folder; None without any."""
    try:
        found = sorted(p for p in folder.iterdir() if p.suffix.lower() == ".gguf")
    except OSError as error:
        raise CheckpointError(f"cannot read the folder {folder}: {error.strerror or error}") from error
    models = [p for p in found if not (m := SPLIT_NAME.fullmatch(p.name)) or int(m["number"]) == 1]
    if len(models) > 1:
        names = ", ".join(p.name for p in models)
        raise CheckpointError(f"{folder} holds {len(models)} GGUF models ({names}): give the path of one")
    return models[0] if models else None


def _open_gguf(path: Path) -> Checkpoint:
    contents = read_gguf(path)
    return Checkpoint(
        source=path,
        kind="gguf",
        architecture=_architecture(path, "general.architecture", contents.metadata),
        config=contents.metadata,
        tensors=contents.tensors,
        mapped=contents.files,
    )


def _open_folder(path: Path) -> Checkpoint:
    contents = read_folder(path)
    return Checkpoint(
        source=path,
        kind="huggingface",
        architecture=_architecture(path / "config.json", "model_type", contents.config),
        config=contents.config,
        tensors=contents.tensors,
        mapped=contents.files,
        generation_config=contents.generation_config,
        extra=contents.extra,
    )


def _architecture(path: Path, key: str, config: Mapping[str, object]) -> str:
    name = config.get(key)
    if not isinstance(name, str) or not name:
        raise CheckpointError(f"{path}: {key} is {name!r} where the name of an architecture belongs")
    return name
