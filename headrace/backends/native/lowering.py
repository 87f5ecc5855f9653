"""From a Program to the native list: fused ops over buffers in an arena.

What is fused: norms write quantized activations where only quantized products read them; products of the same input
are one op (q, k, v); gate, up and activation are one; a residual is added where the product ends; rope works in place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.backends.native import _native
from headrace.backends.native.placing import Arena, Ref
from headrace.core.errors import ConfigurationError
from headrace.program import mixture_ops, ops, recurrent_ops
from headrace.program.ops import Buffer, Op
from headrace.program.program import Program

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "relu": 2, "sigmoid": 3, "softplus": 4}
"""Numbers of `Activation` in native/rowwise.h."""
ROW_BY_ROW = frozenset(_native.ROW_BY_ROW)
"""The calls whose native ops are `RowOp`s."""
NORM_OUTLIERS, GATE_OUTLIERS, HEAD_OUTLIERS = 8, 8, 24
"""Numbers of a row that stay floats, by what makes the row."""


@dataclass(frozen=True, slots=True)
class Call:
    """One op of the native list: a method of `_native.Model` and its arguments.

    Buffers are `Ref`s, weights `Weight`s, rotations `Table`s until the model resolves them.
    """

    method: str
    arguments: dict[str, Any]
    reads: tuple[Ref, ...]
    writes: tuple[Ref, ...]


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix or vector by canonical name; `index` picks one of a stack, `is_transposed` turns [a, b] to [b, a]."""

    name: str
    index: int | None = None
    is_vector: bool = False
    is_transposed: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """One product of a `linear` call."""

    weight: Weight
    bias: Weight | None
    out: Ref
    accumulate: bool


@dataclass(slots=True)
class Lowered:
    """The native list of a program, in the order of its run."""

    trunk: list[Call] = field(default_factory=list)
    head: list[Call] = field(default_factory=list)
    last: Ref | None = None


def lower(program: Program, is_quantized: Callable[[str], bool], has_outliers: bool) -> Lowered:
    """`is_quantized(weight)`: its products want quantized activations, whose largest numbers stay floats if
    `has_outliers`. Raises `ConfigurationError` for an op that the native backend has no kernel for."""
    return _Lowering(program, is_quantized, has_outliers).run()


class _Lowering:
    def __init__(self, program: Program, is_quantized: Callable[[str], bool], has_outliers: bool) -> None:
        self.program = program
        self.is_quantized = is_quantized
        self.has_outliers = has_outliers
        self.producer: dict[Buffer, Op] = {op.output: op for op in program.ops}
        self.position = {id(op): i for i, op in enumerate(program.ops)}
        self.readers: dict[Buffer, list[Op]] = defaultdict(list)
        for op in program.ops:
            for buffer in dict.fromkeys(op.inputs):
                self.readers[buffer].append(op)
        self.done: set[int] = set()
        """Ops (by id) that an earlier call has taken over."""
        self.refs: dict[Buffer, Ref] = {}
        self.quantized: dict[Buffer, Ref] = {}
        self.calls: list[Call] = []

    def run(self) -> Lowered:
        lowered = Lowered()
        for index, op in enumerate(self.program.ops):
            if index == self.program.head_start:
                lowered.trunk, self.calls = self.calls, []
            if id(op) not in self.done:
                self._lower(op)
        lowered.head = self.calls
        lowered.last = self.ref(self.program.ops[-1].output)
        return lowered

    # --- buffers ---------------------------------------------------------------------------------------------------

    def ref(self, buffer: Buffer) -> Ref:
        if buffer not in self.refs:
            self.refs[buffer] = Ref(self.program.widths[buffer])
        return self.refs[buffer]

    def quantized_ref(self, buffer: Buffer) -> Ref:
        """The buffer's quantized form, made now if nobody has."""
        if buffer not in self.quantized:
            made = self._new_quantized(buffer)
            self._emit_rows("quantize", {"in_": self.ref(buffer), "out": made}, self.ref(buffer), made)
        return self.quantized[buffer]

    def _new_quantized(self, buffer: Buffer) -> Ref:
        width = self.program.widths[buffer]
        num_outliers, has_fixed = self._outliers(buffer, width)
        self.quantized[buffer] = Ref(width, is_quantized=True, num_outliers=num_outliers, has_fixed=has_fixed)
        return self.quantized[buffer]

    def _outliers(self, buffer: Buffer, width: int) -> tuple[int, bool]:
        """(how many, whether the same channels in all rows), by what it brings (docs/architecture.md): few channels of
        a norm's output are large in every row, and the head's input is worth most; of a gated product others are in
        each row; what attention puts out has none."""
        if not self.has_outliers or width > _native.MOST_WIDTH_WITH_OUTLIERS:
            return 0, False
        match self.producer[buffer]:
            case ops.RmsNorm() as norm:
                is_head = self.position[id(norm)] >= self.program.head_start
                return min(HEAD_OUTLIERS if is_head else NORM_OUTLIERS, width // 8), True
            case ops.Gate():
                return min(GATE_OUTLIERS, width // 32), False
        return 0, False

    def emit(self, method: str, arguments: dict[str, Any], reads: list[Ref], writes: list[Ref]) -> None:
        self.calls.append(Call(method, arguments, tuple(reads), tuple(writes)))

    def _emit_rows(self, method: str, arguments: dict[str, Any], source: Ref, out: Ref) -> None:
        """Of an op that may write whole quantized rows."""
        self.emit(method, arguments, [source], [out])
        if out.num_outliers:
            self.emit("index_outliers", {"rows": out}, [out], [])

    def wants_quantized(self, op: Op) -> bool:
        return isinstance(op, ops.Linear) and self.is_quantized(op.weight)

    def only_quantized_readers(self, buffer: Buffer) -> bool:
        readers = self.readers[buffer]
        return bool(readers) and all(self.wants_quantized(op) for op in readers)

    # --- ops -------------------------------------------------------------------------------------------------------

    def _lower(self, op: Op) -> None:
        match op:
            case ops.Embed():
                out = self.ref(op.output)
                self.emit("embed", {"matrix": Weight(op.weight), "out": out}, [], [out])
            case ops.RmsNorm():
                self._norm(op)
            case ops.Linear():
                self._linear(op)
            case ops.HeadLinear():
                self._simple(op, "head_linear", {"matrices": [Weight(op.weight, index) for index in range(op.heads)]})
            case ops.Rope():
                self._rope(op)
            case ops.Attend():
                self._attend(op)
            case ops.Gate():
                self._element(op, "GATE", kind=ACTIVATIONS[op.kind])
            case ops.Act():
                self._element(op, "ACT", kind=ACTIVATIONS[op.kind])
            case ops.Add():
                self._element(op, "ADD")
            case ops.Scale():
                self._element(op, "SCALE", number=op.factor)
            case ops.Softcap():
                self._element(op, "SOFTCAP", number=op.cap)
            case ops.Slice():
                copied = {"heads": op.heads, "start": op.start, "to_start": 0, "width": op.stop - op.start}
                self._simple(op, "copy_heads", copied)
            case ops.Concat():
                self._concat(op)
            case ops.SelectRows():
                self._simple(op, "select_rows", {})
            case mixture_ops.Route():
                self._route(op)
            case mixture_ops.Experts():
                self._experts(op)
            case recurrent_ops.Conv() | recurrent_ops.SsmScan():
                self._recurrent(op)
            case _:
                raise ConfigurationError(
                    f"the native backend has no kernel for {type(op).__name__}; use --backend reference."
                )

    def _simple(self, op: Op, method: str, arguments: dict[str, Any]) -> None:
        source, out = self.ref(op.inputs[0]), self.ref(op.output)
        self.emit(method, {"in_": source, "out": out, **arguments}, [source], [out])

    def _norm(self, op: ops.RmsNorm) -> None:
        source = self.ref(op.inputs[0])
        is_quantized = op.heads == 1 and self.only_quantized_readers(op.output)
        out = self._new_quantized(op.output) if is_quantized else self.ref(op.output)
        arguments = {"weight": Weight(op.weight, is_vector=True), "heads": op.heads, "eps": op.eps, "offset": op.offset}
        self._emit_rows("norm", {"in_": source, "out": out, **arguments}, source, out)

    def _linear(self, op: ops.Linear) -> None:
        """This product and all others of the same input."""
        gated = self._gate_of(op)
        if gated is not None:
            self._gated_linear(*gated)
            return
        buffer = op.inputs[0]
        source = self.quantized_ref(buffer) if self.wants_quantized(op) else self.ref(buffer)
        siblings = [
            other
            for other in self.readers[buffer]
            if isinstance(other, ops.Linear)
            and id(other) not in self.done
            and self.wants_quantized(other) == self.wants_quantized(op)
            and (other is op or (self._gate_of(other) is None and self._residual_of(other) is None))
        ]
        parts = [self._part(sibling) for sibling in siblings]
        outs = [part.out for part in parts]
        reads = [source, *(part.out for part in parts if part.accumulate)]
        self.emit("linear", {"in_": source, "parts": parts}, reads, outs)
        self.done.update(id(sibling) for sibling in siblings)

    def _part(self, op: ops.Linear) -> Part:
        bias = None if op.bias is None else Weight(op.bias, is_vector=True)
        add = self._residual_of(op)
        if add is None:
            return Part(Weight(op.weight), bias, self.ref(op.output), accumulate=False)
        held = add.inputs[0] if add.inputs[1] == op.output else add.inputs[1]
        self.refs[add.output] = self.ref(held)  # the sum takes the residual's place
        self.done.add(id(add))
        return Part(Weight(op.weight), bias, self.ref(held), accumulate=True)

    def _residual_of(self, op: ops.Linear) -> ops.Add | None:
        """The Add that alone reads this product, if the other summand is there by now and read by nobody later."""
        readers = self.readers[op.output]
        if len(readers) != 1 or not isinstance(readers[0], ops.Add):
            return None
        add = readers[0]
        held = add.inputs[0] if add.inputs[1] == op.output else add.inputs[1]
        if held == op.output or self.position[id(self.producer[held])] > self.position[id(op)]:
            return None
        last = max(self.position[id(reader)] for reader in self.readers[held])
        return add if last == self.position[id(add)] else None

    def _gate_of(self, op: ops.Linear) -> tuple[ops.Linear, ops.Linear, ops.Gate] | None:
        """(gate, up, the Gate) if this product is half of a gated pair that nobody else reads."""
        readers = self.readers[op.output]
        if len(readers) != 1 or not isinstance(readers[0], ops.Gate) or op.bias is not None:
            return None
        pair = [self.producer[buffer] for buffer in readers[0].inputs]
        gate, up = pair
        if not (isinstance(gate, ops.Linear) and isinstance(up, ops.Linear)) or gate is up:
            return None
        fits = (
            gate.inputs == up.inputs
            and gate.bias is None
            and up.bias is None
            and len(self.readers[gate.output]) == 1
            and len(self.readers[up.output]) == 1
            and self.wants_quantized(gate) == self.wants_quantized(up)
        )
        return (gate, up, readers[0]) if fits else None

    def _gated_linear(self, gate: ops.Linear, up: ops.Linear, op: ops.Gate) -> None:
        buffer = gate.inputs[0]
        source = self.quantized_ref(buffer) if self.wants_quantized(gate) else self.ref(buffer)
        # A tile knows 32 numbers of each row: enough to quantize them, not to tell the row's outliers.
        is_quantized = self.only_quantized_readers(op.output) and not self.has_outliers
        out = self._new_quantized(op.output) if is_quantized else self.ref(op.output)
        arguments = {"gate": Weight(gate.weight), "up": Weight(up.weight), "kind": ACTIVATIONS[op.kind]}
        self.emit("gated_linear", {"in_": source, "out": out, **arguments}, [source], [out])
        self.done.update((id(gate), id(up), id(op)))

    def _rope(self, op: ops.Rope) -> None:
        source = self.ref(op.inputs[0])
        if len(self.readers[op.inputs[0]]) == 1:
            self.refs[op.output] = source
        out = self.ref(op.output)
        rotation = op.rotation
        arguments = {
            "table": rotation,
            "heads": op.heads,
            "start": op.offset,
            "pairs": len(rotation.frequencies),
            "interleaved": rotation.style == "interleaved",
        }
        self.emit("rope", {"in_": source, "out": out, **arguments}, [source], [out])

    def _attend(self, op: ops.Attend) -> None:
        q, k = self.ref(op.inputs[0]), self.ref(op.inputs[1])
        v = k if op.is_latent else self.ref(op.inputs[2])
        where = {"group": op.group, "cache": (op.group, op.entry)}
        self.emit("store_kv", {"k": k, "v": v, "is_latent": op.is_latent, **where}, [k, v], [])
        out = self.ref(op.output)
        self.emit("attend", {"q": q, "out": out, "shape": op, **where}, [q], [out])

    def _element(self, op: Op, verb: str, kind: int = 0, number: float = 0.0) -> None:
        a = self.ref(op.inputs[0])
        b = self.ref(op.inputs[-1])
        out = self.ref(op.output)
        arguments = {"verb": verb, "kind": kind, "number": number, "a": a, "b": b, "out": out}
        self.emit("element", arguments, [a, b], [out])

    def _concat(self, op: ops.Concat) -> None:
        out, to_start = self.ref(op.output), 0
        for buffer, width in zip(op.inputs, op.widths, strict=True):
            source = self.ref(buffer)
            arguments = {"heads": op.heads, "start": 0, "to_start": to_start, "width": width}
            # `out` counts as read: its earlier parts must stay where they are.
            self.emit("copy_heads", {"in_": source, "out": out, **arguments}, [source, out], [out])
            to_start += width

    def _route(self, op: mixture_ops.Route) -> None:
        bias = None if op.bias is None else Weight(op.bias, is_vector=True)
        self._simple(op, "route", {"bias": bias, "shape": op})

    def _experts(self, op: mixture_ops.Experts) -> None:
        buffer, routing, out = op.inputs[0], self.ref(op.inputs[1]), self.ref(op.output)

        def source(weight: str) -> Ref:
            return self.quantized_ref(buffer) if self.is_quantized(weight) else self.ref(buffer)

        def stack(weight: str) -> list[Weight]:
            return [Weight(weight, index) for index in range(op.num_experts)]

        gate_in, up_in = source(op.gate), source(op.up)
        inner = Ref(op.top_k * op.intermediate, is_quantized=self.is_quantized(op.down))
        arguments = {"gate_in": gate_in, "up_in": up_in, "routing": routing, "out": inner, "top_k": op.top_k}
        arguments |= {"gate": stack(op.gate), "up": stack(op.up), "kind": ACTIVATIONS[op.kind]}
        self.emit("experts_gated", arguments, [gate_in, up_in, routing], [inner])
        outputs = Ref(op.top_k * op.hidden)
        arguments = {"in_": inner, "routing": routing, "out": outputs, "down": stack(op.down), "top_k": op.top_k}
        self.emit("experts_down", arguments, [inner, routing], [outputs])
        arguments = {"in_": outputs, "routing": routing, "out": out, "top_k": op.top_k}
        self.emit("experts_sum", arguments, [outputs, routing], [out])

    def _recurrent(self, op: recurrent_ops.Conv | recurrent_ops.SsmScan) -> None:
        where: Mapping[str, Any] = {"group": op.group, "state": (op.group, op.entry)}
        sources = [self.ref(buffer) for buffer in op.inputs]
        out = self.ref(op.output)
        if isinstance(op, recurrent_ops.Conv):
            weight = Weight(op.weight, is_vector=True, is_transposed=True)
            bias = None if op.bias is None else Weight(op.bias, is_vector=True)
            arguments = {"in_": sources[0], "out": out, "weight": weight, "bias": bias, "kernel": op.kernel}
            self.emit("conv", {**arguments, **where}, sources, [out])
            return
        x, dt, b, c = sources
        arguments = {"x": x, "dt": dt, "b": b, "c": c, "out": out, "state_size": op.state_size}
        scan = {"a": Weight(op.a, is_vector=True, is_transposed=True), "d": Weight(op.d, is_vector=True)}
        self.emit("ssm_scan", {**arguments, **scan, **where}, sources, [out])


def place(calls: list[Call], keep: Ref | None) -> Arena:
    """Where each buffer of the calls lies; `keep` outlives them.

    Row by row ops that follow each other run as one (native/ops.h): one row is through all of them before another has
    begun, and rows of different buffers lie apart differently. So a buffer lives to the end of such a chain.
    """
    arena = Arena()
    chain_end = list(range(len(calls)))
    for index in range(len(calls) - 2, -1, -1):
        if calls[index].method in ROW_BY_ROW and calls[index + 1].method in ROW_BY_ROW:
            chain_end[index] = chain_end[index + 1]
    last_use: dict[Ref, int] = {}
    for index, call in enumerate(calls):
        for ref in (*call.reads, *call.writes):
            last_use[ref] = chain_end[index]
    if keep is not None:
        last_use[keep] = len(calls)
    for index, call in enumerate(calls):
        for ref in call.writes:
            arena.add(ref)
        for ref in [ref for ref in arena.live if last_use[ref] == index]:
            arena.free(ref)
    return arena
