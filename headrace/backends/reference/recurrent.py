"""Ops that carry a state: token by token, in order."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.backends.inputs import SpanInputs
from headrace.backends.reference.attention import is_chain
from headrace.backends.reference.meanings import Floats, Step, meaning
from headrace.core.cache import NO_BLOCK
from headrace.program.recurrent_ops import Conv, RecurrentOp, SsmScan


@meaning(Conv)
def conv(op: Conv, step: Step, x: Floats) -> Floats:
    weight = step.weights[op.weight]
    y = np.empty_like(x)
    for span in step.inputs.spans:
        rows = span_rows(step, span)
        seen = np.concatenate([read_state(op, step, span), x[rows]])  # [kernel - 1 + count, width]
        y[rows] = sum(weight[:, j] * seen[j : j + span.count] for j in range(op.kernel))
        write_state(op, step, span, seen[span.count :])
    return y if op.bias is None else y + step.weights[op.bias]


@meaning(SsmScan)
def ssm_scan(op: SsmScan, step: Step, *inputs: Floats) -> Floats:
    x, dt, b, c = inputs
    a, d = step.weights[op.a], step.weights[op.d]
    y = np.empty_like(x)
    for span in step.inputs.spans:
        rows = span_rows(step, span)
        state = read_state(op, step, span)  # [width, state_size]
        for t in range(rows.start, rows.stop):
            state = np.exp(dt[t, :, None] * a) * state + (dt[t] * x[t])[:, None] * b[t]
            y[t] = state @ c[t]
        write_state(op, step, span, state)
    return y + d * x


def span_rows(step: Step, span: SpanInputs) -> slice:
    """Raises `ValueError` for a tree of drafts: a state knows one past."""
    rows = slice(span.first_row, span.first_row + span.count)
    if not is_chain(step.inputs.parents[rows], span.first_row):
        raise ValueError(
            f"rows {rows.start} to {rows.stop} are a tree, which the reference's recurrent ops cannot "
            "follow; verify drafts of recurrent models as a chain."
        )
    return rows


def read_state(op: RecurrentOp, step: Step, span: SpanInputs) -> NDArray[np.float32]:
    block = int(span.tables[op.group][0])
    if block == NO_BLOCK:
        return np.zeros(op.state_shape, np.float32)
    return step.store.states[op.group, op.entry][block]


def write_state(op: RecurrentOp, step: Step, span: SpanInputs, state: NDArray[np.float32]) -> None:
    block = int(span.tables[op.group][1])
    if block == NO_BLOCK:
        raise ValueError(
            f"a span of tokens {span.start} to {span.start + span.count} has no block of group {op.group} "
            "to leave its state in; table entry 1 must name one."
        )
    step.store.states[op.group, op.entry][block] = state
