"""The model files: as shipped, and in other formats by llama.cpp's own quantizer, made once.

<cache>/headrace/peers/files/<model>-<format>.gguf
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from benchmarks.peers.environments import Environment, Say, Unavailable, cache_root, last_error_line
from benchmarks.peers.loads import Subject
from benchmarks.peers.peers import Peer
from benchmarks.peers.runner import ROOT
from headrace.models.fetch import resolve


def file_of(subject: Subject, wanted: str, quantizer: Environment | None, say: Say) -> Path:
    """The subject's model in format `wanted`. Raises `Unavailable`."""
    shipped = resolve(subject.model)
    if subject.is_shipped and wanted == subject.format:
        return shipped
    made = cache_root() / "files" / f"{subject.model}-{wanted.lower()}.gguf"
    if made.exists():
        return made
    if quantizer is None:
        raise Unavailable(f"{wanted} is made by llama.cpp's quantizer, and llama.cpp is not here")
    say(f"{subject.model}: quantizing to {wanted}")
    made.parent.mkdir(parents=True, exist_ok=True)
    partial = made.with_suffix(f".{os.getpid()}.part")
    try:
        _run([str(quantizer.python), "-m", "benchmarks.peers.quantize", str(shipped), str(partial), wanted], wanted)
        os.replace(partial, made)
    finally:
        partial.unlink(missing_ok=True)
    return made


def own_folder(peer: Peer, subject: Subject, environment: Environment, say: Say) -> Path:
    """The subject's model in the peer's own format. Raises `Unavailable`."""
    assert peer.recipe is not None
    made = cache_root() / "files" / f"{subject.model}-{peer.recipe.name}-{peer.recipe.version}-{peer.own_format}"
    if made.exists():
        return made
    say(f"{peer.name}: building {subject.model} in {peer.own_format}")
    made.parent.mkdir(parents=True, exist_ok=True)
    partial = made.with_suffix(f".{os.getpid()}.part")
    try:
        _run([str(environment.python), "-m", peer.build, str(resolve(subject.model)), str(partial)], peer.own_format)
        os.replace(partial, made)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return made


def _run(command: list[str], wanted: str) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise Unavailable(f"making {wanted}: {last_error_line(done.stderr + done.stdout)}")
