"""OpenVINO GenAI's continuous batching, on the GGUF file itself. Runs in the peer's environment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import openvino
import openvino_genai

from benchmarks.peers.wire import serve

MAX_SEQUENCES = 64
BATCH_TOKENS = 512
CACHE_GIB = 2


class Runner:
    """`wire.Engine`. Prefix caching is off: a prompt must be computed each time."""

    def load(self, model: str, threads: int, options: dict[str, Any]) -> dict[str, Any]:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = BATCH_TOKENS
        scheduler.max_num_seqs = MAX_SEQUENCES
        scheduler.cache_size = CACHE_GIB
        scheduler.enable_prefix_caching = False
        properties = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self._next_id = 0
        return {}

    def prompt(self, tokens: list[int], settings: dict[str, Any]) -> None:
        handle = self._submit(tokens, 1)
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        if not _num_new(handle):
            raise RuntimeError("the prompt ended without a token")

    def decode(self, prompts: list[list[int]], num_steps: int, settings: dict[str, Any]) -> Iterator[int]:
        # Early prompts begin to decode while late ones are computed: they need more tokens.
        handles = [self._submit(prompt, num_steps + 4 * MAX_SEQUENCES) for prompt in prompts]
        try:
            waiting = set(range(len(handles)))
            while waiting:
                self._pipeline.step()
                waiting -= {i for i in waiting if _num_new(handles[i])}
            yield len(handles)
            for _ in range(num_steps):
                self._pipeline.step()
                yield sum(map(_num_new, handles))
        finally:
            for handle in handles:
                handle.cancel()
            while self._pipeline.has_non_finished_requests():
                self._pipeline.step()

    def _submit(self, tokens: list[int], max_tokens: int) -> Any:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.ignore_eos = True
        config.do_sample = False
        self._next_id += 1
        return self._pipeline.add_request(self._next_id, openvino.Tensor(np.array([tokens], np.int64)), config)


def _num_new(handle: Any) -> int:
    """Tokens since the last call."""
    num_tokens = 0
    while handle.can_read():
        num_tokens += sum(len(output.generated_ids) for output in handle.read().values())
    return num_tokens


if __name__ == "__main__":
    serve(Runner())
