"""What goes out of /v1/embeddings."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from headrace.server.generation import Delta
from headrace.server.responses import Outcome

_encode = msgspec.json.Encoder().encode


class Embedding(Struct):
    index: int
    embedding: list[float] | str
    """Numbers, or base64 of their float32 bytes, little-endian."""
    object: str = "embedding"


class EmbeddingUsage(Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingReply(Struct):
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: str = "list"


@dataclass(frozen=True, slots=True)
class EmbeddingWriter:
    """A `Writer` of calls that are never streamed."""

    model: str
    is_base64: bool
    dimensions: int | None
    """None: all."""

    def chunks(self, deltas: Sequence[Delta]) -> bytes:
        return b""

    def tail(self, outcome: Outcome) -> bytes:
        return b""

    def whole(self, deltas: Iterable[Delta], outcome: Outcome) -> bytes:
        data = [Embedding(index, self._embedding(pooled)) for index, pooled in enumerate(outcome.pooled)]
        num_tokens = outcome.usage.prompt_tokens
        return _encode(EmbeddingReply(data, self.model, EmbeddingUsage(num_tokens, num_tokens)))

    def _embedding(self, pooled: NDArray[np.float64]) -> list[float] | str:
        """Of length 1, so that it does not matter that a mean comes as a sum."""
        vector = pooled[: self.dimensions]
        length = np.sqrt(vector @ vector)
        vector = vector / length if length > 0 else vector
        if self.is_base64:
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        return np.round(vector, 8).tolist()  # about float32's precision: half the bytes of all digits
