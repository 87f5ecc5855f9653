"""How far a model's distributions are from a reference's on the same text.

Both models score the same windows. At each scored position the two *full* distributions over the vocabulary are
compared, in float64; nothing is cut to the most probable tokens. Logits are taken from the models as they compute them
and compared as soon as both have a row, so that memory holds the rows of one step of each model and no more:
max_step_tokens x vocabulary x 4 bytes, twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.backends.inputs import BatchInputs
from headrace.core.cache import Copy
from headrace.core.errors import ConfigurationError
from headrace.engine.engine import Engine
from headrace.evaluation.scoring import Perplexity, Tick, perplexity, score_request
from headrace.evaluation.texts import Window
from headrace.executor.local import Backend, LocalExecutor
from headrace.executor.native import NativeExecutor

Rows = NDArray[np.float64]

ROWS_AT_ONCE = 16
"""Rows widened to float64 at a time."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Per scored position, natural logarithms: KL(reference || model) = sum over tokens of p_ref * (log p_ref - log p).

    `abs_logprob`: |difference| of the logprob of the text's own token. `same_top`: both find the same token most
    probable.
    """

    kl: Rows
    abs_logprob: Rows
    same_top: NDArray[np.bool_]
    reference: Perplexity
    model: Perplexity

    def as_dict(self) -> dict[str, object]:
        return {
            "num_tokens": len(self.kl),
            "kl_mean": float(self.kl.mean()),
            "kl_p50": float(np.percentile(self.kl, 50)),
            "kl_p99": float(np.percentile(self.kl, 99)),
            "kl_max": float(self.kl.max()),
            "abs_logprob_mean": float(self.abs_logprob.mean()),
            "abs_logprob_max": float(self.abs_logprob.max()),
            "same_top_share": float(self.same_top.mean()),
            "reference": self.reference.as_dict(),
            "model": self.model.as_dict(),
            "perplexity_ratio": self.model.perplexity / self.reference.perplexity,
        }


class LogitTap:
    """Stands between an executor and its backend and keeps the logits of every readout until they are taken."""

    def __init__(self, backend: Backend, vocab_size: int) -> None:
        self._backend = backend
        self._vocab_size = vocab_size
        self.rows: deque[NDArray[np.float32]] = deque()
        """[vocab] each, in the order of the readouts."""

    @classmethod
    def on(cls, engine: Engine, vocab_size: int) -> LogitTap:
        """Whatever the engine's executor was, a local one that reads logits through the tap takes its place.

        Raises `ConfigurationError` for an executor without a backend in this process.
        """
        executor = engine.executor
        if not isinstance(executor, LocalExecutor | NativeExecutor):
            raise ConfigurationError(f"{type(executor).__name__} shows no logits; compare with a local executor.")
        tap = cls(executor.backend, vocab_size)
        engine.executor = LocalExecutor(tap, vocab_size)
        return tap

    @property
    def numerics(self) -> str:
        return self._backend.numerics

    def apply(self, copies: Iterable[Copy]) -> None:
        self._backend.apply(copies)

    def hidden(self, first: int, count: int) -> NDArray[np.float32]:
        return self._backend.hidden(first, count)

    def run(self, inputs: BatchInputs) -> Iterator[tuple[slice, NDArray[np.float32]]]:
        for rows, logits in self._backend.run(inputs):
            self.rows.extend(np.array(logits[:, : self._vocab_size]))  # a copy: backends reuse their buffers
            yield rows, logits


def diverge(
    reference: Engine, model: Engine, parts: Iterable[Window], vocab_size: int, tick: Tick = lambda count: None
) -> Divergence:
    """Compare on windows, one at a time. The engines are used by nobody else from now on (their logits are tapped)."""
    taps = LogitTap.on(reference, vocab_size), LogitTap.on(model, vocab_size)
    engines = reference, model
    kl: list[Rows] = []
    logprobs: tuple[list[Rows], list[Rows]] = ([], [])
    same_top: list[NDArray[np.bool_]] = []
    for number, window in enumerate(parts):
        request = score_request(f"diverge-{number}", window)
        for engine in engines:
            engine.submit(request)
        position = 0  # of the next row; it predicts token position + 1
        num_rows = len(window.tokens) - 1
        while position < num_rows:
            count = min(ROWS_AT_ONCE, num_rows - position)
            for engine, tap in zip(engines, taps, strict=True):
                while len(tap.rows) < count and engine.has_work:
                    engine.step()
            p, q = (_log_softmax([tap.rows.popleft() for _ in range(count)]) for tap in taps)
            targets = np.array(window.tokens[position + 1 : position + 1 + count])
            scored = np.arange(position + 1, position + 1 + count) >= window.num_known
            kl.append(_kl(p, q)[scored])
            same_top.append((p.argmax(axis=1) == q.argmax(axis=1))[scored])
            for values, into in zip((p, q), logprobs, strict=True):
                into.append(values[np.arange(count), targets][scored])
            position += count
            tick(count)
        for engine in engines:
            while engine.has_work:
                engine.step()
    of_reference, of_model = (np.concatenate(values) for values in logprobs)
    return Divergence(
        kl=np.concatenate(kl),
        abs_logprob=np.abs(of_reference - of_model),
        same_top=np.concatenate(same_top),
        reference=perplexity(of_reference.tolist()),
        model=perplexity(of_model.tolist()),
    )


def _log_softmax(rows: list[NDArray[np.float32]]) -> Rows:
    """[rows, vocab]."""
    wide = np.stack(rows).astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return wide


def _kl(p: Rows, q: Rows) -> Rows:
    """KL(p || q) per row of log-probabilities, at least 0 (rounding aside it is)."""
    with np.errstate(invalid="ignore"):  # 0 * (-inf - -inf), which is 0
        terms = np.exp(p) * (p - q)
    return np.maximum(np.nansum(terms, axis=1), 0.0)
