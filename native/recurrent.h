// Ops that carry a state from token to token: float32, token by token in order, lanes over channels. A channel's numbers
// depend on that channel alone, so any split of channels over threads, and of a sequence over steps, gives the same bits.
//
// Layouts have channels innermost, weights and states alike (the model's files have them outermost; they are transposed at
// load): conv weight [kernel][width], ssm a and state [state_size][width].
#pragma once

#include "kernels.h"
#include "simd.h"

namespace headrace::HEADRACE_ISA {

// All lanes of a vector of channels, or (FULL false) the first n.
template <bool FULL>
HR_INLINE V load_lanes(const float* p, int32_t n) {
    return FULL ? load(p) : load_part(p, n, 0.0f);
}
template <bool FULL>
HR_INLINE void store_lanes(float* p, V v, int32_t n) {
    FULL ? store(p, v) : store_part(p, v, n);
}

// The inputs of a convolution, those before the span (from the state, oldest first) and its own, end to end.
struct Seen {
    const float *state, *x;
    size_t x_stride;
    int32_t width, past;

    const float* row(int32_t t) const {  // null: zeros
        if (t >= past) return x + (size_t)(t - past) * x_stride;
        return state ? state + (size_t)t * width : nullptr;
    }
};

template <bool FULL>
HR_INLINE void conv_lanes(const ConvShape& shape, const Seen& seen, int32_t t, int32_t c, int32_t n, float* y) {
    V sum = splat(0.0f);
    for (int32_t j = 0; j < shape.kernel; ++j) {
        const float* const row = seen.row(t + j);
        const V x = row ? load_lanes<FULL>(row + c, n) : splat(0.0f);
        sum = fma(load_lanes<FULL>(shape.weight + (size_t)j * shape.width + c, n), x, sum);
    }
    store_lanes<FULL>(y + c, shape.bias ? add(sum, load_lanes<FULL>(shape.bias + c, n)) : sum, n);
}

// y[t] = bias + sum over j, in order, of weight[j] * x[t - kernel + 1 + j]. 2 * kernel flops a number; the weights and the
// last `kernel` rows stay in the first-level cache.
static void conv(const ConvShape& shape, const float* x, size_t x_stride, int32_t count, const float* read_state,
                 float* write_state, float* y, size_t y_stride, int32_t first, int32_t last) {
    const Seen seen{read_state, x, x_stride, shape.width, shape.kernel - 1};
    for (int32_t t = 0; t < count; ++t, y += y_stride) {
        int32_t c = first;
        for (; c + LANES <= last; c += LANES) conv_lanes<true>(shape, seen, t, c, LANES, y);
        if (c < last) conv_lanes<false>(shape, seen, t, c, last - c, y);
    }
    for (int32_t j = 0; j < seen.past; ++j) {  // rising: the states may be one and the same
        const float* const row = seen.row(count + j);
        float* const to = write_state + (size_t)j * shape.width;
        for (int32_t c = first; c < last; ++c) to[c] = row ? row[c] : 0.0f;
    }
}

template <bool FULL>
static void scan_lanes(const SsmShape& shape, const SsmInputs& in, int32_t count, const float* read_state, float* write_state,
                       float* y, size_t y_stride, int32_t at, int32_t n) {
    const size_t width = shape.width;
    const int32_t states = shape.state_size;
    for (int32_t s = 0; s < states; ++s)
        store_lanes<FULL>(write_state + s * width + at,
                          read_state ? load_lanes<FULL>(read_state + s * width + at, n) : splat(0.0f), n);
    const V d = load_lanes<FULL>(shape.d + at, n);
    for (int32_t t = 0; t < count; ++t) {
        const V x = load_lanes<FULL>(in.x + t * in.x_stride + at, n), dt = load_lanes<FULL>(in.dt + t * in.dt_stride + at, n);
        const V dtx = mul(dt, x);
        const float *b = in.b + t * in.b_stride, *c = in.c + t * in.c_stride;
        const float* a = shape.a + at;
        float* state = write_state + at;
        V sum = splat(0.0f);
        for (int32_t s = 0; s < states; ++s, a += width, state += width) {
            const V decay = exp(mul(dt, load_lanes<FULL>(a, n)));
            const V h = fma(decay, load_lanes<FULL>(state, n), mul(dtx, splat(b[s])));
            store_lanes<FULL>(state, h, n);
            sum = fma(h, splat(c[s]), sum);
        }
        store_lanes<FULL>(y + t * y_stride + at, fma(d, x, sum), n);
    }
}

// Mamba's selective scan (Gu and Dao 2023, algorithm 2): h = exp(dt a) h + (dt x) b, y = h c + d x.
// About 25 flops per channel, state and token, nearly all of them exp.
static void ssm_scan(const SsmShape& shape, const SsmInputs& in, int32_t count, const float* read_state, float* write_state,
                     float* y, size_t y_stride, int32_t first, int32_t last) {
    int32_t at = first;
    for (; at + LANES <= last; at += LANES)
        scan_lanes<true>(shape, in, count, read_state, write_state, y, y_stride, at, LANES);
    if (at < last) scan_lanes<false>(shape, in, count, read_state, write_state, y, y_stride, at, last - at);
}

}  // namespace headrace::HEADRACE_ISA
