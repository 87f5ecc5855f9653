"""Mixtures of experts."""

from __future__ import annotations

import numpy as np

from headrace.backends.reference.meanings import Floats, Step, meaning
from headrace.backends.reference.rowwise import activate, sigmoid
from headrace.program.mixture_ops import Experts, Route


@meaning(Route)
def route(op: Route, step: Step, logits: Floats) -> Floats:
    scores = sigmoid(logits) if op.score == "sigmoid" else softmax(logits)
    choice = scores if op.bias is None else scores + step.weights[op.bias]
    if op.num_groups > 1:
        grouped = choice.reshape(len(choice), op.num_groups, -1)
        best_two = np.sort(grouped, axis=2)[:, :, -2:].sum(axis=2)
        allowed = np.zeros(best_two.shape, bool)
        np.put_along_axis(allowed, largest(best_two, op.top_groups), True, axis=1)
        choice = np.where(allowed[:, :, None], grouped, -np.inf).reshape(choice.shape)
    experts = largest(choice, op.top_k)
    weights = np.take_along_axis(scores, experts, axis=1)
    if op.renormalize:
        weights = weights / (weights.sum(axis=1, keepdims=True) + np.float32(1e-20))
    return np.concatenate([experts.astype(np.float32), weights * np.float32(op.scaling)], axis=1)


@meaning(Experts)
def experts(op: Experts, step: Step, x: Floats, routing: Floats) -> Floats:
    chosen, weights = routing[:, : op.top_k].astype(np.int64), routing[:, op.top_k :]
    gate, up, down = step.weights[op.gate], step.weights[op.up], step.weights[op.down]
    outputs = np.empty((len(x), op.top_k, op.hidden), np.float32)
    for expert in np.unique(chosen):
        rows, places = np.nonzero(chosen == expert)
        h = activate(op.kind, x[rows] @ gate[expert].T) * (x[rows] @ up[expert].T)
        outputs[rows, places] = h @ down[expert].T
    y = np.zeros((len(x), op.hidden), np.float32)
    for place in range(op.top_k):
        y += weights[:, place, None] * outputs[:, place]
    return y


def softmax(x: Floats) -> Floats:
    e = np.exp(x - x.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def largest(x: Floats, k: int) -> np.ndarray:
    """Indices [n, k] of the k largest of each row, falling; the lower index first where equal."""
    return np.argsort(-x, axis=1, kind="stable")[:, :k]
