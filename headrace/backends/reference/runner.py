"""The reference model with a cache: what an executor runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from headrace.backends.inputs import BatchInputs
from headrace.backends.kv_store import KVStore
from headrace.backends.reference.meanings import Floats
from headrace.backends.reference.model import ReferenceModel
from headrace.core.cache import Copy


@dataclass(frozen=True, slots=True)
class ReferenceRunner:
    model: ReferenceModel
    store: KVStore

    @property
    def numerics(self) -> str:
        return "reference"

    def apply(self, copies: Iterable[Copy]) -> None:
        self.store.apply(copies)

    def run(self, inputs: BatchInputs) -> Iterator[tuple[slice, Floats]]:
        return self.model.run(inputs, self.store)

    def hidden(self, first: int, count: int) -> Floats:
        return self.model.hidden(first, count)
