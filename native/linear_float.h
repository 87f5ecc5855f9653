// Products of float weights (float32, f16, bf16) and float activations.
//
// The arithmetic: lanes over output rows, acc = fma(weight, x[k], acc) in order of k for each output, then out = acc
// (+ bias) (+ out): the same bits for any tile and split.
//
// The floor: one fma per 16 weights (8 on AVX2) and row of activations, two a cycle; its latency of four cycles wants at
// least eight sums in flight, so few rows take several strips at once. Bytes: one row reads the matrix once, 2 or 4 bytes
// a weight, and is bound by memory. Converting f16 costs two instructions per register, shared by a tile's rows.
#pragma once

#include "linear_quantized.h"

namespace headrace::HEADRACE_ISA {

template <Packing P>
HR_INLINE V load_weights(const uint8_t* strip, int32_t k) {
    if constexpr (P == Packing::F32) return load((const float*)strip + (size_t)k * STRIP);
    if constexpr (P == Packing::F16) return load_f16((const uint16_t*)strip + (size_t)k * STRIP);
    return load_bf16((const uint16_t*)strip + (size_t)k * STRIP);
}

// acc[r][s][16] += inputs [0, num) of R rows of x (pointed at the first) times S strips, `step` bytes apart. Few rows wait
// for memory: they ask for each strip's numbers early, and towards the end for the next S strips', before `fetch_end`.
template <Packing P, int R, int S>
static void float_tile(const uint8_t* strips, size_t step, const uint8_t* fetch_end, int32_t num, const float* x,
                       size_t x_stride, float* acc, size_t acc_stride) {
    constexpr bool ASKS_EARLY = R <= 4;
    constexpr size_t SIZE = layout_of(P).file_bytes * STRIP;  // of one input
    const int32_t ahead = (int32_t)(FETCH_AHEAD / S / SIZE) < num ? (int32_t)(FETCH_AHEAD / S / SIZE) : num;
    V total[R][S];
    for (int r = 0; r < R; ++r)
        for (int s = 0; s < S; ++s) total[r][s] = load(acc + r * acc_stride + s * STRIP);
    const auto sum = [&](int32_t first, int32_t last, const uint8_t* asked) {
        for (int32_t k = first; k < last; ++k, asked += SIZE) {
            V w[S];
            for (int s = 0; s < S; ++s) {
                w[s] = load_weights<P>(strips + s * step, k);
                if constexpr (ASKS_EARLY) __builtin_prefetch(asked + s * step, 0, 3);
            }
            for (int r = 0; r < R; ++r) {
                const V a = splat(x[r * x_stride + k]);
                for (int s = 0; s < S; ++s) total[r][s] = fma(w[s], a, total[r][s]);
            }
        }
    };
    sum(0, num - ahead, strips + ahead * SIZE);
    sum(num - ahead, num, strips + S * step < fetch_end ? strips + S * step : strips);
    for (int r = 0; r < R; ++r)
        for (int s = 0; s < S; ++s) store(acc + r * acc_stride + s * STRIP, total[r][s]);
}

#if defined(HEADRACE_AVX512)
constexpr int FLOAT_TILE = 8;
constexpr int strips_for(int rows) { return rows == 1 ? 8 : rows <= 6 ? 4 : 3; }
#elif defined(HEADRACE_AVX2)
constexpr int FLOAT_TILE = 6;
constexpr int strips_for(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
#else
constexpr int FLOAT_TILE = 2;
constexpr int strips_for(int) { return 1; }
#endif
constexpr int MOST_STRIPS = 8;

template <Packing P, int R = FLOAT_TILE>
HR_INLINE void float_tile_of(int rows, int strips, const uint8_t* at, size_t step, const uint8_t* fetch_end, int32_t num,
                             const float* x, size_t x_stride, float* acc, size_t acc_stride) {
    if constexpr (R > 1)
        if (rows != R)
            return float_tile_of<P, R - 1>(rows, strips, at, step, fetch_end, num, x, x_stride, acc, acc_stride);
    constexpr int S = strips_for(R);
    int done = 0;
    for (; done + S <= strips; done += S)
        float_tile<P, R, S>(at + done * step, step, fetch_end, num, x, x_stride, acc + done * STRIP, acc_stride);
    for (; done < strips; ++done)
        float_tile<P, R, 1>(at + done * step, step, fetch_end, num, x, x_stride, acc + done * STRIP, acc_stride);
}

template <Packing P>
static void linear_numbers(const PackedMatrix& matrix, int32_t first, int32_t last, int32_t fetch_last, const float* x,
                           size_t x_stride, int32_t num_rows, float* out, size_t out_stride, Epilogue epilogue) {
    const size_t bytes = strip_bytes(P, matrix.width);
    alignas(64) float acc[FLOAT_TILE * MOST_STRIPS * STRIP];
    constexpr size_t acc_stride = MOST_STRIPS * STRIP;
    const int most = strips_for(num_rows < FLOAT_TILE ? num_rows : FLOAT_TILE);
    for (int32_t s = first; s < last; s += most) {
        const int strips = last - s < most ? last - s : most;
        for (int32_t row = 0; row < num_rows;) {
            const int32_t left = num_rows - row, pieces = (left + FLOAT_TILE - 1) / FLOAT_TILE;
            const int32_t rows = (left + pieces - 1) / pieces;
            memset(acc, 0, sizeof acc);
            float_tile_of<P>(rows, strips, matrix.data + s * bytes, bytes, matrix.data + fetch_last * bytes, matrix.width,
                             x + row * x_stride, x_stride, acc, acc_stride);
            for (int32_t r = 0; r < rows; ++r)
                for (int i = 0; i < strips; ++i) {
                    const int32_t output = (s + i) * STRIP, num = matrix.rows - output;
                    finish_row(acc + r * acc_stride + i * STRIP, num < STRIP ? num : STRIP,
                               epilogue.bias ? epilogue.bias + output : nullptr, epilogue.accumulate,
                               out + (size_t)(row + r) * out_stride + output);
                }
            row += rows;
        }
    }
}

static void linear_float(const PackedMatrix& matrix, int32_t first, int32_t last, int32_t fetch_last, const float* x,
                         size_t x_stride, int32_t num_rows, float* out, size_t out_stride, Epilogue epilogue) {
    auto* run = &linear_numbers<Packing::F32>;
    if (matrix.packing == Packing::F16) run = &linear_numbers<Packing::F16>;
    if (matrix.packing == Packing::BF16) run = &linear_numbers<Packing::BF16>;
    run(matrix, first, last, fetch_last, x, x_stride, num_rows, out, out_stride, epilogue);
}

}  // namespace headrace::HEADRACE_ISA
