"""python -m benchmarks.peers.quantize IN OUT FORMAT, in llama.cpp's environment: its own `llama_model_quantize`."""

from __future__ import annotations

import ctypes
import sys

import llama_cpp

FORMATS = {
    "Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "F16": llama_cpp.LLAMA_FTYPE_MOSTLY_F16,
}


def main() -> None:
    source, target, wanted = sys.argv[1:]
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = FORMATS[wanted]
    params.allow_requantize = True  # the file as shipped is quantized already: a second loss, noted in the report
    status = llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params))
    if status:
        sys.exit(f"error: llama_model_quantize returned {status}")


if __name__ == "__main__":
    main()
