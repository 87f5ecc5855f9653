"""Loops in float64 over one number at a time: what the ops are checked against."""

from __future__ import annotations

import math

import numpy as np

from headrace.program.rope import Rotation


def rope(x: np.ndarray, positions: np.ndarray, heads: int, offset: int, rotation: Rotation) -> np.ndarray:
    y = x.astype(np.float64).copy()
    head_dim, half = x.shape[1] // heads, rotation.dims // 2
    for row, position in enumerate(positions):
        for head in range(heads):
            base = head * head_dim + offset
            for j, frequency in enumerate(rotation.frequencies):
                interleaved = rotation.style == "interleaved"
                i, k = (base + 2 * j, base + 2 * j + 1) if interleaved else (base + j, base + j + half)
                turn = complex(math.cos(position * frequency), math.sin(position * frequency))
                number = complex(x[row, i], x[row, k]) * turn * rotation.attention_factor
                y[row, i], y[row, k] = number.real, number.imag
    return y


def attention(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    key_positions: np.ndarray,
    visible: np.ndarray,
    query_positions: np.ndarray,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> np.ndarray:
    """q [n, heads, width], keys and values [m, kv_heads, width], visible [n, m] -> [n, heads * value
    width].
    """
    n, heads, _ = q.shape
    sharing = heads // keys.shape[1]
    out = np.zeros((n, heads, values.shape[2]))
    for i in range(n):
        seen = [
            j
            for j in range(len(keys))
            if visible[i, j] and (not window or query_positions[i] - key_positions[j] < window)
        ]
        for h in range(heads):
            scores = np.array([float(q[i, h].astype(np.float64) @ keys[j, h // sharing]) * scale for j in seen])
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            for weight, j in zip(weights, seen, strict=True):
                out[i, h] += weight * values[j, h // sharing]
    return out.reshape(n, -1)


def ssm_scan(
    x: np.ndarray, dt: np.ndarray, b: np.ndarray, c: np.ndarray, a: np.ndarray, d: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(outputs, last state), one channel and one state at a time."""
    tokens, width = x.shape
    state = np.zeros(a.shape)
    y = np.zeros(x.shape)
    for t in range(tokens):
        for i in range(width):
            for s in range(a.shape[1]):
                state[i, s] = math.exp(dt[t, i] * a[i, s]) * state[i, s] + dt[t, i] * b[t, s] * x[t, i]
                y[t, i] += state[i, s] * c[t, s]
            y[t, i] += d[i] * x[t, i]
    return y, state


def conv(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    tokens, width = x.shape
    kernel = weight.shape[1]
    y = np.zeros(x.shape)
    for t in range(tokens):
        for i in range(width):
            y[t, i] = bias[i]
            for j in range(kernel):
                source = t - kernel + 1 + j
                if source >= 0:
                    y[t, i] += weight[i, j] * x[source, i]
    return y


def routing(
    logits: np.ndarray,
    top_k: int,
    *,
    score: str = "softmax",
    bias: np.ndarray | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    renormalize: bool = True,
    scaling: float = 1.0,
) -> list[tuple[int, float]]:
    """(expert, weight) of one token in the order of choice."""
    exp = [math.exp(v) for v in logits]
    scores = [e / sum(exp) for e in exp] if score == "softmax" else [1 / (1 + math.exp(-v)) for v in logits]
    choice = [s + (float(bias[e]) if bias is not None else 0) for e, s in enumerate(scores)]
    size = len(scores) // num_groups
    groups = [range(g * size, (g + 1) * size) for g in range(num_groups)]
    if num_groups > 1:
        groups.sort(key=lambda g: -sum(sorted((choice[e] for e in g), reverse=True)[:2]))
    allowed = sorted(e for g in groups[:top_groups] for e in g)
    chosen = sorted(allowed, key=lambda e: -choice[e])[:top_k]
    total = sum(scores[e] for e in chosen) if renormalize else 1.0
    return [(e, scores[e] / total * scaling) for e in chosen]
