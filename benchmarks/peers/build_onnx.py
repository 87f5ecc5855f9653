"""python -m benchmarks.peers.build_onnx GGUF FOLDER, in ONNX Runtime's environment: int4 by its own model builder.

The GGUF's values are unpacked to float32 and quantized anew, in groups of 32 with int8 activations (accuracy level 4,
the fastest there is). The quality is that of a second quantization: not the same file.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from onnxruntime_genai.models.builder import create_model, parse_extra_options
from transformers import AutoModelForCausalLM, AutoTokenizer

GROUP = 32


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    with tempfile.TemporaryDirectory() as scratch:
        read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
        config = read.config
        if hasattr(config, "quantization_config"):  # it would refuse to be saved as what it no longer is
            del config.quantization_config
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        plain.load_state_dict(read.state_dict())
        plain.save_pretrained(f"{scratch}/unpacked")
        AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(f"{scratch}/unpacked")
        arguments = ("", f"{scratch}/unpacked", str(target), "int4", "cpu", f"{scratch}/cache")
        options = parse_extra_options(*arguments, ["int4_accuracy_level=4", f"int4_block_size={GROUP}"])
        create_model(*arguments, **options)


if __name__ == "__main__":
    main()
