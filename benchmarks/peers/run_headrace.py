"""Headrace itself, in process: the engine that `headrace.server.build` composes, whatever its default backend is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from benchmarks.peers.wire import serve
from headrace.backends.native.model import NativeModel
from headrace.core.events import TokenEvent
from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.server.build import Deployment, ServeConfig, build

MAX_RUNNING = 64
KV_MEMORY_BYTES = 1 << 30
"""Room for 64 streams of either model, as the peers are given."""
LEAD_TOKENS = 256
"""More tokens than a sequence may be ahead of the last one to start: those with early prompts begin to decode first."""


class Runner:
    """`wire.Engine`. Every request has its own cache salt, so that no prompt finds an earlier one in the cache."""

    def __init__(self) -> None:
        self._ids = itertools.count()

    def load(self, model: str, threads: int, options: dict[str, Any]) -> dict[str, Any]:
        named: dict[str, Any] = {
            "model": model,
            "max_running": MAX_RUNNING,
            "threads": threads,
            "kv_memory_bytes": KV_MEMORY_BYTES,
        }
        if options.get("reference"):
            named |= {"backend": "reference", "kv_format": "f32"}
        self._deployment: Deployment = build(ServeConfig(**named))
        self._engine = self._deployment.engine
        backend = self._engine.executor.backend
        if isinstance(backend, NativeModel):
            backend.touch_cache(KV_MEMORY_BYTES)  # the peers fill their caches when they load, too
        return {"backend": backend_name(self._engine.executor)}

    def prompt(self, tokens: list[int], settings: dict[str, Any]) -> None:
        self._submit(tokens, 1)
        while self._engine.has_work:
            self._engine.step()

    def decode(self, prompts: list[list[int]], num_steps: int, settings: dict[str, Any]) -> Iterator[int]:
        ids = [self._submit(prompt, num_steps + LEAD_TOKENS) for prompt in prompts]
        try:
            waiting = set(ids)
            while waiting:
                waiting -= {event.request_id for event in self._step() if event.tokens}
            yield len(ids)
            for _ in range(num_steps):
                yield sum(len(event.tokens) for event in self._step())
        finally:
            for request_id in ids:
                self._engine.abort(request_id)
            while self._engine.has_work:
                self._engine.step()

    def _submit(self, tokens: list[int], max_tokens: int) -> str:
        request_id = f"bench-{next(self._ids)}"
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        self._engine.submit(Request(request_id, tuple(tokens), sampling, cache_salt=request_id))
        return request_id

    def _step(self) -> list[TokenEvent]:
        events = self._engine.step()
        if ended := [event for event in events if event.finish_reason is not None]:
            raise RuntimeError(f"{ended[0].request_id} ended ({ended[0].finish_reason}) while it was being measured")
        return events


def backend_name(executor: Any) -> str:
    """The folder under headrace.backends that computes: "reference" or "native"."""
    parts = type(executor.backend).__module__.split(".")
    return parts[parts.index("backends") + 1]


if __name__ == "__main__":
    serve(Runner())
