// Which experts a token goes to, and with what weight (headrace/backends/reference/mixture.py). One row of logits, a few
// hundred numbers at most: about 30 flops each, and top_k scans.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace headrace::HEADRACE_ISA {

// `out`: top_k ids by falling choice (the smaller id first where equal), then their weights.
// `scratch` has route_scratch(shape) floats.
static size_t route_scratch(const RouteShape& shape) { return 2 * (size_t)shape.num_experts + LANES + shape.num_groups; }

static void score_experts(const RouteShape& shape, const float* logits, float* scores) {  // writes whole vectors
    const int32_t count = shape.num_experts;
    V largest = splat(-__builtin_inff()), total = splat(0.0f);
    if (!shape.is_sigmoid)
        for (int32_t i = 0; i < count; i += LANES)
            largest = max(largest, i + LANES <= count ? load(logits + i) : load_part(logits + i, count - i, -__builtin_inff()));
    const V peak = splat(reduce_max(largest)), one = splat(1.0f);
    for (int32_t i = 0; i < count; i += LANES) {
        const V x = i + LANES <= count ? load(logits + i) : load_part(logits + i, count - i, -__builtin_inff());
        const V e = shape.is_sigmoid ? div(one, add(one, exp(sub(splat(0.0f), x)))) : exp(sub(x, peak));
        total = add(total, e);
        store(scores + i, e);
    }
    if (shape.is_sigmoid) return;
    const V sum = splat(reduce_add(total));
    for (int32_t i = 0; i < count; i += LANES) store(scores + i, div(load(scores + i), sum));
}

// Marks what it returns as taken, by NaN: the first of the largest that are left.
static int32_t take_largest(float* values, int32_t count) {
    int32_t best = -1;
    for (int32_t i = 0; i < count; ++i)
        if (values[i] == values[i] && (best < 0 || values[i] > values[best])) best = i;
    if (best < 0) return 0;  // NaN logits: any expert
    values[best] = __builtin_nanf("");
    return best;
}

static void keep_best_groups(const RouteShape& shape, float* choice, float* groups) {
    const int32_t size = shape.num_experts / shape.num_groups;
    for (int32_t g = 0; g < shape.num_groups; ++g) {
        float first = -__builtin_inff(), second = -__builtin_inff();
        for (int32_t i = g * size; i < (g + 1) * size; ++i)
            if (choice[i] > first)
                second = first, first = choice[i];
            else if (choice[i] > second)
                second = choice[i];
        groups[g] = size > 1 ? first + second : first;
    }
    for (int32_t i = 0; i < shape.top_groups; ++i) take_largest(groups, shape.num_groups);
    for (int32_t g = 0; g < shape.num_groups; ++g)
        if (groups[g] == groups[g])  // not taken
            for (int32_t i = g * size; i < (g + 1) * size; ++i) choice[i] = -__builtin_inff();
}

static void route(const RouteShape& shape, const float* logits, float* out, float* scratch) {
    const int32_t count = shape.num_experts;
    float *const scores = scratch, *const choice = scratch + count + LANES, *const groups = choice + count;
    score_experts(shape, logits, scores);
    for (int32_t i = 0; i < count; ++i) choice[i] = shape.bias ? scores[i] + shape.bias[i] : scores[i];
    if (shape.num_groups > 1) keep_best_groups(shape, choice, groups);
    float* const weights = out + shape.top_k;
    float sum = 0.0f;
    for (int32_t k = 0; k < shape.top_k; ++k) {
        const int32_t expert = take_largest(choice, count);
        out[k] = (float)expert;
        weights[k] = scores[expert];
        sum += weights[k];
    }
    for (int32_t k = 0; k < shape.top_k; ++k) {
        if (shape.renormalize) weights[k] /= sum + 1e-20f;
        weights[k] *= shape.scaling;
    }
}

}  // namespace headrace::HEADRACE_ISA
