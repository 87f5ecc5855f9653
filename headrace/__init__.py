"""Headrace: LLM inference and serving. `from headrace import LLM, SamplingParams`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.core.sampling import SamplingParams
    from headrace.llm import LLM

__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> Any:
    # Lazily: importing headrace.engine or headrace.sim must not load numpy, and the command line starts in no time.
    if name == "LLM":
        from headrace.llm import LLM  # noqa: PLC0415

        return LLM
    if name == "SamplingParams":
        from headrace.core.sampling import SamplingParams  # noqa: PLC0415

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
