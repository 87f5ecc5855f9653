"""ik_llama.cpp through the low-level bindings of ik-llama-cpp-python. Runs in the peer's environment."""

from __future__ import annotations

from typing import Any

from ik_llama_cpp import _ctypes_api as lib

from benchmarks.peers.llama_batches import BATCH_TOKENS, LlamaBatches
from benchmarks.peers.wire import serve


class IkLlama:
    """An `Api`. Load option: repack (rows interleaved at load). Settings: flash_attention, ubatch."""

    lib = lib

    def __init__(self, model: str, threads: int, options: dict[str, Any]) -> None:
        self._threads = threads
        params = lib.llama_model_default_params()
        params.repack_tensors = options.get("repack", False)
        params.use_mmap = not params.repack_tensors  # repacking rewrites the weights
        self._model = lib.llama_model_load_from_file(model.encode(), params)
        if not self._model:
            raise RuntimeError(f"ik_llama.cpp cannot load {model}")
        self.vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))

    def new_context(self, num_sequences: int, num_tokens: int, settings: dict[str, Any]) -> Any:
        params = lib.llama_context_default_params()
        params.n_ctx = num_sequences * (-(-num_tokens // 256) * 256)
        params.n_seq_max = num_sequences
        params.n_batch = BATCH_TOKENS
        params.n_ubatch = settings.get("ubatch", BATCH_TOKENS)
        params.n_threads = params.n_threads_batch = self._threads
        params.flash_attn = settings["flash_attention"]
        return lib.llama_init_from_model(self._model, params)

    def clear(self, context: Any) -> None:
        lib.llama_kv_cache_clear(context)

    def free(self, context: Any) -> None:
        lib.llama_free(context)


class Runner:
    def load(self, model: str, threads: int, options: dict[str, Any]) -> dict[str, Any]:
        lib.llama_backend_init()
        self._batches = LlamaBatches(IkLlama(model, threads, options))
        self.prompt = self._batches.prompt
        self.decode = self._batches.decode
        return {}


if __name__ == "__main__":
    serve(Runner())
