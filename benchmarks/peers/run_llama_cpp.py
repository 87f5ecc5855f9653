"""llama.cpp through llama-cpp-python's low-level bindings. Runs in the peer's environment."""

from __future__ import annotations

import re
import sys
from typing import Any

import llama_cpp

from benchmarks.peers.llama_batches import BATCH_TOKENS, LlamaBatches
from benchmarks.peers.wire import serve

LOG_WARNING = 3  # ggml's levels: debug, info, warning, error


@llama_cpp.llama_log_callback
def log(level: int, text: bytes, _: Any) -> None:
    """Each context tells pages about itself; what went wrong must be found in the log."""
    if level in (LOG_WARNING, LOG_WARNING + 1):
        sys.stderr.write(text.decode("utf-8", "replace"))


class LlamaCpp:
    """An `Api`. Settings: flash_attention, ubatch (tokens computed at once), unified (one KV buffer for all)."""

    lib = llama_cpp

    def __init__(self, model: str, threads: int) -> None:
        self._threads = threads
        self._model = llama_cpp.llama_model_load_from_file(model.encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {model}")
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def new_context(self, num_sequences: int, num_tokens: int, settings: dict[str, Any]) -> Any:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = num_sequences * (-(-num_tokens // 256) * 256)  # llama.cpp pads each sequence to 256 tokens
        params.n_seq_max = num_sequences
        params.n_batch = BATCH_TOKENS
        params.n_ubatch = settings.get("ubatch", BATCH_TOKENS)
        params.n_threads = params.n_threads_batch = self._threads
        params.flash_attn_type = 1 if settings["flash_attention"] else 0
        params.kv_unified = settings.get("unified", False)
        params.no_perf = True
        return llama_cpp.llama_init_from_model(self._model, params)

    def clear(self, context: Any) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)

    def free(self, context: Any) -> None:
        llama_cpp.llama_free(context)


class Runner:
    def load(self, model: str, threads: int, options: dict[str, Any]) -> dict[str, Any]:
        llama_cpp.llama_log_set(log, None)
        llama_cpp.llama_backend_init()
        self._batches = LlamaBatches(LlamaCpp(model, threads))
        self.prompt = self._batches.prompt
        self.decode = self._batches.decode
        features = re.findall(r"(\w+) = 1", llama_cpp.llama_print_system_info().decode())
        return {"built for": " ".join(features)}


if __name__ == "__main__":
    serve(Runner())
