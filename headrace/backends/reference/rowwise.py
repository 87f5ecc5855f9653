"""Ops that treat each row by itself."""

from __future__ import annotations

import math

import numpy as np

from headrace.backends.reference.meanings import Floats, Step, meaning
from headrace.program import ops
from headrace.program.ops import Activation


@meaning(ops.Embed)
def embed(op: ops.Embed, step: Step) -> Floats:
    return step.weights[op.weight][step.inputs.token_ids]


@meaning(ops.RmsNorm)
def rms_norm(op: ops.RmsNorm, step: Step, x: Floats) -> Floats:
    parts = x.reshape(len(x), op.heads, -1)
    mean_square = np.einsum("nhd,nhd->nh", parts, parts)[..., None] / parts.shape[-1]
    weight = step.weights[op.weight]
    if op.offset:
        weight = weight + np.float32(op.offset)
    return (parts / np.sqrt(mean_square + np.float32(op.eps)) * weight).reshape(x.shape)


@meaning(ops.LayerNorm)
def layer_norm(op: ops.LayerNorm, step: Step, x: Floats) -> Floats:
    centred = x - x.mean(axis=1, keepdims=True)
    variance = np.square(centred).mean(axis=1, keepdims=True)
    y = centred / np.sqrt(variance + np.float32(op.eps)) * step.weights[op.weight]
    return y if op.bias is None else y + step.weights[op.bias]


@meaning(ops.Linear)
def linear(op: ops.Linear, step: Step, x: Floats) -> Floats:
    y = x @ step.weights[op.weight].T
    return y if op.bias is None else y + step.weights[op.bias]


@meaning(ops.HeadLinear)
def head_linear(op: ops.HeadLinear, step: Step, x: Floats) -> Floats:
    heads = x.reshape(len(x), op.heads, op.in_features).swapaxes(0, 1)  # [heads, n, in]
    y = heads @ step.weights[op.weight].swapaxes(1, 2)  # [heads, n, out]
    return y.swapaxes(0, 1).reshape(len(x), -1)


@meaning(ops.Rope)
def rope(op: ops.Rope, step: Step, x: Floats) -> Floats:
    cos, sin = step.cos_sin(op.rotation)
    y = x.reshape(len(x), op.heads, op.head_dim).copy()
    turned = y[:, :, op.offset : op.offset + op.rotation.dims]
    if op.rotation.style == "interleaved":
        a, b = turned[..., 0::2], turned[..., 1::2]
    else:
        half = op.rotation.dims // 2
        a, b = turned[..., :half], turned[..., half:]
    a[...], b[...] = a * cos - b * sin, b * cos + a * sin
    return y.reshape(x.shape)


@meaning(ops.Gate)
def gate(op: ops.Gate, step: Step, gate: Floats, up: Floats) -> Floats:
    return activate(op.kind, gate) * up


@meaning(ops.Act)
def act(op: ops.Act, step: Step, x: Floats) -> Floats:
    return activate(op.kind, x)


@meaning(ops.Add)
def add(op: ops.Add, step: Step, a: Floats, b: Floats) -> Floats:
    return a + b


@meaning(ops.Scale)
def scale(op: ops.Scale, step: Step, x: Floats) -> Floats:
    return x * np.float32(op.factor)


@meaning(ops.Softcap)
def softcap(op: ops.Softcap, step: Step, x: Floats) -> Floats:
    return np.float32(op.cap) * np.tanh(x / np.float32(op.cap))


@meaning(ops.Slice)
def slice_heads(op: ops.Slice, step: Step, x: Floats) -> Floats:
    return x.reshape(len(x), op.heads, -1)[:, :, op.start : op.stop].reshape(len(x), -1)


@meaning(ops.Concat)
def concat(op: ops.Concat, step: Step, *parts: Floats) -> Floats:
    rows = len(parts[0])
    return np.concatenate([p.reshape(rows, op.heads, -1) for p in parts], axis=2).reshape(rows, -1)


@meaning(ops.SelectRows)
def select_rows(op: ops.SelectRows, step: Step, x: Floats) -> Floats:
    return x[step.readout_rows]


def activate(kind: Activation, x: Floats) -> Floats:
    match kind:
        case "silu":
            return x * sigmoid(x)
        case "gelu_tanh":
            return 0.5 * x * (1 + np.tanh(np.float32(math.sqrt(2 / math.pi)) * (x + 0.044715 * x * x * x)))
        case "gelu":
            return (0.5 * x * (1 + _erf(x / math.sqrt(2)))).astype(np.float32)
        case "relu":
            return np.maximum(x, 0)
        case "sigmoid":
            return sigmoid(x)
        case "softplus":
            return np.logaddexp(x, np.float32(0))


def sigmoid(x: Floats) -> Floats:
    # Through tanh: exp(-x) would overflow for very negative x.
    return np.float32(0.5) * (np.tanh(np.float32(0.5) * x) + np.float32(1))


_erf = np.vectorize(math.erf, otypes=[np.float64])
