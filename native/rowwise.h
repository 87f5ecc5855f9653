// Kernels that treat a row by itself. Bytes: each reads its inputs and writes its output once.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace headrace::HEADRACE_ISA {

// x / sqrt(mean(x^2) + eps) * (offset + weight). The squares add up in 16 lanes over the row, then in simd.h's tree.
static void rms_norm(const float* x, const float* weight, int32_t width, float eps, float offset, float* out) {
    V squares = splat(0.0f);
    int32_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        const V v = load(x + i);
        squares = fma(v, v, squares);
    }
    if (i < width) {
        const V v = load_part(x + i, width - i, 0.0f);
        squares = fma(v, v, squares);
    }
    const V root = sqrt(splat(reduce_add(squares) / (float)width + eps));
    const V factor = div(splat(1.0f), root);
    const V shift = splat(offset);
    for (i = 0; i + LANES <= width; i += LANES)
        store(out + i, mul(mul(load(x + i), factor), add(shift, load(weight + i))));
    if (i < width) {
        const int32_t rest = width - i;
        const V scaled = mul(load_part(x + i, rest, 0.0f), factor);
        store_part(out + i, mul(scaled, add(shift, load_part(weight + i, rest, 0.0f))), rest);
    }
}

// Numbers of headrace.backends.native.compile.ACTIVATIONS.
enum Activation : int32_t { SILU, GELU_TANH, RELU, SIGMOID, SOFTPLUS };

HR_INLINE V activate(int32_t kind, V x) {
    switch (kind) {
        case SILU: return silu(x);
        case GELU_TANH: return gelu_tanh(x);
        case RELU: return max(x, splat(0.0f));
        case SIGMOID: return div(splat(1.0f), add(splat(1.0f), exp(sub(splat(0.0f), x))));
        default: return softplus(x);
    }
}

// The loops below differ in their expression only: `v` is lanes of the inputs at i.
#define HR_ROW(width, full, part)                             \
    int32_t i = 0;                                            \
    for (; i + LANES <= (width); i += LANES) { full; }        \
    if (i < (width)) {                                        \
        const int32_t rest = (width) - i;                     \
        part;                                                 \
    }

static void gate(int32_t kind, const float* g, const float* up, int32_t width, float* out) {
    HR_ROW(width, store(out + i, mul(activate(kind, load(g + i)), load(up + i))),
           store_part(out + i, mul(activate(kind, load_part(g + i, rest, 0.0f)), load_part(up + i, rest, 0.0f)), rest))
}

static void act(int32_t kind, const float* x, int32_t width, float* out) {
    HR_ROW(width, store(out + i, activate(kind, load(x + i))),
           store_part(out + i, activate(kind, load_part(x + i, rest, 0.0f)), rest))
}

static void add_rows(const float* a, const float* b, int32_t width, float* out) {
    HR_ROW(width, store(out + i, add(load(a + i), load(b + i))),
           store_part(out + i, add(load_part(a + i, rest, 0.0f), load_part(b + i, rest, 0.0f)), rest))
}

static void scale_row(const float* x, float factor, int32_t width, float* out) {
    HR_ROW(width, store(out + i, mul(load(x + i), splat(factor))),
           store_part(out + i, mul(load_part(x + i, rest, 0.0f), splat(factor)), rest))
}

static void softcap(const float* x, float cap, int32_t width, float* out) {
    HR_ROW(width, store(out + i, mul(splat(cap), tanh(div(load(x + i), splat(cap))))),
           store_part(out + i, mul(splat(cap), tanh(div(load_part(x + i, rest, 0.0f), splat(cap)))), rest))
}

#undef HR_ROW

// Turn pairs of each head: (a, b) -> (a cos - b sin, b cos + a sin). `cos_sin` holds the cosines of the `pairs` pairs,
// then their sines. Pair j is (j, j + pairs) in style half, (2j, 2j + 1) interleaved.
static void rope(const float* x, const float* cos_sin, int32_t heads, int32_t head_dim, int32_t offset, int32_t pairs,
                 bool interleaved, float* out) {
    for (int32_t h = 0; h < heads; ++h) {
        const float* from = x + h * head_dim;
        float* to = out + h * head_dim;
        if (to != from) memcpy(to, from, head_dim * sizeof(float));
        float* turned = to + offset;
        int32_t j = 0;
        if (!interleaved)
            for (; j + LANES <= pairs; j += LANES) {
                const V a = load(turned + j), b = load(turned + pairs + j), c = load(cos_sin + j), s = load(cos_sin + pairs + j);
                store(turned + j, sub(mul(a, c), mul(b, s)));
                store(turned + pairs + j, add(mul(b, c), mul(a, s)));
            }
        for (; j < pairs; ++j) {
            const int32_t p = interleaved ? 2 * j : j, q = interleaved ? 2 * j + 1 : j + pairs;
            const float a = turned[p], b = turned[q], c = cos_sin[j], s = cos_sin[pairs + j];
            turned[p] = a * c - b * s;  // two roundings, not fused, as above
            turned[q] = b * c + a * s;
        }
    }
}

}  // namespace headrace::HEADRACE_ISA
