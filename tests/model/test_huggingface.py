"""Reading of Hugging Face folders, against the safetensors package."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from headrace.models.loaders.checkpoint import CheckpointError, open_checkpoint
from headrace.models.loaders.huggingface import INDEX, read_safetensors

RNG = np.random.default_rng(0)
TENSORS: dict[str, np.ndarray] = {
    "a.weight": RNG.standard_normal((4, 6)).astype(np.float32),
    "b.weight": RNG.standard_normal((3, 2, 5)).astype(np.float16),
    "c.bias": RNG.standard_normal(7).astype(np.float32),
    "mask": RNG.integers(0, 2, (3, 3)).astype(bool),
    "steps": np.array(12345, np.int64),
}


def folder_of(path: Path, config: dict[str, Any] | None = None) -> Path:
    (path / "config.json").write_text(json.dumps({"model_type": "llama"} if config is None else config))
    return path


def assert_holds(tensors: Any, expected: dict[str, np.ndarray]) -> None:
    assert set(tensors) == set(expected)
    for name, array in expected.items():
        assert tensors[name].shape == array.shape
        assert tensors[name].data.tobytes() == array.tobytes()
        assert np.array_equal(tensors[name].dequantize(), array.astype(np.float32))


def test_single_file(tmp_path: Path) -> None:
    save_file(TENSORS, folder_of(tmp_path) / "model.safetensors", metadata={"format": "pt"})
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.kind, checkpoint.architecture) == ("huggingface", "llama")
    assert checkpoint.files == (tmp_path / "model.safetensors",)
    assert_holds(checkpoint.tensors, TENSORS)


def test_weights_are_not_copied(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "m.safetensors")
    tensors, file = read_safetensors(tmp_path / "m.safetensors")
    whole = file.window(0, file.num_bytes)
    for tensor in tensors.values():
        assert np.shares_memory(tensor.data, whole)
    assert np.shares_memory(tensors["a.weight"].dequantize(), whole)


def test_bf16(tmp_path: Path) -> None:
    """NumPy has no bfloat16: the file by hand, the values as the upper halves of f32."""
    halves = np.array([0x3F80, 0xC000, 0x0001, 0x7F80], np.uint16)
    path = tmp_path / "m.safetensors"
    path.write_bytes(packed({"w": entry("BF16", [2, 2], 0, 8)}, halves.tobytes()))
    weights = read_safetensors(path)[0]["w"].dequantize()
    assert weights.tolist() == [[1.0, -2.0], [float(np.uint32(1 << 16).view(np.float32)), float("inf")]]


def shards_of(path: Path, shards: dict[str, list[str]], weight_map: dict[str, str] | None = None) -> Path:
    for file, names in shards.items():
        save_file({n: TENSORS[n] for n in names}, path / file)
    weight_map = weight_map or {n: file for file, names in shards.items() for n in names}
    (folder_of(path) / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
NAMES = list(TENSORS)


def test_sharded(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(shards_of(tmp_path, {ONE: NAMES[:2], TWO: NAMES[2:]}))
    assert checkpoint.files == (tmp_path / ONE, tmp_path / TWO)
    assert_holds(checkpoint.tensors, TENSORS)


def test_shards_that_do_not_belong_together(tmp_path: Path) -> None:
    home = dict.fromkeys(NAMES[:2], ONE) | dict.fromkeys(NAMES[2:], TWO)
    shards_of(tmp_path, {ONE: NAMES[:2], TWO: NAMES[2:]}, home | {"lost.weight": TWO})
    with pytest.raises(CheckpointError, match=rf"'lost.weight' is not in {TWO} \(1 missing in all\)"):
        open_checkpoint(tmp_path)
    shards_of(tmp_path, {ONE: NAMES[:3], TWO: NAMES[2:]}, home)
    with pytest.raises(CheckpointError, match=f"{ONE} holds tensor 'c.bias', which .* places in '{TWO}'"):
        open_checkpoint(tmp_path)
    shards_of(tmp_path, {ONE: NAMES[:2], TWO: NAMES[2:]})
    (tmp_path / TWO).unlink()
    with pytest.raises(CheckpointError, match=f"cannot read .*{TWO}"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("shard", ["../other.safetensors", "/etc/passwd", "a/b", "..", "", "a\0b", "a\\b", 7, None])
def test_an_index_does_not_lead_out_of_its_folder(tmp_path: Path, shard: Any) -> None:
    (folder_of(tmp_path) / INDEX).write_text(json.dumps({"weight_map": {"w": shard}}))
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path)


def test_files_beside_the_weights(tmp_path: Path) -> None:
    save_file(TENSORS, folder_of(tmp_path) / "model.safetensors")
    assert open_checkpoint(tmp_path).extra == {}
    assert open_checkpoint(tmp_path).generation_config == {}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    for name in ("tokenizer.json", "chat_template.jinja", "README.md"):
        (tmp_path / name).write_text("x")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.generation_config == {"eos_token_id": [1, 2]}
    assert checkpoint.extra == {
        "tokenizer_config.json": {"bos_token": "<s>"},
        "tokenizer.json": tmp_path / "tokenizer.json",
        "chat_template.jinja": tmp_path / "chat_template.jinja",
    }


def test_tiny_checkpoints(data_path: Path) -> None:
    """Every tiny checkpoint opens and holds what the safetensors package finds in it."""
    folders = sorted((data_path / "tiny").iterdir())
    assert len(folders) >= 14
    for folder in folders:
        checkpoint = open_checkpoint(folder)
        assert checkpoint.architecture == json.loads((folder / "config.json").read_text())["model_type"]
        assert_holds(checkpoint.tensors, load_file(folder / "model.safetensors"))


def test_digest_covers_config_and_weights(tmp_path: Path) -> None:
    save_file(TENSORS, folder_of(tmp_path) / "model.safetensors")
    digest = open_checkpoint(tmp_path).digest()
    assert open_checkpoint(tmp_path).digest() == digest
    folder_of(tmp_path, {"model_type": "llama", "rope_theta": 5e5})
    assert open_checkpoint(tmp_path).digest() != digest
    folder_of(tmp_path)
    save_file(TENSORS | {"c.bias": TENSORS["c.bias"] + 1}, tmp_path / "model.safetensors")
    assert open_checkpoint(tmp_path).digest() != digest


# ---- broken folders and files


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("{", "its JSON cannot be read"),
        ("[1]", "its JSON is a list"),
        ('{"a": 1, "a": 2}', "a key appears twice"),
        ("[" * 100_000, "its JSON cannot be read"),
        ('{"model_type": 3}', "model_type is 3"),
        ("{}", "model_type is None"),
    ],
)
def test_broken_config(tmp_path: Path, config: str, says: str) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(CheckpointError, match=says):
        open_checkpoint(tmp_path)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is no model folder \(no config\.json, no \.gguf\)"):
        open_checkpoint(tmp_path)
    folder_of(tmp_path)
    with pytest.raises(CheckpointError, match=r"neither model.safetensors nor .*get the model's safetensors"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin is a pickle, which can run code"):
        open_checkpoint(tmp_path)


def entry(dtype: Any, shape: Any, begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def packed(header: Any, data: bytes) -> bytes:
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


GOOD = entry("F32", [2], 0, 8)
BROKEN = {
    "empty": (b"", "is empty"),
    "cut": (b"123", "3 bytes are not a safetensors file"),
    "length": (struct.pack("<Q", 2**63) + b"{}", "its header claims 9223372036854775808 bytes"),
    "not json": (struct.pack("<Q", 2) + b"\xff{", "its JSON cannot be read"),
    "list": (packed([], b""), "its JSON is a list"),
    "no entry": (packed({"w": 3}, b""), "is not a dtype, a shape and data_offsets"),
    "keys": (packed({"w": GOOD | {"more": 1}}, bytes(8)), "is not a dtype"),
    "float 8": (
        packed({"w": entry("F8_E4M3", [8], 0, 8)}, bytes(8)),
        "F8_E4M3, which is not supported: get the model in",
    ),
    "dtype": (packed({"w": entry(["F32"], [2], 0, 8)}, bytes(8)), "not supported"),
    "negative": (packed({"w": entry("F32", [-2], 0, 8)}, bytes(8)), "shape"),
    "true": (packed({"w": entry("F32", [True], 0, 4)}, bytes(4)), "shape"),
    "huge": (packed({"w": entry("F32", [2**62, 2**62], 0, 8)}, bytes(8)), "shape"),
    "zero and huge": (
        packed({"w": entry("F32", [2**62, 2**62, 0], 0, 8)}, bytes(8)),
        "8 bytes of data where",
    ),
    "dims": (packed({"w": entry("F32", [1] * 5000, 0, 4)}, bytes(4)), "at most 8 sizes"),
    "offsets": (packed({"w": entry("F32", [2], 0, 9)}, bytes(8)), "do not lie in the 8 bytes"),
    "backwards": (packed({"w": entry("F32", [2], 8, 0)}, bytes(8)), "do not lie"),
    "size": (packed({"w": entry("F32", [3], 0, 8)}, bytes(8)), r"8 bytes of data where F32 \[3\] takes 12"),
    "overlap": (
        packed({"v": GOOD, "w": entry("F32", [2], 4, 12)}, bytes(12)),
        "begins at data byte 4 where 8",
    ),
    "gap": (packed({"v": GOOD, "w": entry("F32", [2], 12, 20)}, bytes(20)), "begins at data byte 12 where 8"),
    "tail": (packed({"w": GOOD}, bytes(12)), "4 bytes after the last tensor"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_say_what_is_wrong(name: str, tmp_path: Path) -> None:
    content, says = BROKEN[name]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=says) as caught:
        read_safetensors(path)
    assert str(path) in str(caught.value)


def test_300_wounded_files(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "whole.safetensors")
    raw = (tmp_path / "whole.safetensors").read_bytes()
    num_header = 8 + struct.unpack("<Q", raw[:8])[0]
    num_refused = 0
    for seed in range(300):
        rng = random.Random(seed)
        wounded = bytearray(raw)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(num_header)
            wounded[at : at + rng.randint(0, 2)] = rng.choice((b"", b"9", b'"', b"-", b"[", b"\xff", rng.randbytes(4)))
        path = tmp_path / f"{seed}.safetensors"
        path.write_bytes(wounded)
        try:
            for tensor in read_safetensors(path)[0].values():
                assert tensor.dequantize().shape == tensor.shape
        except CheckpointError:
            num_refused += 1
    assert num_refused > 150, num_refused
