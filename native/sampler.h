// From one row of logits to a token: headrace/executor/sampler.py without its sorts.
//
// Everything is double, as there: penalties, bias (DRY's are among them), bans, temperature, top-k, typical-p, top-p,
// min-p, XTC, then the inverse of the cumulative distribution in order of ids at one uniform number. Ties go to the
// smaller id. Sums add up in another order than NumPy's, the temperature divides as a factor and e^x may differ in its
// last bit, so the token is the reference's unless the uniform number (or top_p) falls within about 1e-14 of a border.
//
// A row that nothing adjusts is read as floats: greedy and top-k rows once, others for the peak, e^x, sums and the draw.
// A top-k row takes e^x of k numbers only; top-p looks closely only at tokens that could be at its border.
// Loops over doubles are left to the compiler to vectorise: elementwise, so every instruction set gives the same bits.
#pragma once

#include "kernels.h"
#include "readout.h"
#include "simd.h"

namespace headrace::HEADRACE_ISA {

// ------------------------------------------------------------------------------------------------- the largest, sorted

struct Entry {
    double value;
    int32_t id;
};

// Whether a comes after b when sorted by falling value, then by id.
HR_INLINE bool comes_after(Entry a, Entry b) { return a.value < b.value || (a.value == b.value && a.id > b.id); }

// The heap's root is the entry that comes last.
static void sift_down(Entry* heap, int32_t count, int32_t at) {
    const Entry moved = heap[at];
    for (int32_t child; (child = 2 * at + 1) < count; at = child) {
        if (child + 1 < count && comes_after(heap[child + 1], heap[child])) ++child;
        if (!comes_after(heap[child], moved)) break;
        heap[at] = heap[child];
    }
    heap[at] = moved;
}

static void make_heap(Entry* heap, int32_t count) {
    for (int32_t i = count / 2 - 1; i >= 0; --i) sift_down(heap, count, i);
}

static void sort_heap(Entry* heap, int32_t count) {  // to falling values
    for (int32_t end = count - 1; end > 0; --end) {
        const Entry last = heap[0];
        heap[0] = heap[end];
        heap[end] = last;
        sift_down(heap, end, 0);
    }
}

static double largest_of(const double* x, int32_t count) {
    double lanes[8];
    for (double& lane : lanes) lane = -__builtin_inf();
    int32_t i = 0;
    for (; i + 8 <= count; i += 8)
        for (int j = 0; j < 8; ++j) lanes[j] = x[i + j] > lanes[j] ? x[i + j] : lanes[j];
    for (; i < count; ++i) lanes[0] = x[i] > lanes[0] ? x[i] : lanes[0];
    for (double lane : lanes) lanes[0] = lane > lanes[0] ? lane : lanes[0];
    return lanes[0];
}

// The k entries that come first, as a heap. One maximum per stretch of numbers, and a walk down the heap for the few that
// enter. T is float or double.
template <typename T>
static void select_largest(const T* x, int32_t count, int32_t k, Entry* heap) {
    for (int32_t i = 0; i < k; ++i) heap[i] = {(double)x[i], i};
    make_heap(heap, k);
    for (int32_t begin = k; begin < count; begin += READ_BLOCK) {
        const int32_t end = count - begin < READ_BLOCK ? count : begin + READ_BLOCK;
        if (!(largest_of(x + begin, end - begin) > heap[0].value)) continue;
        for (int32_t i = begin; i < end; ++i)
            if (x[i] > heap[0].value) {  // an equal one has the larger id
                heap[0] = {(double)x[i], i};
                sift_down(heap, k, 0);
            }
    }
}

static void top_k(const float* x, int32_t count, int32_t k, int32_t* ids, float* values, double* scratch) {
    Entry* const heap = (Entry*)scratch;
    select_largest(x, count, k, heap);
    sort_heap(heap, k);
    for (int32_t i = 0; i < k; ++i) ids[i] = heap[i].id, values[i] = (float)heap[i].value;
}

// ---------------------------------------------------------------------------------------------------------------- e^x

// e^x for x <= 0 within about 1 ulp; 0 below -708.7 (where the exponent's field is 0) and of NaN. No fma and no branch, so that the
// compiler can vectorise it for any instruction set.
HR_INLINE int64_t bits_of(double x) {
    int64_t bits;
    memcpy(&bits, &x, 8);
    return bits;
}
HR_INLINE double double_of(int64_t bits) {
    double x;
    memcpy(&x, &bits, 8);
    return x;
}

HR_INLINE double exp_double(double x, int64_t limit) {  // `limit`: the bits of 709.0
    constexpr double SHIFT = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer, held in the low bits
    constexpr int64_t SIGN = INT64_MIN;
    const int64_t size = bits_of(x) & ~SIGN;
    const double bounded = double_of((size > limit ? limit : size) | SIGN);  // NaN too
    const double shifted = bounded * 1.4426950408889634 + SHIFT;
    const double n = shifted - SHIFT;
    const double r = (bounded - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
    double p = 1.0 / 6227020800.0;
    p = p * r + 1.0 / 479001600.0;
    p = p * r + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = 1.0 + (r + (r * r) * p);
    return p * double_of((int64_t)((uint64_t)(bits_of(shifted) + 1023) << 52));  // 2^n
}

// out = e^((x - peak) * factor); T is float or double.
template <typename T>
static void weigh_all(const T* x, int32_t count, double peak, double factor, double* out) {
    int64_t limit = 0x4086280000000000;  // the bits of 709.0
    asm("" : "+r"(limit));  // known, it would be folded into a branch
    for (int32_t i = 0; i < count; ++i) out[i] = exp_double(((double)x[i] - peak) * factor, limit);
}

constexpr int32_t SUM_BLOCK = 512;

static double sum_block(const double* x, int32_t count) {  // up to SUM_BLOCK numbers, in eight lanes
    double lanes[8] = {};
    int32_t i = 0;
    for (; i + 8 <= count; i += 8)
        for (int j = 0; j < 8; ++j) lanes[j] += x[i + j];
    for (; i < count; ++i) lanes[i % 8] += x[i];
    return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

static double sum_all(const double* x, int32_t count) {
    double total = 0.0;
    for (int32_t i = 0; i < count; i += SUM_BLOCK) total += sum_block(x + i, count - i < SUM_BLOCK ? count - i : SUM_BLOCK);
    return total;
}

// ------------------------------------------------------------------------------------------------------------ the row

// Penalties (Keskar et al. 2019; OpenAI), bias and bans.
static void adjust(double* x, const SampleParams& params) {
    for (int32_t i = 0; i < params.num_seen; ++i) {
        double& value = x[params.seen[i]];
        value = value > 0 ? value / params.repetition_penalty : value * params.repetition_penalty;
    }
    for (int32_t i = 0; i < params.num_generated; ++i)
        x[params.generated[i]] -= params.presence_penalty + params.frequency_penalty * params.generated_counts[i];
    for (int32_t i = 0; i < params.num_biases; ++i) x[params.bias_ids[i]] += params.biases[i];
    for (int32_t i = 0; i < params.num_banned; ++i) x[params.banned[i]] = -__builtin_inf();
}

// Numbers and ids of the allowed tokens, in order of ids; how many. `to` may be x.
template <typename T>
static int32_t take_allowed(const T* x, int32_t vocab, const uint32_t* allowed, double* to, int32_t* ids) {
    int32_t count = 0;
    for (int32_t word = 0; word < (vocab + 31) / 32; ++word)
        for (uint32_t left = allowed[word]; left; left &= left - 1) {
            const int32_t id = 32 * word + __builtin_ctz(left);
            if (id >= vocab) return count;
            ids[count] = id;
            to[count++] = (double)x[id];
        }
    return count;
}

// Tokens still in play: their ids, rising, and what each weighs (at most 1). `ids` null: all of 0 ... count - 1.
struct Kept {
    int32_t* ids;
    double* weights;
    int32_t count;
};

// Only the places named by `entries`, rising, as far as they sort before or at `last`.
static void keep(Kept& kept, int32_t* ids, const Entry* entries, int32_t num_entries, Entry last) {
    int32_t count = 0;
    for (int32_t i = 0; i < num_entries; ++i)
        if (!comes_after(entries[i], last)) {
            kept.weights[count] = entries[i].value;
            ids[count++] = kept.ids ? kept.ids[entries[i].id] : entries[i].id;
        }
    kept.ids = ids;
    kept.count = count;
}

// Only the places for which stays(place) holds.
template <typename Stays>
static void keep_where(Kept& kept, int32_t* ids, Stays stays) {
    int32_t count = 0;
    for (int32_t i = 0; i < kept.count; ++i)
        if (stays(i)) {
            kept.weights[count] = kept.weights[i];
            ids[count++] = kept.ids ? kept.ids[i] : i;
        }
    kept.ids = ids;
    kept.count = count;
}

// Places of weights >= least, rising.
static int32_t gather(const Kept& kept, double least, Entry* entries) {
    int32_t count = 0;
    for (int32_t i = 0; i < kept.count; ++i) {  // no branch: which are large is hard to foresee
        entries[count] = {kept.weights[i], i};
        count += kept.weights[i] >= least;
    }
    return count;
}

constexpr int32_t CLASSES = 1024;  // of weights, by exponent and four bits of mantissa; below 2^-64 they share the last

HR_INLINE int32_t class_of(double weight) {
    const int64_t steps = 0x3ff0 - (bits_of(weight) >> 48);
    return (int32_t)(steps < CLASSES - 1 ? steps : CLASSES - 1);
}

// The smallest set of largest weights that sums to at least top_p of all. Weights below an even share of what is left out
// cannot reach its border. The others go into classes, and only the class at the border is sorted.
static void keep_top_p(Kept& kept, double top_p, int32_t* ids, Entry* room) {
    const double total = sum_all(kept.weights, kept.count), target = top_p * total;
    const int32_t count = gather(kept, 0.5 * (1.0 - top_p) * total / kept.count, room);
    Entry* const border_entries = room + count;
    double mass[CLASSES] = {};
    for (int32_t i = 0; i < count; ++i) mass[class_of(room[i].value)] += room[i].value;
    double sum = 0.0;
    int32_t border = 0, num_border = 0;
    while (border < CLASSES - 1 && sum + mass[border] < target) sum += mass[border++];
    for (int32_t i = 0; i < count; ++i)
        if (class_of(room[i].value) == border) border_entries[num_border++] = room[i];
    make_heap(border_entries, num_border);
    sort_heap(border_entries, num_border);
    Entry last{0.0, kept.count};  // where rounding carries the target past the border's class: everything gathered
    for (int32_t i = 0; i < num_border; ++i)
        if ((sum += border_entries[i].value) >= target) {
            last = border_entries[i];
            break;
        }
    keep(kept, ids, room, count, last);
}

// Locally typical sampling: the smallest set of tokens whose surprise is closest to the entropy that sums to at least
// typical_p of all. With scaled logits s, -log p - H = E[s] - s, so that no logarithm is needed.
template <typename T>
static void keep_typical(Kept& kept, const T* x, double peak, double factor, double typical_p, int32_t* ids, Entry* room,
                         double* distances) {
    const auto scaled = [&](int32_t place) { return ((double)x[kept.ids ? kept.ids[place] : place] - peak) * factor; };
    for (int32_t i = 0; i < kept.count; ++i) distances[i] = kept.weights[i] > 0.0 ? kept.weights[i] * scaled(i) : 0.0;
    const double total = sum_all(kept.weights, kept.count), target = typical_p * total;
    const double mean = sum_all(distances, kept.count) / total;
    int32_t left = 0;
    for (int32_t i = 0; i < kept.count; ++i) {
        distances[i] = __builtin_fabs(mean - scaled(i));
        if (kept.weights[i] > 0.0) room[left++] = {distances[i], -i};  // the heap's root: the closest, of equals the first
    }
    make_heap(room, left);
    Entry last{0.0, 0};
    for (double sum = 0.0; left > 0;) {
        last = room[0];
        if ((sum += kept.weights[-last.id]) >= target) break;
        room[0] = room[--left];
        sift_down(room, left, 0);
    }
    keep_where(kept, ids, [&](int32_t i) {
        return kept.weights[i] > 0.0 && (distances[i] < last.value || (distances[i] == last.value && i <= -last.id));
    });
}

// "Exclude top choices": of the tokens of at least that probability only the least probable stays, of equals the last.
static void drop_top(Kept& kept, double threshold, int32_t* ids) {
    const double border = threshold * sum_all(kept.weights, kept.count);
    int32_t least = -1;
    for (int32_t i = 0; i < kept.count; ++i)
        if (kept.weights[i] >= border && (least < 0 || kept.weights[i] <= kept.weights[least])) least = i;
    keep_where(kept, ids, [&](int32_t i) { return !(kept.weights[i] >= border) || i == least; });
}

static int32_t draw(const Kept& kept, double uniform) {
    const double target = uniform * sum_all(kept.weights, kept.count);
    double sum = 0.0;
    int32_t begin = 0, found = -1;
    for (; begin + SUM_BLOCK < kept.count; begin += SUM_BLOCK) {
        const double next = sum + sum_block(kept.weights + begin, SUM_BLOCK);
        if (next > target) break;
        sum = next;
    }
    for (int32_t i = begin; i < kept.count && i < begin + SUM_BLOCK; ++i) {
        if (kept.weights[i] <= 0.0) continue;
        found = i;  // the last one stands where rounding carries the target past the end
        if ((sum += kept.weights[i]) > target) break;
    }
    for (int32_t i = begin < kept.count ? begin - 1 : kept.count - 1; found < 0 && i >= 0; --i)
        if (kept.weights[i] > 0.0) found = i;
    return found >= 0 && kept.ids ? kept.ids[found] : found;  // -1: logits were NaN
}

template <typename T>
static int32_t sample_from(const T* x, int32_t vocab, const SampleParams& params, double* weights, Entry* room, int32_t* ids) {
    const double peak = (double)largest_of(x, vocab), inverse = 1.0 / params.temperature;
    const double factor = inverse < 1e300 ? inverse : 1e300;
    if (peak == -__builtin_inf()) return -1;
    if (params.temperature == 0.0) {
        for (int32_t i = 0; i < vocab; ++i)
            if (x[i] == peak) return i;
        return -1;  // NaN
    }
    Kept kept{nullptr, weights, vocab};
    if (params.top_k > 0 && params.top_k < vocab) {
        select_largest(x, vocab, params.top_k, room);
        for (int32_t i = 0; i < params.top_k; ++i) room[i].value = -(double)room[i].id;  // in order of ids
        make_heap(room, params.top_k);
        sort_heap(room, params.top_k);
        for (int32_t i = 0; i < params.top_k; ++i) {
            ids[i] = room[i].id;
            weights[i] = (double)x[ids[i]];
        }
        kept.ids = ids;
        kept.count = params.top_k;
        weigh_all(weights, kept.count, peak, factor, weights);
    } else {
        weigh_all(x, vocab, peak, factor, weights);
    }
    double largest = 1.0;  // e^0
    if (0.0 < params.typical_p && params.typical_p < 1.0) {
        keep_typical(kept, x, peak, factor, params.typical_p, ids, room, (double*)(room + vocab));
        largest = largest_of(kept.weights, kept.count);
    }
    if (params.top_p < 1.0) keep_top_p(kept, params.top_p, ids, room);
    if (params.min_p > 0.0) keep(kept, ids, room, gather(kept, params.min_p * largest, room), {0.0, kept.count});
    if (params.xtc_threshold > 0.0) drop_top(kept, params.xtc_threshold, ids);
    return draw(kept, params.uniform);
}

// Adjusted numbers, weights, entries (two doubles each, the border's beside the others), ids of the kept and of the allowed.
static size_t sample_scratch(int32_t vocab) { return (size_t)vocab * 7; }

static int32_t sample_row(const float* logits, int32_t vocab, const SampleParams& params, double* scratch) {
    double *const x = scratch, *const weights = x + vocab;
    Entry* const room = (Entry*)(weights + vocab);
    int32_t *const ids = (int32_t*)(room + 2 * (size_t)vocab), *const allowed = ids + vocab;
    const bool is_adjusted = params.num_seen || params.num_generated || params.num_biases || params.num_banned;
    if (!is_adjusted && !params.allowed)
        return params.temperature == 0.0 ? argmax(logits, vocab) : sample_from(logits, vocab, params, weights, room, ids);
    if (is_adjusted) {
        for (int32_t i = 0; i < vocab; ++i) x[i] = (double)logits[i];
        adjust(x, params);
    }
    if (!params.allowed) return sample_from(x, vocab, params, weights, room, ids);
    // A grammar often leaves few: they are sampled as a vocabulary of their own.
    const int32_t count = is_adjusted ? take_allowed(x, vocab, params.allowed, x, allowed)
                                      : take_allowed(logits, vocab, params.allowed, x, allowed);
    const int32_t place = count ? sample_from(x, count, params, weights, room, ids) : -1;
    return place < 0 ? -1 : allowed[place];
}

}  // namespace headrace::HEADRACE_ISA
