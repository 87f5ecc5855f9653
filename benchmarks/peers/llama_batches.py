"""The loads through the C interface that llama.cpp and ik_llama.cpp share: a batch of (token, position, sequence).

One `llama_decode` per step for all sequences; the greedy token is the argmax over the library's own logits, 10 to
15 microseconds for 49,152 of them, where the copying C samplers take several times that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

BATCH_TOKENS = 512


class Api(Protocol):
    """What of the two libraries differs: how contexts are made and forgotten."""

    lib: Any
    """The bindings' module: llama_batch_init, llama_decode, llama_get_logits_ith."""
    vocab_size: int

    def new_context(self, num_sequences: int, num_tokens: int, settings: dict[str, Any]) -> Any:
        """For `num_sequences` of `num_tokens` each."""

    def clear(self, context: Any) -> None:
        """Forget all sequences."""

    def free(self, context: Any) -> None: ...


@dataclass(slots=True)
class _Row:
    token: int
    position: int
    sequence: int
    has_logits: bool


class LlamaBatches:
    """`wire.Engine` without `load`, over an `Api`. Keeps one context, of the shape last asked for."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._shape: tuple[Any, ...] = ()
        self._context: Any = None
        self._batch = api.lib.llama_batch_init(BATCH_TOKENS, 0, 1)

    def prompt(self, tokens: list[int], settings: dict[str, Any]) -> None:
        context = self._context_for(1, len(tokens) + 1, settings)
        last = len(tokens) - 1
        self._run(context, [_Row(token, i, 0, i == last) for i, token in enumerate(tokens)])

    def decode(self, prompts: list[list[int]], num_steps: int, settings: dict[str, Any]) -> Iterator[int]:
        length = max(map(len, prompts))
        context = self._context_for(len(prompts), length + num_steps + 2, settings)
        newest = self._prefill(context, prompts)
        yield len(newest)
        for step in range(num_steps):
            rows = [_Row(newest[i], len(prompts[i]) + step, i, True) for i in range(len(prompts))]
            newest = self._run(context, rows)
            yield len(newest)

    def _prefill(self, context: Any, prompts: list[list[int]]) -> list[int]:
        newest: list[int] = []
        rows: list[_Row] = []
        for i, prompt in enumerate(prompts):
            if len(rows) + len(prompt) > BATCH_TOKENS:
                newest += self._run(context, rows)
                rows = []
            rows += [_Row(token, at, i, at == len(prompt) - 1) for at, token in enumerate(prompt)]
        return newest + self._run(context, rows)

    def _run(self, context: Any, rows: list[_Row]) -> list[int]:
        """The greedy tokens of the rows with logits, in order."""
        lib, batch = self._api.lib, self._batch
        if len(rows) > BATCH_TOKENS:
            raise ValueError(f"{len(rows)} tokens in one batch; there is room for {BATCH_TOKENS}")
        batch.n_tokens = len(rows)
        for i, row in enumerate(rows):
            batch.token[i] = row.token
            batch.pos[i] = row.position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = row.sequence
            batch.logits[i] = row.has_logits
        status = lib.llama_decode(context, batch)
        if status:
            raise RuntimeError(f"llama_decode of {len(rows)} tokens returned {status}")
        return [self._argmax(context, i) for i, row in enumerate(rows) if row.has_logits]

    def _argmax(self, context: Any, row: int) -> int:
        logits = self._api.lib.llama_get_logits_ith(context, row)
        return int(np.ctypeslib.as_array(logits, (self._api.vocab_size,)).argmax())

    def _context_for(self, num_sequences: int, num_tokens: int, settings: dict[str, Any]) -> Any:
        shape = (num_sequences, num_tokens, tuple(sorted(settings.items())))
        if shape != self._shape:
            if self._context is not None:
                self._api.free(self._context)
            self._context = self._api.new_context(num_sequences, num_tokens, settings)
            if not self._context:
                raise RuntimeError(f"no context for {num_sequences} sequences of {num_tokens} tokens with {settings}")
            self._shape = shape
        self._api.clear(self._context)
        return self._context
