"""Which format a model writes: by name, or by the marks in its chat template."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.core.errors import ConfigurationError
from headrace.text.tools import hermes, llama3, mistral, qwen
from headrace.text.tools.base import Format
from headrace.text.tools.reasoning import MISTRAL_THINK, THINK, Thinking

FORMATS: Mapping[str, Format] = {
    format.name: format for format in (hermes.HERMES, qwen.QWEN, llama3.LLAMA3, mistral.MISTRAL, mistral.MISTRAL_V3)
}

_MARKS: tuple[tuple[tuple[str, ...], Format | None], ...] = (
    ((hermes.OPEN, "<arg_key>"), None),  # GLM 4.5: Hermes's tags around something else
    ((hermes.OPEN, qwen.FUNCTION), qwen.QWEN),
    ((hermes.OPEN,), hermes.HERMES),
    ((mistral.OPEN, mistral.ARGS), mistral.MISTRAL),
    ((mistral.OPEN,), mistral.MISTRAL_V3),
    ((llama3.TAG,), llama3.LLAMA3),
    (("<|start_header_id|>", '"parameters": '), llama3.LLAMA3),  # Llama 3.2's small ones know no tag
)
"""A template with all of the marks is of the format; the first that fits counts."""


def format_named(name: str) -> Format:
    """Raises `ConfigurationError` for a name that is not in `FORMATS`."""
    if name not in FORMATS:
        raise ConfigurationError(f"{name!r} is not a format of tool calls; choose one of {', '.join(FORMATS)}.")
    return FORMATS[name]


def format_of(template: str) -> Format | None:
    """The format of a chat template's source; None where it shows none: then the model knows no tools."""
    return next((format for marks, format in _MARKS if all(mark in template for mark in marks)), None)


def thinking_of(template: str) -> Thinking | None:
    """The marks of reasoning in a chat template's source; None where it shows none."""
    return next((thinking for thinking in (THINK, MISTRAL_THINK) if thinking.close in template), None)
