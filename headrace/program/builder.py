"""Records a program, checking widths as it goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from headrace.core.cache import CacheKind
from headrace.core.errors import ConfigurationError
from headrace.program import mixture_ops, ops, recurrent_ops
from headrace.program.cache import AttentionEntry, CacheSpec, StateEntry
from headrace.program.ops import Activation, Buffer, Op, WeightSpec
from headrace.program.program import Program, verb
from headrace.program.rope import Rotation


class ProgramError(ConfigurationError):
    """An architecture recorded ops that do not fit together."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Canonical weight names of one layer: `layer["attn_q"]` is "blk.3.attn_q"."""

    index: int

    def __getitem__(self, name: str) -> str:
        return f"blk.{self.index}.{name}"


@dataclass(slots=True)
class _Group:
    kind: CacheKind
    window: int
    entries: list[AttentionEntry | StateEntry] = field(default_factory=list)


class Builder:
    """Verbs that record ops. Each returns the buffer the op writes; weights go by canonical name.

    Canonical names are those of GGUF files without ".weight"; the bias of weight w is "w.bias". Cache
    groups are made as they are met: attention of one kind and window shares a group, and all states do.
    Raises `ProgramError` when widths, shapes or the order of ops do not fit.
    """

    def __init__(self) -> None:
        self._ops: list[Op] = []
        self._widths: list[int] = []
        self._is_row: list[bool] = []
        self._weights: dict[str, WeightSpec] = {}
        self._groups: list[_Group] = []
        self._head_start: int | None = None

    # Naming

    def layer(self, index: int) -> Layer:
        return Layer(index)

    def width(self, buffer: Buffer) -> int:
        return self._widths[buffer]

    # Verbs

    def embed(self, weight: str, vocab: int, width: int) -> Buffer:
        return self._record(ops.Embed((), self._new, weight, vocab, width))

    def rms_norm(self, x: Buffer, weight: str, eps: float, *, heads: int = 1, offset: float = 0.0) -> Buffer:
        width = self.width(x)
        self._check_divides(heads, width, "rms_norm", weight)
        return self._record(ops.RmsNorm((x,), self._new, weight, width, eps, heads, offset))

    def layer_norm(self, x: Buffer, weight: str, eps: float, *, bias: bool = True) -> Buffer:
        return self._record(ops.LayerNorm((x,), self._new, weight, _bias(weight, bias), self.width(x), eps))

    def linear(self, x: Buffer, weight: str, out_features: int, *, bias: bool = False) -> Buffer:
        return self._record(ops.Linear((x,), self._new, weight, _bias(weight, bias), self.width(x), out_features))

    def head_linear(self, x: Buffer, weight: str, out_features: int, *, heads: int) -> Buffer:
        width = self.width(x)
        self._check_divides(heads, width, "head_linear", weight)
        return self._record(ops.HeadLinear((x,), self._new, weight, heads, width // heads, out_features))

    def rope(self, x: Buffer, rotation: Rotation, *, heads: int, offset: int = 0) -> Buffer:
        width = self.width(x)
        self._check_divides(heads, width, "rope", str(rotation))
        if offset + rotation.dims > width // heads:
            raise ProgramError(
                f"rope turns numbers {offset} to {offset + rotation.dims} of each head, but a head has only "
                f"{width // heads}; check the rotary dimension and head_dim."
            )
        return self._record(ops.Rope((x,), self._new, heads, width // heads, rotation, offset))

    def attend(
        self,
        q: Buffer,
        k: Buffer,
        v: Buffer | None,
        *,
        heads: int,
        kv_heads: int,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        value_width: int = 0,
    ) -> Buffer:
        """With v None (latent attention) `value_width` says how many leading numbers of the keys are the
        values.
        """
        self._check_divides(heads, self.width(q), "attend", "queries")
        self._check_divides(kv_heads, self.width(k), "attend", "keys")
        self._check_divides(kv_heads, heads, "attend", "query heads")
        key_width = self.width(q) // heads
        if v is not None:
            self._check_divides(kv_heads, self.width(v), "attend", "values")
            value_width = self.width(v) // kv_heads
        elif not 0 < value_width <= key_width:
            raise ProgramError(
                f"attend without values needs a value_width from 1 to the key width {key_width}, not {value_width}."
            )
        kind = CacheKind.LATENT if v is None else CacheKind.WINDOW if window else CacheKind.FULL
        group, entry = self._keep(kind, window, AttentionEntry(kv_heads, key_width, 0 if v is None else value_width))
        inputs = (q, k) if v is None else (q, k, v)
        return self._record(
            ops.Attend(
                inputs,
                self._new,
                group,
                entry,
                heads,
                kv_heads,
                key_width,
                value_width,
                scale,
                window,
                softcap,
            )
        )

    def gate(self, kind: Activation, gate: Buffer, up: Buffer) -> Buffer:
        return self._record(ops.Gate((gate, up), self._new, kind, self.width(gate)))

    def act(self, kind: Activation, x: Buffer) -> Buffer:
        return self._record(ops.Act((x,), self._new, kind, self.width(x)))

    def add(self, a: Buffer, b: Buffer) -> Buffer:
        return self._record(ops.Add((a, b), self._new, self.width(a)))

    def scale(self, x: Buffer, factor: float) -> Buffer:
        return self._record(ops.Scale((x,), self._new, self.width(x), factor))

    def softcap(self, x: Buffer, cap: float) -> Buffer:
        return self._record(ops.Softcap((x,), self._new, self.width(x), cap))

    def slice(self, x: Buffer, start: int, stop: int, *, heads: int = 1) -> Buffer:
        """Numbers [start, stop) of each head."""
        width = self.width(x)
        self._check_divides(heads, width, "slice", f"[{start}, {stop})")
        if not 0 <= start < stop <= width // heads:
            raise ProgramError(f"slice takes numbers [{start}, {stop}) of each head, but a head has {width // heads}.")
        return self._record(ops.Slice((x,), self._new, heads, width // heads, start, stop))

    def concat(self, parts: Sequence[Buffer], *, heads: int = 1) -> Buffer:
        for part in parts:
            self._check_divides(heads, self.width(part), "concat", f"%{part}")
        widths = tuple(self.width(part) // heads for part in parts)
        return self._record(ops.Concat(tuple(parts), self._new, heads, widths))

    def route(
        self,
        x: Buffer,
        weight: str,
        num_experts: int,
        top_k: int,
        *,
        score: Literal["softmax", "sigmoid"] = "softmax",
        bias: str | None = None,
        num_groups: int = 1,
        top_groups: int = 1,
        renormalize: bool = True,
        scaling: float = 1.0,
    ) -> Buffer:
        """Router logits (a linear of `weight`) and the choice of experts by them."""
        if score not in ("softmax", "sigmoid"):
            raise ProgramError(f"route scores experts by softmax or sigmoid, not {score!r}.")
        self._check_divides(num_groups, num_experts, "route", weight)
        chosen_from = num_experts // num_groups * top_groups
        if not 0 < top_k <= chosen_from or top_groups > num_groups:
            raise ProgramError(
                f"route chooses {top_k} of {chosen_from} experts ({top_groups} of {num_groups} groups, "
                f"{num_experts} experts in all); top_k and top_groups must be within what there is."
            )
        logits = self.linear(x, weight, num_experts)
        op = mixture_ops.Route(
            (logits,),
            self._new,
            num_experts,
            top_k,
            score,
            bias,
            num_groups,
            top_groups,
            renormalize,
            scaling,
        )
        return self._record(op)

    def experts(
        self,
        x: Buffer,
        routing: Buffer,
        *,
        gate: str,
        up: str,
        down: str,
        num_experts: int,
        intermediate: int,
        kind: Activation = "silu",
    ) -> Buffer:
        top_k = self.width(routing) // 2
        return self._record(
            mixture_ops.Experts(
                (x, routing),
                self._new,
                gate,
                up,
                down,
                num_experts,
                top_k,
                self.width(x),
                intermediate,
                kind,
            )
        )

    def conv(self, x: Buffer, weight: str, kernel: int, *, bias: bool = True) -> Buffer:
        width = self.width(x)
        group, entry = self._keep(CacheKind.STATE, 0, StateEntry((kernel - 1, width)))
        return self._record(
            recurrent_ops.Conv((x,), self._new, group, entry, weight, _bias(weight, bias), width, kernel)
        )

    def ssm_scan(self, x: Buffer, dt: Buffer, b: Buffer, c: Buffer, *, a: str, d: str) -> Buffer:
        width, state_size = self.width(x), self.width(b)
        group, entry = self._keep(CacheKind.STATE, 0, StateEntry((width, state_size)))
        return self._record(recurrent_ops.SsmScan((x, dt, b, c), self._new, group, entry, a, d, width, state_size))

    def select_rows(self, x: Buffer) -> Buffer:
        """Everything after this runs on the rows that are read out."""
        if self._head_start is not None:
            raise ProgramError("select_rows was recorded twice; a program has one head.")
        self._head_start = len(self._ops)
        return self._record(ops.SelectRows((x,), self._new, self.width(x)))

    def finish(self, logits: Buffer) -> Program:
        """The program whose last op writes `logits`."""
        if self._head_start is None:
            raise ProgramError("the program never selects rows; call select_rows before the output norm.")
        if not self._ops or self._ops[-1].output != logits:
            raise ProgramError(f"finish takes the buffer of the last op, not %{logits}.")
        cache = tuple(
            CacheSpec(_group_name(g.kind, g.window), g.kind, g.window, tuple(g.entries)) for g in self._groups
        )
        return Program(tuple(self._ops), tuple(self._widths), dict(self._weights), cache, self._head_start)

    # Checks

    @property
    def _new(self) -> Buffer:
        return Buffer(len(self._widths))

    def _record(self, op: Op) -> Buffer:
        is_row = self._head_start is not None
        selects = isinstance(op, ops.SelectRows)
        for source, expected in zip(op.inputs, op.input_widths, strict=True):
            if self._widths[source] != expected:
                raise ProgramError(
                    f"{self._label(op)} reads {expected} numbers per row, but %{source} "
                    f"({verb(self._ops[source])}) holds {self._widths[source]}; check the config's sizes."
                )
            if self._is_row[source] != (is_row and not selects):
                raise ProgramError(
                    f"{self._label(op)} mixes rows of the step with rows that are read out: "
                    f"%{source} lies on the other side of select_rows."
                )
        if is_row and isinstance(op, ops.Attend | recurrent_ops.RecurrentOp | ops.Embed):
            raise ProgramError(f"{self._label(op)} needs every token of the step; record it before select_rows.")
        for spec in op.weights:
            known = self._weights.setdefault(spec.name, spec)
            if known != spec:
                raise ProgramError(
                    f"{self._label(op)} wants shape {list(spec.shape)}, but an earlier op reads "
                    f"{spec.name} as {list(known.shape)}."
                )
        self._ops.append(op)
        self._widths.append(op.output_width)
        self._is_row.append(is_row)
        return op.output

    def _keep(self, kind: CacheKind, window: int, entry: AttentionEntry | StateEntry) -> tuple[int, int]:
        """(group, entry) indices of a new cache entry."""
        for index, group in enumerate(self._groups):
            if group.kind is kind and group.window == window:
                group.entries.append(entry)
                return index, len(group.entries) - 1
        self._groups.append(_Group(kind, window, [entry]))
        return len(self._groups) - 1, 0

    def _check_divides(self, parts: int, width: int, name: str, what: str) -> None:
        if parts <= 0 or width % parts:
            raise ProgramError(
                f"{name} of {what}: {width} cannot be cut into {parts} equal parts; check the config's head counts."
            )

    @staticmethod
    def _label(op: Op) -> str:
        return " ".join((verb(op), *(w.name for w in op.weights)))


def _bias(weight: str, present: bool) -> str | None:
    return f"{weight}.bias" if present else None


def _group_name(kind: CacheKind, window: int) -> str:
    return f"{kind.value} {window}" if window else kind.value
