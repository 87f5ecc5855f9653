"""Where an engine's knowledge of step times starts from, before it has seen a step."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.core.cost_model import CostModel, load_cost_model
from headrace.core.errors import ConfigurationError
from headrace.models.fetch import cache_root
from headrace.program.program import Program
from headrace.program.roofline import Peaks, seeds

if TYPE_CHECKING:
    from headrace.server.build import ServeConfig

log = logging.getLogger("headrace")

PER_THREAD = {"avx512": Peaks(150e9, 9e9), "avx2": Peaks(100e9, 9e9), "scalar": Peaks(3e9, 6e9)}
"""What the native kernels come to on long prompts and single streams, roughly, by instruction set."""
REFERENCE = Peaks(50e9, 4e9)
"""Of the reference backend, all threads."""
MOST_BYTES_PER_S = 80e9
"""Threads share the memory."""


def starting_cost_model(config: ServeConfig, program: Program, weight_bytes: Mapping[str, int]) -> CostModel:
    """The one that `headrace calibrate` has saved for this model, machine and settings; else one by the Program's
    operations and bytes. `weight_bytes`: stored size of each weight."""
    path = cost_model_path(config)
    if config.backend == "native" and path.exists():
        try:
            return load_cost_model(path)[0]
        except ConfigurationError as error:
            log.warning("%s Step costs are learnt from the start instead.", error)
    return CostModel(seeds(program, weight_bytes, _peaks(config)))


def cost_model_path(config: ServeConfig) -> Path:
    """In the user's cache: one per model, threads, instruction set and number formats."""
    name = "".join(c if c.isalnum() or c in "-_." else "-" for c in config.model)
    settings = f"{config.num_threads}t-{config.instruction_set}-{config.kv_format}-{config.activations}"
    return cache_root().parent / "cost" / f"{name}-{settings}.json"


def _peaks(config: ServeConfig) -> Peaks:
    if config.backend != "native":
        return REFERENCE
    flops_per_s, bytes_per_s = PER_THREAD.get(config.instruction_set, PER_THREAD["avx2"])
    return Peaks(config.num_threads * flops_per_s, min(config.num_threads * bytes_per_s, MOST_BYTES_PER_S))
