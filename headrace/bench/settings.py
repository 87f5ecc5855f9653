"""Option texts to values, a model's name to its tokenizer. Errors are `ConfigurationError`s that show the text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, get_type_hints

from headrace.core.errors import ConfigurationError
from headrace.models.fetch import resolve
from headrace.models.loaders.checkpoint import open_checkpoint
from headrace.models.progress import Progress, no_progress
from headrace.models.registry import describe
from headrace.server.build import ServeConfig, load_tokenizer
from headrace.text.tokenizer import Tokenizer


def choice(option: str, value: str, allowed: tuple[str, ...]) -> Any:
    """`value`, if it is one of `allowed`."""
    if value not in allowed:
        raise ConfigurationError(f"{option} is {value!r}; it must be {' or '.join(allowed)}.")
    return value


def parse_named_url(text: str, index: int) -> tuple[str, str]:
    """ "ours=http://..." -> (name, url); without a name, A, B, C, ..."""
    name, separator, url = text.partition("=")
    if separator and "/" not in name:
        return name, url
    return (chr(ord("A") + index) if index < 26 else f"T{index}"), text


def parse_extra(texts: Sequence[str], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """'{...}' for all targets, 'NAME={...}' for one; later ones win. Returns one mapping per name."""
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    for text in texts:
        name, body = ("", text) if text.lstrip().startswith("{") else text.split("=", 1) if "=" in text else ("", text)
        try:
            values = json.loads(body)
        except ValueError as error:
            raise ConfigurationError(f"--extra {text!r} is no JSON object: {error}") from error
        if not isinstance(values, dict) or (name and name not in found):
            raise ConfigurationError(f"--extra {text!r}: write a JSON object, or NAME=OBJECT of a target ({names}).")
        for target in (name,) if name else names:
            found[target] |= values
    return found


def serve_config(model: str, settings: Sequence[str]) -> ServeConfig:
    """`FIELD=VALUE` texts over the defaults."""
    kinds = get_type_hints(ServeConfig)
    values: dict[str, Any] = {}
    for text in settings:
        name, separator, value = text.partition("=")
        if not separator or name not in kinds or name == "model":
            known = ", ".join(field.name for field in fields(ServeConfig) if field.name != "model")
            raise ConfigurationError(f"the setting {text!r} is not FIELD=VALUE with one of: {known}.")
        values[name] = _value(text, value, str(kinds[name]))
    return ServeConfig(model=model, **values)


def open_tokenizer(model: str, progress: Progress = no_progress) -> Tokenizer:
    """A model's tokenizer without its weights. Raises `HeadraceError` of one kind or another."""
    checkpoint = open_checkpoint(resolve(model, progress))
    return load_tokenizer(checkpoint, describe(checkpoint))


def as_json(config: ServeConfig) -> dict[str, Any]:
    """All fields of a config, for a report."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(config).items()}


def _value(text: str, value: str, kind: str) -> Any:
    try:
        if "int" in kind:
            return int(value)
        if "float" in kind:
            return float(value)
        if "bool" in kind:
            return {"true": True, "false": False}[value.lower()]
    except (ValueError, KeyError):
        raise ConfigurationError(f"the setting {text!r} needs a value of type {kind}.") from None
    return Path(value) if "Path" in kind else value
