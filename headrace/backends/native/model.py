"""A Program loaded into the C++ executor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.backends.inputs import BatchInputs, Ints
from headrace.backends.native import _native
from headrace.backends.native.lowering import Call, Part, Weight, lower, place
from headrace.backends.native.placing import Arena, Ref
from headrace.backends.reference.hidden import HiddenStates
from headrace.core.cache import CacheGroup, CacheKind, Copy
from headrace.core.errors import ConfigurationError
from headrace.core.plan import StepPlan
from headrace.program.cache import StateEntry
from headrace.program.mixture_ops import Route
from headrace.program.ops import Attend
from headrace.program.program import Program
from headrace.program.rope import Rotation

LOGIT_TILE_BYTES = 64 << 20
"""Logits are made in tiles of readout rows of at most this size."""
KERNEL_VERSION = 3
"""Changes whenever a change of the kernels changes bits."""
PACKED_AT_ONCE = 256 << 20
"""Bytes of weights as stored, in one native call."""
NUM_TEXTS = 4
"""Of `UNIT` tokens each, to find outliers by."""
UNIT = 16
"""Positions that the cache's layout interleaves: block sizes are multiples of it."""

PACKINGS = {name: getattr(_native.Packing, name) for name in _native.Packing.__members__}
FLOAT_PACKINGS = ("F32", "F16", "BF16")

Floats = NDArray[np.float32]


class StoredFormat(Protocol):
    @property
    def name(self) -> str: ...


class WeightTensor(Protocol):
    """What a checkpoint offers for a weight: at least its values, and where it is stored plainly, the stored rows."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def dequantize(self) -> Floats: ...


NUMBERS = (
    *("temperature", "top_k", "top_p", "min_p", "uniform"),
    *("repetition", "presence", "frequency"),
    *("typical_p", "xtc_threshold"),
)
"""Columns of `Readouts.numbers`, in the order of `Readouts::Number` in native/model.h."""


@dataclass(slots=True)
class Readouts:
    """What is asked of each of a step's n readouts, and where the answers go.

    Asked: `targets` [n] (the token to score, -1: sample one), `num_top` [n] (-1: no logprob; k: also of the k most
    probable tokens), `numbers` [n, 10], and four lists of ids per readout (seen, generated, biased, banned) as
    stretches of `ids` and `values` that begin at `starts` [4 n + 1]; `mask_rows` [n]: the row of `masks` [rows,
    vocab_size bits in whole words] that says which tokens a grammar allows, -1: all. Ids from `vocab_size` on are
    padding.
    Answered: `tokens`, `logprobs`, `ranks` [n], `top_ids`, `top_logprobs` [n, most num_top].
    """

    vocab_size: int
    targets: NDArray[np.int32]
    num_top: NDArray[np.int32]
    numbers: NDArray[np.float64]
    ids: NDArray[np.int32]
    values: NDArray[np.float64]
    starts: NDArray[np.int32]
    mask_rows: NDArray[np.int32]
    masks: NDArray[np.uint32]
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float64]
    ranks: NDArray[np.int32]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float64]
    has_logprobs: bool
    """Some readout wants one."""


class NativeModel:
    """A program, its packed weights and its cache, run by the C++ threads.

    One native call computes a step's tokens and the first tile of its logits. Same file, same instruction set and same
    kernel version give the same bits, whatever is in the batch and however many threads run.
    """

    def __init__(
        self,
        program: Program,
        weights: Mapping[str, WeightTensor],
        groups: Sequence[CacheGroup],
        num_blocks: Sequence[int],
        *,
        max_tokens: int,
        context_length: int,
        num_threads: int,
        kv_f16: bool = True,
        activations: str = "mixed",
        isa: str = "",
        progress: Callable[[int, int, str], None] = lambda num_done, num_total, what: None,
        before_packing: Callable[[], None] | None = None,
    ) -> None:
        """`num_blocks` per group; `max_tokens` is the largest step. `activations`, the inputs of quantized products:
        "int8", "mixed" (int8, but the largest numbers of a row float32), "int16". Packs all weights, with all threads;
        `before_packing` is called before the last of that, which is native and leaves the interpreter to others.

        Raises `ConfigurationError` for an op without a kernel or a block size the cache cannot be laid out in.
        """
        if any(group.block_size % UNIT for group in groups):
            raise ConfigurationError(
                f"block_size is {groups[0].block_size}; the native backend needs a multiple of {UNIT}."
            )
        self._program = program
        self._kv_f16 = kv_f16
        self._activations = activations
        self._context_length = context_length
        self._native = _native.Model(num_threads, max_tokens, 1 + (activations == "int16"), isa)
        self._weights = weights
        self._matrices: dict[Weight, int] = {}
        self._unpacked: list[NDArray[np.uint8]] = []
        """As stored; the native model reads them when it packs."""
        self._num_unpacked = 0
        self._vectors: dict[Weight, int] = {}
        self._tables: dict[Rotation, int] = {}
        self._lists: dict[Ref, int] = {}
        """Of channels, for outliers."""
        self._progress = progress
        self._num_done, self._num_total = 0, sum(getattr(w, "nbytes", 0) for w in weights.values())
        self._caches = self._add_caches(groups, num_blocks, kv_f16)
        lowered = lower(program, self._is_quantized, has_outliers=activations == "mixed")
        trunk = place(lowered.trunk, keep=lowered.head[0].reads[0])
        head = place(lowered.head, keep=lowered.last)
        for call in lowered.trunk:
            self._add(call, trunk, trunk)
        self._native.begin_head()
        for index, call in enumerate(lowered.head):
            self._add(call, trunk if index == 0 else head, head)
        self._rows_per_tile = max(1, LOGIT_TILE_BYTES // (4 * program.vocab_size))
        self._trunk_rows = self._buffer(lowered.head[0].reads[0], trunk)
        self._hidden = HiddenStates(program, lambda name: np.asarray(weights[name].dequantize(), np.float32))
        assert lowered.last is not None
        self._last = self._buffer(lowered.last, head)
        self._native.finish(trunk.width, head.width, self._rows_per_tile)
        texts = self._texts(max_tokens) if self._lists else []
        if before_packing is not None:
            before_packing()
        progress(self._num_done, max(self._num_done, self._num_total), "packing weights")
        self._native.load(texts, self._last)
        self._packed()
        progress(self._num_total, self._num_total, "packing weights")  # vectors are not counted one by one

    @property
    def numerics(self) -> str:
        kv = "f16" if self._kv_f16 else "f32"
        return f"native-{KERNEL_VERSION}/{self.isa}/{kv}/{self._activations}"

    @property
    def isa(self) -> str:
        return self._native.isa

    @property
    def packed_bytes(self) -> int:
        return self._native.packed_bytes

    @property
    def threads(self) -> tuple[int, int]:
        """All, and those that took part in the latest step: one whose core has other work sits out for a while."""
        return self._native.num_threads, self._native.num_attending

    def touch_cache(self, most_bytes: int) -> None:
        """Have the system give up to so many bytes of the cache now, ahead of use: a page's first touch can be slow."""
        self._native.touch_cache(most_bytes)

    def touch_cache_meanwhile(self, most_bytes: int) -> None:
        """The same on a thread of its own, in moments without a step."""
        self._native.touch_cache_meanwhile(most_bytes)

    # --- running ---------------------------------------------------------------------------------------------------

    def apply(self, copies: Iterable[Copy]) -> None:
        """Copy whole blocks of the cache, in order."""
        for copy in copies:
            self._native.copy_block(copy.group, copy.source, copy.target)

    def run(self, inputs: BatchInputs) -> Iterator[tuple[slice, Floats]]:
        """Compute the step's tokens now; then (slice of readouts, logits [rows, vocab]) as they are asked for. Logits
        are views that hold until the next tile. For whoever wants logits themselves; serving uses `step`."""
        self._native.run_trunk(*self._arrays(inputs))
        return self._logits(inputs.readout_rows)

    def step(self, inputs: BatchInputs, readouts: Readouts) -> None:
        """One native call: compute the step's tokens and fill in what its readouts ask for."""
        self._native.run(
            *self._arrays(inputs),
            inputs.readout_rows,
            readouts.targets,
            readouts.num_top,
            readouts.numbers.ravel(),
            readouts.ids,
            readouts.values,
            readouts.starts,
            readouts.mask_rows,
            readouts.masks.ravel(),
            readouts.tokens,
            readouts.logprobs,
            readouts.ranks,
            readouts.top_ids.ravel(),
            readouts.top_logprobs.ravel(),
            readouts.top_ids.shape[1],
            readouts.vocab_size,
            self._last,
        )

    def hidden(self, first: int, count: int) -> Floats:
        """Hidden states [count, width] of rows of the step that ran last: what the head multiplies by its matrix."""
        return self._hidden.of(self._native.trunk_rows(self._trunk_rows)[first : first + count])

    @staticmethod
    def _arrays(inputs: BatchInputs) -> tuple[Any, ...]:
        """(token ids, positions, tree, spans, tables, where each table begins)."""
        tree = None if inputs.is_chain else _tree(inputs)
        return inputs.token_ids, inputs.positions, tree, inputs.span_numbers, inputs.tables, inputs.table_starts

    def _logits(self, rows: NDArray[np.int32]) -> Iterator[tuple[slice, Floats]]:
        for begin in range(0, len(rows), self._rows_per_tile):
            tile = slice(begin, min(begin + self._rows_per_tile, len(rows)))
            yield tile, self._native.run_head(np.ascontiguousarray(rows[tile]), self._last)

    # --- loading ---------------------------------------------------------------------------------------------------

    def _is_quantized(self, name: str) -> bool:
        return _packing_of(self._weights[name]) not in FLOAT_PACKINGS

    def _add_caches(
        self, groups: Sequence[CacheGroup], num_blocks: Sequence[int], kv_f16: bool
    ) -> dict[tuple[int, int], int]:
        added: dict[tuple[int, int], int] = {}
        for g, (group, spec, count) in enumerate(zip(groups, self._program.cache, num_blocks, strict=True)):
            for e, entry in enumerate(spec.entries):
                if isinstance(entry, StateEntry):
                    added[g, e] = self._native.add_state(g, count, entry.size)
                else:
                    added[g, e] = self._native.add_cache(
                        g, group.block_size, count, kv_f16, entry.kv_heads, entry.key_width, entry.value_width
                    )
        return added

    def _add(self, call: Call, sources: Arena, targets: Arena) -> None:
        """Resolve a call's arguments and add it to the native list. The head's first op reads the trunk's arena."""

        def resolve(name: str, value: Any) -> Any:
            match value:
                case Ref():
                    return self._buffer(value, sources if name == "in_" else targets)
                case Weight(is_vector=True):
                    return self._vector(value)
                case Weight():
                    return self._matrix(value)
                case Rotation():
                    return self._table(value)
                case Attend():
                    return _native.AttentionShape(
                        value.heads,
                        value.kv_heads,
                        value.key_width,
                        value.value_width,
                        value.scale,
                        value.window,
                        value.softcap,
                    )
                case Route():
                    return _native.RouteShape(
                        value.num_experts,
                        value.top_k,
                        value.score == "sigmoid",
                        value.num_groups,
                        value.top_groups,
                        value.renormalize,
                        value.scaling,
                    )
                case Part():
                    bias = -1 if value.bias is None else self._vector(value.bias)
                    return _native.LinearPart(
                        self._matrix(value.weight), bias, self._buffer(value.out, targets), value.accumulate
                    )
                case list():
                    return [resolve(name, item) for item in value]
                case (int(), int()):
                    return self._caches[value]
                case None:
                    return -1
                case str():
                    return getattr(_native.Elementwise, value)
                case _:
                    return value

        getattr(self._native, call.method)(**{name: resolve(name, value) for name, value in call.arguments.items()})

    def _buffer(self, ref: Ref, arena: Arena) -> _native.Buffer:
        if ref.has_fixed and ref not in self._lists:
            self._lists[ref] = self._native.add_list(ref.width, ref.num_outliers)
        place = arena.offsets[ref], ref.width, ref.is_quantized, ref.num_outliers
        return _native.Buffer(*place, self._lists.get(ref, -1))

    def _texts(self, max_tokens: int) -> list[tuple[Ints, ...]]:
        """Steps by which the channels that hold outliers are fixed: those that do in a few short texts of arbitrary
        tokens, always the same, hence the same bits. They use the first block of the cache, one after the other."""
        tokens = np.linspace(0, self._program.vocab_size - 1, NUM_TEXTS * UNIT).astype(np.int32).reshape(-1, UNIT)
        pieces = [(text[start : start + max_tokens], start) for text in tokens for start in range(0, UNIT, max_tokens)]
        return [self._text(np.ascontiguousarray(piece), start) for piece, start in pieces]

    def _text(self, tokens: Ints, start: int) -> tuple[Ints, ...]:
        """A step of one sequence, `start` of whose tokens are in the first block of the cache: (token ids, positions,
        spans, tables, where each table begins)."""
        state = [0 if start else -1, 0]  # to read, to write
        tables = [state if spec.kind is CacheKind.STATE else [0] for spec in self._program.cache]
        positions = np.arange(start, start + len(tokens), dtype=np.int32)
        spans = np.array([start, len(tokens), 0], np.int32)
        starts = np.cumsum([0, *(len(table) for table in tables[:-1])]).astype(np.int32)
        return tokens, positions, spans, np.array([block for table in tables for block in table], np.int32), starts

    def _matrix(self, weight: Weight) -> int:
        if weight not in self._matrices:
            tensor = self._weights[weight.name]
            packing = _packing_of(tensor)
            if _is_plain(tensor):
                stored = tensor.data if weight.index is None else tensor.data[weight.index]  # type: ignore[attr-defined]
            else:
                values = tensor.dequantize()
                values = values if weight.index is None else values[weight.index].copy()  # not the whole stack
                stored = np.ascontiguousarray(values, np.float32).view(np.uint8)
            width = tensor.shape[-1]
            stored = np.ascontiguousarray(stored)
            self._matrices[weight] = self._native.add_matrix(PACKINGS[packing], width, stored)
            self._unpacked.append(stored)
            self._num_unpacked += stored.nbytes
            if self._num_unpacked >= PACKED_AT_ONCE:
                self._native.pack()
                self._packed()
        return self._matrices[weight]

    def _packed(self) -> None:
        """All matrices that have been added."""
        self._num_done += self._num_unpacked
        self._num_unpacked = 0
        self._unpacked.clear()
        self._progress(self._num_done, max(self._num_done, self._num_total), "packing weights")

    def _vector(self, weight: Weight) -> int:
        if weight not in self._vectors:
            values = self._weights[weight.name].dequantize()
            values = values.T if weight.is_transposed else values
            self._vectors[weight] = self._native.add_vector(np.ascontiguousarray(values, np.float32).ravel())
        return self._vectors[weight]

    def _table(self, rotation: Rotation) -> int:
        """Cosines and sines of every position: [context, 2 * pairs]."""
        if rotation not in self._tables:
            angles = np.arange(self._context_length)[:, None] * np.array(rotation.frequencies)
            turns = np.concatenate((np.cos(angles), np.sin(angles)), axis=1) * rotation.attention_factor
            self._tables[rotation] = self._native.add_vector(turns.astype(np.float32).ravel())
        return self._tables[rotation]


def _is_plain(tensor: WeightTensor) -> bool:
    """The checkpoint holds the rows as they are, in a format that is packed without a change of values."""
    return hasattr(tensor, "data") and tensor.format.name in PACKINGS  # type: ignore[attr-defined]


def _packing_of(tensor: WeightTensor) -> str:
    return tensor.format.name if _is_plain(tensor) else "F32"  # type: ignore[attr-defined]


def _tree(inputs: BatchInputs) -> NDArray[np.int32]:
    """Per row its parent's row within the span (-1: the cache before it)."""
    _, counts, first_rows = inputs.span_numbers.reshape(-1, 3).T
    parents = inputs.parents - np.repeat(first_rows, counts)
    return np.where(inputs.parents < 0, StepPlan.IN_CACHE, parents).astype(np.int32)
