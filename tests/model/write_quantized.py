"""Writes tiny GGUF files of random weights whose matrices take turns through the storage formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from headrace.models.quantization.formats import BY_NAME, Format
from headrace.models.registry import HUGGINGFACE
from headrace.program.builder import Builder

from .write_gguf import ARCHITECTURES, write_metadata

MEAN_QUANT = {"Q4_K": 7.5, "Q5_K": 15.5}
"""Of random quants: a minimum of as many steps on average makes weights of mean zero."""


def write_quantized_gguf(path: Path, config: Mapping[str, Any], formats: Sequence[str], seed: int = 0) -> None:
    """The model of a config.json. Vectors stay F32; matrices, in the program's order, get `formats` in turn, or F32
    where their width is no whole number of blocks."""
    rng = np.random.default_rng(seed)
    page = HUGGINGFACE[config["model_type"]]
    program = page.program(page.from_huggingface(config), Builder())
    writer = gguf.GGUFWriter(path, ARCHITECTURES[config["model_type"]])
    write_metadata(writer, dict(config))
    turns = cycle(formats)
    for name, spec in program.weights.items():
        if len(spec.shape) == 1:  # norms
            writer.add_tensor(f"{name}.weight", (1 + 0.1 * rng.standard_normal(spec.shape)).astype(np.float32))
            continue
        format = BY_NAME[next(turns)]
        if spec.shape[-1] % format.block_size:
            format = BY_NAME["F32"]
        raw = random_rows(rng, spec.shape, format)
        writer.add_tensor(f"{name}.weight", raw, raw_dtype=gguf.GGMLQuantizationType(format.gguf_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_rows(rng: np.random.Generator, shape: Sequence[int], format: Format) -> np.ndarray:
    """Weights of mean zero and variance 1 / width, as the file stores them: bytes, or numbers for F32 and F16."""
    deviation = shape[-1] ** -0.5
    type = gguf.GGMLQuantizationType(format.gguf_type)
    if not format.name.endswith("_K"):
        return gguf.quantize((deviation * rng.standard_normal(shape)).astype(np.float32), type)
    # The gguf package does not quantize to K-quants: random bytes with scales of the right size.
    raw = rng.integers(0, 256, format.data_shape(shape), np.uint8)
    blocks = raw.view(format.layout)
    blocks["d"] = rng.uniform(0.5, 1.5, blocks.shape)
    scales = ["d"]
    if format.name in MEAN_QUANT:
        scales.append("dmin")
        blocks["dmin"] = blocks["d"] * MEAN_QUANT[format.name]
    factor = deviation / gguf.dequantize(raw, type).std()
    for scale in scales:
        blocks[scale] = blocks[scale] * factor
    return raw
