"""Models from the Hugging Face hub, through its own client: only the files that serving needs.

    org/name              the folder's safetensors, or its one GGUF model
    org/name:Q4_K_M       the GGUF model with that word in its name
    org/name/file.gguf    that file (and the others of its split)

The client keeps them in its own cache and checks them; without a network what it has there is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from headrace.models.errors import FetchError

_WORD = r"[A-Za-z0-9][A-Za-z0-9._-]*"
HUB_ID = re.compile(rf"(?P<repo>{_WORD}/{_WORD})(?::(?P<quant>{_WORD})|/(?P<file>[^:\\]+\.gguf))?")
SPLIT = re.compile(r"(?P<stem>.*)-\d{5}-of-(?P<count>\d{5})\.gguf")

NEEDED = frozenset(
    (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
    )
)
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")


@dataclass(frozen=True, slots=True)
class Choice:
    """Which files of a repository to fetch, and which of them is the model (None: the folder)."""

    files: tuple[str, ...]
    entry: str | None


def choose_files(model: str, names: Iterable[str]) -> Choice:
    """What to fetch for a hub id, given the names of all files in its repository.

    Raises FetchError when nothing, or no single model, fits.
    """
    match = HUB_ID.fullmatch(model)
    if match is None:
        raise FetchError(f"{model!r} is not a hub id: write org/name, org/name:QUANT or org/name/file.gguf")
    names = sorted(names)
    repo, quant, file = match["repo"], match["quant"], match["file"]
    models = _gguf_models(names)
    if file:
        for entry, files in models.items():
            if file in files:
                return Choice(files, entry)
        raise FetchError(f"{repo} has no file {file}{_offer(repo, models)}")
    if quant:
        word = re.compile(rf"(?<![a-z0-9_]){re.escape(quant.lower())}(?![a-z0-9_])")
        models = {entry: files for entry, files in models.items() if word.search(entry.lower())} or models
        if len(models) == 1 and word.search(next(iter(models)).lower()):
            return Choice(next(iter(models.values())), next(iter(models)))
        raise FetchError(f"{repo} has no single GGUF model named {quant}{_offer(repo, models)}")
    if "config.json" in names and (WEIGHTS in names or INDEX in names):
        # The one file wins over shards, as it does when the folder is opened.
        weights = [WEIGHTS] if WEIGHTS in names else [n for n in names if n == INDEX or SHARD.fullmatch(n)]
        return Choice(tuple([n for n in names if n in NEEDED] + weights), None)
    if len(models) == 1:
        return Choice(next(iter(models.values())), next(iter(models)))
    if models:
        raise FetchError(f"{repo} holds {len(models)} GGUF models: name one{_offer(repo, models)}")
    raise FetchError(
        f"{repo} holds neither safetensors with a config.json nor a GGUF file: choose another repository of the model"
    )


def _gguf_models(names: list[str]) -> dict[str, tuple[str, ...]]:
    """GGUF models by their first file: a split model counts once, a vision projector not at all."""
    models: dict[str, list[str]] = {}
    entries: dict[tuple[str, str], str] = {}
    for name in names:
        if not name.endswith(".gguf") or Path(name).name.startswith("mmproj"):
            continue
        split = SPLIT.fullmatch(name)
        entry = entries.setdefault((split["stem"], split["count"]), name) if split else name
        models.setdefault(entry, []).append(name)
    return {entry: tuple(files) for entry, files in models.items()}


def _offer(repo: str, models: dict[str, tuple[str, ...]]) -> str:
    if not models:
        return ": it holds no GGUF models"
    shown = [f"{repo}/{entry}" for entry in list(models)[:12]]
    more = f" and {len(models) - 12} more" if len(models) > 12 else ""
    return f": it has {', '.join(shown)}{more}"


def fetch_from_hub(model: str) -> Path:
    """The local path of a hub id: a .gguf file, or a folder. Raises FetchError."""
    # Imported here: it costs near half a second, and most starts need no hub.
    import huggingface_hub  # noqa: PLC0415
    from huggingface_hub.errors import (  # noqa: PLC0415
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    match = HUB_ID.fullmatch(model)
    if match is None:
        raise FetchError(f"{model!r} is not a hub id: write org/name, org/name:QUANT or org/name/file.gguf")
    repo = match["repo"]
    try:
        try:
            # not list_repo_files: offline, that one retries for half a minute
            names = [f.rfilename for f in huggingface_hub.model_info(repo, timeout=10).siblings or ()]
        except (RepositoryNotFoundError, GatedRepoError):
            raise
        except Exception as offline:  # the client lets its transport's own errors through, whichever that is
            return _from_client_cache(model, repo, offline)
        choice = choose_files(model, names)
        folder = Path(huggingface_hub.snapshot_download(repo, allow_patterns=list(choice.files)))
    except GatedRepoError as error:
        raise FetchError(
            f"{repo} asks for its terms to be accepted: do so on its page, then run `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise FetchError(
            f"the hub has no model {repo}, or it is private (`hf auth login`): check the spelling"
        ) from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise FetchError(f"{repo} could not be fetched from the hub: {_first_line(error)}: try again") from error
    return folder / choice.entry if choice.entry else folder


def _from_client_cache(model: str, repo: str, offline: Exception) -> Path:
    """What the hub client has kept of the repository, if that is the whole model."""
    import huggingface_hub  # noqa: PLC0415

    remedy = "connect once to fetch it, or give the path of a model file"
    try:
        folder = Path(huggingface_hub.snapshot_download(repo, local_files_only=True))
    except Exception as error:
        raise FetchError(
            f"{model} is not on this machine and the hub cannot be reached: {_first_line(offline)}: {remedy}"
        ) from error
    choice = choose_files(model, [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()])
    return folder / choice.entry if choice.entry else folder


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
