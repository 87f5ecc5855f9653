// Reading logits: the greedy token, the normaliser, ranks and the largest few. Each touches the row once or twice.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace headrace::HEADRACE_ISA {

constexpr int32_t READ_VECTORS = 4;  // maxima under way at once
constexpr int32_t READ_BLOCK = READ_VECTORS * LANES;
constexpr float LOWEST = -__builtin_inff();

// The first of the largest. 4 bytes read per logit, three instructions per vector. Lane l of maximum m keeps the best of
// the numbers at 64 i + 16 m + l and its i (exact in float up to 2^24 blocks).
static int32_t argmax(const float* x, int32_t count) {
    V best[READ_VECTORS], block[READ_VECTORS];
    for (int m = 0; m < READ_VECTORS; ++m) best[m] = splat(LOWEST), block[m] = splat(0.0f);
    int32_t i = 0;
    for (; i + READ_BLOCK <= count; i += READ_BLOCK) {
        const V index = splat((float)(i / READ_BLOCK));
#pragma GCC unroll 4
        for (int m = 0; m < READ_VECTORS; ++m) {
            const V v = load(x + i + m * LANES);
            block[m] = where_less(best[m], v, index, block[m]);
            best[m] = max(v, best[m]);
        }
    }
    float values[READ_BLOCK], blocks[READ_BLOCK];
    for (int m = 0; m < READ_VECTORS; ++m) store(values + m * LANES, best[m]), store(blocks + m * LANES, block[m]);
    float largest = LOWEST;
    int32_t found = 0;
    for (int32_t lane = 0; lane < READ_BLOCK; ++lane) {
        const int32_t at = (int32_t)blocks[lane] * READ_BLOCK + lane;
        if (values[lane] > largest || (values[lane] == largest && at < found)) largest = values[lane], found = at;
    }
    for (; i < count; ++i)
        if (x[i] > largest) largest = x[i], found = i;
    return largest == LOWEST ? 0 : found;  // nothing above -infinity: the first
}

// The largest number; -infinity of none.
static float largest_of(const float* x, int32_t count) {
    V best[READ_VECTORS];
    for (int m = 0; m < READ_VECTORS; ++m) best[m] = splat(LOWEST);
    int32_t i = 0;
    for (; i + READ_BLOCK <= count; i += READ_BLOCK)
#pragma GCC unroll 4
        for (int m = 0; m < READ_VECTORS; ++m) best[m] = max(load(x + i + m * LANES), best[m]);
    for (; i < count; i += LANES)
        best[0] = max(i + LANES <= count ? load(x + i) : load_part(x + i, count - i, LOWEST), best[0]);
    return reduce_max(max(max(best[0], best[1]), max(best[2], best[3])));
}

// log of the sum of e^x. Terms are float32 (1 ulp each) and add up in 64 lanes of 32 terms, then in double: the relative
// error of the sum stays under 2^-24 * 40, that is 2.4e-6 absolute in the result, and is near 1e-7 in practice.
static double log_sum_exp(const float* x, int32_t count) {
    constexpr int32_t STRETCH = 32 * READ_BLOCK;
    const float peak = largest_of(x, count);
    const V shift = splat(peak);
    double total = 0.0;
    for (int32_t begin = 0; begin < count; begin += STRETCH) {
        const int32_t end = count - begin < STRETCH ? count : begin + STRETCH;
        V sums[READ_VECTORS];
        for (int m = 0; m < READ_VECTORS; ++m) sums[m] = splat(0.0f);
        int32_t i = begin;
        for (; i + READ_BLOCK <= end; i += READ_BLOCK)
#pragma GCC unroll 4
            for (int m = 0; m < READ_VECTORS; ++m) sums[m] = add(sums[m], exp(sub(load(x + i + m * LANES), shift)));
        for (; i < end; i += LANES) {
            const V v = i + LANES <= end ? load(x + i) : load_part(x + i, end - i, LOWEST);
            sums[0] = add(sums[0], exp(sub(v, shift)));
        }
        total += (double)reduce_add(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
    }
    return (double)peak + __builtin_log(total);
}

// How many numbers are larger than x[at]: 0 for the largest.
static int32_t rank_of(const float* x, int32_t count, int32_t at) {
    const float value = x[at];
    int32_t larger = 0;
    for (int32_t i = 0; i < count; ++i) larger += x[i] > value;
    return larger;
}

}  // namespace headrace::HEADRACE_ISA
