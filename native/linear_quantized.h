// Products of packed 4- to 8-bit weights and int8 activations.
//
// The arithmetic, the same for every instruction set, tile and split. Per output, groups of 32 inputs in order:
//
//   sum  = the integer product of the group, exact           (Q6_K: of each half group, one after the other)
//   part = float(sum) * weight_scale                         one rounding; weight_scale = d (* subscale), exact
//   acc  = fma(part, activation_scale, acc)
//   acc  = fma(weight_minimum, scaled_sum, acc)                        formats with a minimum
//
// where acc begins as the outliers' products, acc = fma(outlier, weight, acc) in their order, with the weight as float32;
// and at the end out = acc (+ acc of the second plane) (+ bias) (+ out).
//
// The floor, per strip of 16 rows, group of 32 and row of activations: 1024 operations are 8 vpdpbusd (AVX-512) or 16
// vpmaddubsw and 14 vpaddw (AVX2) beside the conversion, a multiply and one or two fma per register of floats: 10-11 and
// 38-40 vector instructions, so at best 8/10 of the vpdpbusd peak and 30/38 of the instructions are the product.
// Unpacking weights costs 14-30 instructions a group, whatever the number of rows: few rows unpack into registers; from
// stage_from rows on a panel of a strip is unpacked once into the L1 cache and reused by every tile.
// Bytes: one row of activations reads the matrix once, front to back, and is bound by memory.
// Outliers: a column of a strip takes about ten instructions to unpack, once for the rows that share it, and an fma a row.
#pragma once

#include "linear_lanes.h"

namespace headrace::HEADRACE_ISA {

// ------------------------------------------------------------------------------------------------------ activations

// Below this no group has a scale: 1 / scale and every product of scales stay normal numbers.
constexpr float TINY = 0x1p-80f;

// Where a group goes, and how far it is to the next one of a batch.
struct GroupPlaces {
    int8_t* q;
    float *scale, *scaled_sum;
    int32_t* sums;
    size_t bytes, groups;  // steps: of q; of the others

    GroupPlaces(const QuantizedRows& to, int32_t row, int32_t plane, int32_t group, size_t bytes, size_t groups)
        : bytes(bytes), groups(groups) {
        const size_t at = ((size_t)row * to.planes + plane) * (to.width / GROUP) + group;
        q = to.q + at * GROUP;
        scale = to.scale + at;
        scaled_sum = to.scaled_sum + at;
        sums = to.sums + 2 * at;
    }
};

// x [num][32], num <= 16: their scales are divisions of one vector. `left`: null, or gets x less what is kept of it.
static void quantize_groups(const float* x, int num, const GroupPlaces& to, float* left) {
    const V huge = splat(1e30f), infinite = splat(__builtin_inff()), limit = splat(127.0f), low = splat(-127.0f);
    float largest[LANES] = {}, scales[LANES], inverses[LANES];
    for (int i = 0; i < num; ++i) {
        const V a = abs(load(x + i * GROUP)), b = abs(load(x + i * GROUP + LANES));
        // Comparisons with NaN are false: an activation that is NaN or infinite makes the scale NaN, hence the outputs.
        largest[i] = reduce_max(max(where_less(a, huge, a, infinite), where_less(b, huge, b, infinite)));
    }
    const V sizes = load(largest), by = div(sizes, limit);
    const V known = where_less(sizes, huge, by, splat(__builtin_nanf("")));
    store(scales, where_less(sizes, splat(TINY), splat(0.0f), known));
    const V inverse = where_less(sizes, huge, div(splat(1.0f), by), splat(0.0f));
    store(inverses, where_less(sizes, splat(TINY), splat(0.0f), inverse));
    for (int i = 0; i < num; ++i) {
        const V factor = splat(inverses[i]);
        int8_t* const q = to.q + i * to.bytes;
        for (int half = 0; half < GROUP; half += LANES) {
            const V value = load(x + i * GROUP + half), kept = max(min(round(mul(value, factor)), limit), low);
            store_i8(q + half, kept);
            if (left) store(left + i * GROUP + half, fma(kept, splat(-scales[i]), value));
        }
        const int32_t second = sum_i8(q + LANES), sum = sum_i8(q) + second;
        to.scale[i * to.groups] = scales[i];
        to.scaled_sum[i * to.groups] = scales[i] * (float)sum;
        to.sums[2 * i * to.groups] = -128 * sum;
        to.sums[2 * i * to.groups + 1] = -128 * second;
    }
}

// All planes of groups from (row, group) on, `bytes` and `groups` apart.
static void quantize_planes(const float* x, int num, const QuantizedRows& to, int32_t row, int32_t group, size_t bytes,
                            size_t groups) {
    float left[LANES * GROUP];
    const bool has_more = to.planes > 1;
    quantize_groups(x, num, {to, row, 0, group, bytes, groups}, has_more ? left : nullptr);
    if (has_more) quantize_groups(left, num, {to, row, 1, group, bytes, groups}, nullptr);
}

constexpr int32_t MOST_CANDIDATES = 64;

// The row without its outliers in `rest`, and those where they belong. Without a branch that depends on the numbers but
// for the candidates, which are few. A row with a number that is not finite has none; neither have places beyond those of
// the first MOST_CANDIDATES numbers that are large enough.
static void take_outliers(const float* x, int32_t row, const QuantizedRows& to, float* rest) {
    const int32_t num = to.num_outliers;
    const V huge = splat(1e30f), infinite = splat(__builtin_inff());
    V largest = splat(0.0f);
    for (int32_t k = 0; k < to.width; k += LANES) {
        const V value = load(x + k), size = abs(value);
        store(rest + k, value);
        largest = max(where_less(size, huge, size, infinite), largest);
    }
    // Of the largest number in each lane the num-th: so many are at least as large, and few more.
    float of_lanes[LANES], least = TINY;
    store(of_lanes, largest);
    for (int i = 0; i < LANES; ++i) {
        const bool is_many = __builtin_popcount(lanes_from(largest, splat(of_lanes[i]))) >= num;
        const float at_least = is_many ? of_lanes[i] : 0.0f;
        least = at_least > least ? at_least : least;
    }
    float sizes[MOST_CANDIDATES];
    int32_t channels[MOST_CANDIDATES], count = 0;
    if (reduce_max(largest) < 1e30f)
        for (int32_t k = 0; k < to.width; k += LANES)
            for (uint32_t lanes = lanes_from(abs(load(x + k)), splat(least)); lanes; lanes &= lanes - 1) {
                if (count == MOST_CANDIDATES) break;
                channels[count] = k + __builtin_ctz(lanes);
                sizes[count] = __builtin_fabsf(x[channels[count]]);
                ++count;
            }
    for (int32_t i = count; i % LANES; ++i) sizes[i] = -1.0f;
    float outliers[MOST_OUTLIERS + 1] = {};
    int32_t found[MOST_OUTLIERS + 1] = {};
    for (int32_t i = 0; i < count; ++i) {
        int32_t rank = 0;  // how many are larger, or as large and come before
        for (int32_t j = 0; j < count; j += LANES) {
            const V others = load(sizes + j), own = splat(sizes[i]);
            const uint32_t no_smaller = lanes_from(others, own), no_larger = lanes_from(own, others);
            const uint32_t before = i < j ? 0 : i - j >= LANES ? 0xffff : (1u << (i - j)) - 1;
            rank += __builtin_popcount(no_smaller & ~no_larger) + __builtin_popcount(no_smaller & no_larger & before);
        }
        const int32_t place = rank < num ? rank : num;  // the last place is of those that are left out
        outliers[place] = x[channels[i]];
        found[place] = channels[i];
    }
    const int32_t num_found = count < num ? count : num;
    for (int32_t j = 0; j < num_found; ++j) rest[found[j]] = 0.0f;
    for (int32_t j = num_found; j < num; ++j) outliers[j] = 0.0f, found[j] = 0;
    memcpy(to.outliers + (size_t)row * num, outliers, num * sizeof(float));
    memcpy(to.channels + (size_t)row * num, found, num * sizeof(int32_t));
}

// The same of the fixed channels; a number that is not finite stays where it is.
static void take_fixed(const float* x, int32_t row, const QuantizedRows& to, float* rest) {
    memcpy(rest, x, to.width * sizeof(float));
    float* const outliers = to.outliers + (size_t)row * to.num_outliers;
    for (int32_t j = 0; j < to.num_outliers; ++j) {
        const float value = x[to.fixed[j]];
        const bool is_one = __builtin_fabsf(value) < 1e30f;
        outliers[j] = is_one ? value : 0.0f;
        rest[to.fixed[j]] = is_one ? 0.0f : value;
    }
}

static void quantize(const float* x, int32_t row, const QuantizedRows& to) {
    const int32_t groups = to.width / GROUP;
    float rest[MOST_WIDTH_WITH_OUTLIERS];
    if (to.num_outliers) {
        to.fixed ? take_fixed(x, row, to, rest) : take_outliers(x, row, to, rest);
        x = rest;
    }
    for (int32_t g = 0; g < groups; g += LANES, x += LANES * GROUP)
        quantize_planes(x, groups - g < LANES ? groups - g : LANES, to, row, g, GROUP, 1);
}

static void index_outliers(const QuantizedRows& rows, int32_t num_rows) {
    if (rows.fixed) return;
    constexpr int32_t WORD = 64;
    const int32_t num_words = (rows.width + WORD - 1) / WORD;
    uint64_t is_outlier[MOST_WIDTH_WITH_OUTLIERS / WORD];
    int16_t slot_of[MOST_WIDTH_WITH_OUTLIERS];
    const int32_t per_block = INDEXED_ROWS * rows.num_outliers, num = num_rows * rows.num_outliers;
    for (int32_t b = 0, first = 0; first < num; ++b, first += per_block) {
        const int32_t last = first + per_block < num ? first + per_block : num;
        memset(is_outlier, 0, num_words * sizeof(uint64_t));
        for (int32_t i = first; i < last; ++i) {
            const int32_t channel = rows.channels[i];
            is_outlier[channel / WORD] |= (uint64_t)1 << channel % WORD;
        }
        int32_t count = 0;
        for (int32_t word = 0; word < num_words; ++word)
            for (uint64_t bits = is_outlier[word]; bits; bits &= bits - 1) {
                const int32_t channel = word * WORD + __builtin_ctzll(bits);
                slot_of[channel] = (int16_t)count;
                rows.distinct[first + count++] = channel;
            }
        rows.num_distinct[b] = count;
        for (int32_t i = first; i < last; ++i) rows.slots[i] = slot_of[rows.channels[i]];
    }
}

static void quantize_column(const float* x, int32_t num_rows, int32_t group, const QuantizedRows& to) {
    const size_t row_bytes = (size_t)to.planes * to.width;
    for (int32_t row = 0; row < num_rows; row += LANES, x += LANES * GROUP)
        quantize_planes(x, num_rows - row < LANES ? num_rows - row : LANES, to, row, group, row_bytes, row_bytes / GROUP);
}

// --------------------------------------------------------------------------------------------------- reading weights

// How far quants are shifted up in their bytes (see linear_lanes.h).
constexpr int lift(const Layout& layout) { return SHIFTED_UP && !layout.has_minimum ? 8 - layout.bits : 0; }

// Step k4 of a group: [WIDTH rows][4 inputs] from row `row` on.
template <Packing P, int K4>
HR_INLINE Bytes group_bytes(const uint8_t* quants, int row) {
    constexpr int BITS = layout_of(P).bits, UP = lift(layout_of(P));
    quants += 4 * row;
    if constexpr (BITS == 8) {
        return load_bytes(quants + 64 * K4);
    } else {
        const Bytes w = mask(shift<K4 < 4 ? UP : UP - 4>(load_bytes(quants + 64 * (K4 & 3))), 15 << UP);
        if constexpr (BITS == 5) return join(w, mask(shift<4 + UP - K4>(load_bytes(quants + 256)), 16 << UP));
        if constexpr (BITS == 6)
            return join(w, mask(shift<4 + UP - 2 * (K4 & 3)>(load_bytes(quants + 256 + 64 * (K4 >> 2))), 48 << UP));
        return w;
    }
}

// Scales of a group: `second` is the minimum, or for Q6_K the scale of the second half, or unused.
struct Scales {
    F first, second;
};

template <Packing P>
HR_INLINE Scales group_scales(const uint8_t* heads, int32_t group, int row) {
    constexpr Layout layout = layout_of(P);
    constexpr int per_block = layout.block / GROUP;
    const uint8_t* head = heads + (size_t)(group / per_block) * layout.head_bytes;
    const F down = same(1.0f / (1 << lift(layout)));
    F d = halves(head + 2 * row);
    if constexpr (lift(layout) != 0) d = mul(d, down);
    if constexpr (P == Packing::Q6_K) {
        const uint8_t* s = head + 32 + 32 * (group % per_block) + row;
        return {mul(d, signed_bytes(s)), mul(d, signed_bytes(s + 16))};
    } else if constexpr (layout.has_subscales) {
        const uint8_t* s = head + 64 + 32 * (group % per_block) + row;
        const F minimum = mul(halves(head + 32 + 2 * row), unsigned_bytes(s + 16));
        return {mul(d, unsigned_bytes(s)), mul(minimum, same(-1.0f))};
    } else if constexpr (layout.has_minimum) {
        return {d, halves(head + 32 + 2 * row)};
    } else {
        return {d, d};
    }
}

// A group unpacked.
template <int BITS>
struct alignas(64) Staged {
    float first[STRIP], second[STRIP];
    uint8_t operands[8 * STRIP / WIDTH][sizeof(Operand<BITS>)];  // [k4][16 / WIDTH]
};

// Weights of one strip: as packed, or a panel of it staged (whose group 0 is the panel's first).
template <int BITS>
struct StripWeights {
    const uint8_t *heads, *quants;
    const Staged<BITS>* staged;
};

template <Packing P>
using Weights = StripWeights<layout_of(P).bits>;

template <Packing P, bool STAGED, int K4>
HR_INLINE Operand<layout_of(P).bits> weights_of(const Weights<P>& w, int32_t group, int row) {
    constexpr Layout layout = layout_of(P);
    if constexpr (STAGED)
        return load_operand<layout.bits>(w.staged[group].operands[K4 * (STRIP / WIDTH) + row / WIDTH]);
    else
        return operand<layout.bits>(group_bytes<P, K4>(w.quants + (size_t)group * layout.quants_bytes, row));
}
template <Packing P, bool STAGED>
HR_INLINE Scales scales_of(const Weights<P>& w, int32_t group, int row) {
    if constexpr (STAGED) return {floats(w.staged[group].first + row), floats(w.staged[group].second + row)};
    return group_scales<P>(w.heads, group, row);
}

template <Packing P, int K4 = 0>
HR_INLINE void stage_operands(const Weights<P>& w, int32_t group, int row, Staged<layout_of(P).bits>* to) {
    if constexpr (K4 < 8) {
        store_operand(to->operands[K4 * (STRIP / WIDTH) + row / WIDTH], weights_of<P, false, K4>(w, group, row));
        stage_operands<P, K4 + 1>(w, group, row, to);
    }
}

template <Packing P>
static void stage(const Weights<P>& w, int32_t first, int32_t last, Staged<layout_of(P).bits>* to) {
    for (int32_t group = first; group < last; ++group, ++to)
        for (int row = 0; row < STRIP; row += WIDTH) {
            const Scales scales = group_scales<P>(w.heads, group, row);
            keep(to->first + row, scales.first);
            keep(to->second + row, scales.second);
            stage_operands<P>(w, group, row, to);
        }
}

// Memory to fetch meanwhile, `lines` of 64 bytes per group or column. Few rows wait for it, in the L1 cache (one row is 4 %
// faster than from L2, and half as fast again beside a busy neighbour); many have activations and a panel there.
struct Ahead {
    const uint8_t* at;
    int32_t lines;
    const uint8_t* end;
};

// Inputs `channels` of a strip as [num][16] floats: what unpack_row gives.
template <Packing P>
static void unpack_columns(const Weights<P>& w, const int32_t* channels, int32_t num, float* to, Ahead ahead) {
    constexpr Layout layout = layout_of(P);
    for (int32_t i = 0; i < num; ++i, to += STRIP) {
        for (int32_t line = 0; line < ahead.lines && ahead.at < ahead.end; ++line, ahead.at += 64)
            __builtin_prefetch(ahead.at, 0, 3);
        const int32_t group = channels[i] / GROUP, k = channels[i] % GROUP, k4 = k / 4, byte = 8 * (k % 4);
        for (int row = 0; row < STRIP; row += WIDTH) {
            const uint8_t* const words = w.quants + (size_t)group * layout.quants_bytes + 4 * row;
            F q;
            if constexpr (layout.bits == 8)
                q = bits_of(words + 64 * k4, byte, 255);
            else
                q = bits_of(words + 64 * (k4 & 3), byte + (k4 & 4), 15);
            if constexpr (layout.bits == 5) q = fma(bits_of(words + 256, byte + k4, 1), same(16.0f), q);
            if constexpr (layout.bits == 6)
                q = fma(bits_of(words + 256 + 64 * (k4 >> 2), byte + 2 * (k4 & 3), 3), same(16.0f), q);
            const Scales scales = group_scales<P>(w.heads, group, row);
            F scale = P == Packing::Q6_K && k >= GROUP / 2 ? scales.second : scales.first;
            if constexpr (lift(layout) != 0) scale = mul(scale, same((float)(1 << lift(layout))));
            const F rest = layout.has_minimum ? scales.second : mul(scale, same(-(float)(1 << (layout.bits - 1))));
            keep(to + row, fma(q, scale, rest));  // both products are exact
        }
    }
}

// ------------------------------------------------------------------------------------------------------- one tile

// The activations of a tile: row r at r * the stride of each.
struct TileRows {
    const int8_t* q;
    const float *scale, *scaled_sum;
    const int32_t* sums;
    int32_t width;
};

template <Packing P, bool STAGED, int R, int N, int K4, int LAST>
HR_INLINE void steps(Sum<layout_of(P).bits> (&sum)[R][N], const Weights<P>& w, int32_t group, int row,
                     const int8_t* const (&q)[R]) {
    if constexpr (K4 < LAST) {
        for (int n = 0; n < N; ++n) {
            const auto weights = weights_of<P, STAGED, K4>(w, group, row + n * WIDTH);
            for (int r = 0; r < R; ++r)
                step(sum[r][n], K4 % (P == Packing::Q6_K ? 4 : 8), weights, q[r] + 4 * K4);
        }
        steps<P, STAGED, R, N, K4 + 1, LAST>(sum, w, group, row, q);
    }
}

// acc[r][16] += R rows of activations times groups [0, num) of the weights.
template <Packing P, bool STAGED, int R>
static void tile(Weights<P> w, int32_t num, TileRows x, float* acc, Ahead ahead) {
    constexpr Layout layout = layout_of(P);
    constexpr int PARTS = STRIP / WIDTH, N = layout.bits == 8 ? 1 : PARTS;  // registers of rows, at once
    const size_t groups = x.width / GROUP;
    F total[R][PARTS];
    for (int r = 0; r < R; ++r)
        for (int n = 0; n < PARTS; ++n) total[r][n] = floats(acc + r * STRIP + n * WIDTH);
    for (int32_t g = 0; g < num; ++g) {
        for (int32_t i = 0; i < ahead.lines && ahead.at < ahead.end; ++i, ahead.at += 64)
            __builtin_prefetch(ahead.at, 0, STAGED ? 2 : 3);
        for (int part = 0; part < PARTS; part += N) {
            const int row = part * WIDTH;
            const int8_t* q[R];
            for (int r = 0; r < R; ++r) {
                q[r] = x.q + (size_t)r * x.width;
                if constexpr (N < PARTS) q[r] = again(q[r]);  // or one part's broadcasts are kept for the next, in memory
            }
            Sum<layout.bits> sum[R][N];
            Scales scales[N];
            for (int n = 0; n < N; ++n) scales[n] = scales_of<P, STAGED>(w, g, row + n * WIDTH);
            if constexpr (P == Packing::Q6_K) {
                for (int r = 0; r < R; ++r)
                    for (int n = 0; n < N; ++n) begin(sum[r][n], x.sums[2 * r * groups] - x.sums[2 * r * groups + 1]);
                steps<P, STAGED, R, N, 0, 4>(sum, w, g, row, q);
                for (int r = 0; r < R; ++r)
                    for (int n = 0; n < N; ++n) {
                        const int32_t offset = x.sums[2 * r * groups] - x.sums[2 * r * groups + 1];
                        const F product = scaled(sum[r][n], offset, scales[n].first);
                        total[r][part + n] = fma(product, same(x.scale[r * groups]), total[r][part + n]);
                        begin(sum[r][n], x.sums[2 * r * groups + 1]);
                    }
                steps<P, STAGED, R, N, 4, 8>(sum, w, g, row, q);
                for (int r = 0; r < R; ++r)
                    for (int n = 0; n < N; ++n) {
                        const F product = scaled(sum[r][n], x.sums[2 * r * groups + 1], scales[n].second);
                        total[r][part + n] = fma(product, same(x.scale[r * groups]), total[r][part + n]);
                    }
            } else {
                for (int r = 0; r < R; ++r)
                    for (int n = 0; n < N; ++n) begin(sum[r][n], layout.has_minimum ? 0 : x.sums[2 * r * groups]);
                steps<P, STAGED, R, N, 0, 8>(sum, w, g, row, q);
                for (int r = 0; r < R; ++r)
                    for (int n = 0; n < N; ++n) {
                        const int32_t offset = layout.has_minimum ? 0 : x.sums[2 * r * groups];
                        const F product = scaled(sum[r][n], offset, scales[n].first);
                        F t = fma(product, same(x.scale[r * groups]), total[r][part + n]);
                        if constexpr (layout.has_minimum)
                            t = fma(scales[n].second, same(x.scaled_sum[r * groups]), t);
                        total[r][part + n] = t;
                    }
            }
        }
        x.q += GROUP;
        x.scale += 1;
        x.scaled_sum += 1;
        x.sums += 2;
    }
    for (int r = 0; r < R; ++r)
        for (int n = 0; n < PARTS; ++n) keep(acc + r * STRIP + n * WIDTH, total[r][n]);
}

// Groups [first, first + num) of the activations from row `row` on.
HR_INLINE TileRows tile_rows(const QuantizedRows& x, int32_t row, int32_t first) {
    const size_t at = (size_t)row * (x.width / GROUP) + first;
    return {x.q + at * GROUP, x.scale + at, x.scaled_sum + at, x.sums + 2 * at, x.width};
}

template <Packing P, bool STAGED, int R = MAX_TILE>
HR_INLINE void tile_of(int rows, const Weights<P>& w, int32_t num, const TileRows& x, float* acc, Ahead ahead) {
    if constexpr (R == 1)
        tile<P, STAGED, 1>(w, num, x, acc, ahead);
    else if (rows == R)
        tile<P, STAGED, R>(w, num, x, acc, ahead);
    else
        tile_of<P, STAGED, R - 1>(rows, w, num, x, acc, ahead);
}

// What of the weights to ask memory for while others are multiplied: `bytes` from `at` on, before `end`.
struct Asked {
    const uint8_t* at;
    size_t bytes;
    const uint8_t* end;
};

// Rows [row, row + num_rows) in tiles of about equal size, which share the asking.
template <Packing P, bool STAGED>
static void tiles(const Weights<P>& w, int32_t first, int32_t num, const QuantizedRows& x, int32_t row,
                  int32_t num_rows, float* acc, Asked asked) {
    int32_t left = num_rows, pieces = (left + MAX_TILE - 1) / MAX_TILE;
    const size_t per_tile = (size_t)num * 64;
    const int32_t lines = (int32_t)((asked.bytes + per_tile * pieces - 1) / (per_tile * pieces));
    const uint8_t *at = asked.at, *const end = asked.at + asked.bytes < asked.end ? asked.at + asked.bytes : asked.end;
    for (; left > 0; --pieces, at += lines * per_tile) {
        const int32_t rows = (left + pieces - 1) / pieces, done = num_rows - left;
        tile_of<P, STAGED>(rows, w, num, tile_rows(x, row + done, first), acc + done * STRIP,
                           {at, at < end ? lines : 0, end});
        left -= rows;
    }
}

// --------------------------------------------------------------------------------------------------------- product

// Rows from which staging pays, measured: never where vpdpbusd takes the packed bytes as they are, from two tiles on
// where AVX2 would split them into nibbles, else from three.
constexpr int32_t stage_from(int bits) {
    if (bits == 8) return WIDTH == STRIP ? INT32_MAX : MAX_TILE + 1;
    return 2 * MAX_TILE + 1;
}
constexpr int32_t STAGED_GROUPS = 24;             // at most 15 KiB in the L1 cache (AVX2, 8 bits: 27)
constexpr int32_t ROWS_AT_ONCE = INDEXED_ROWS;    // of planes: sums kept while a strip's panels pass

HR_INLINE void finish_row(const float* acc, int num, const float* bias, bool accumulate, float* out) {
    V v = load(acc);
    if (num == STRIP) {
        if (bias) v = add(v, load(bias));
        if (accumulate) v = add(v, load(out));
        store(out, v);
    } else {
        if (bias) v = add(v, load_part(bias, num, 0.0f));
        if (accumulate) v = add(v, load_part(out, num, 0.0f));
        store_part(out, v, num);
    }
}

// acc[r][16] = the products of the rows' outliers, by the columns of their block [distinct][16].
static void begin_rows(const QuantizedRows& x, int32_t row, int32_t num_rows, const float* columns, float* acc) {
    const int32_t num = x.num_outliers;
    const float* outlier = x.outliers + (size_t)row * num;
    const int32_t* slot = x.slots + (size_t)row * num;
    for (int32_t r = 0; r < num_rows; ++r, outlier += num, slot += num) {
        V sum = splat(0.0f);
        for (int32_t j = 0; j < num; ++j) sum = fma(splat(outlier[j]), load(columns + slot[j] * STRIP), sum);
        store(acc + r * STRIP, sum);
    }
}

// The same by fixed columns, R rows at a time.
template <int R>
static void begin_fixed(const QuantizedRows& x, int32_t row, int32_t num_rows, const float* columns, float* acc) {
    const int32_t num = x.num_outliers;
    const float* outlier = x.outliers + (size_t)row * num;
    int32_t r = 0;
    for (; r + R <= num_rows; r += R, outlier += (size_t)R * num) {
        V sums[R];
        for (int i = 0; i < R; ++i) sums[i] = splat(0.0f);
        for (int32_t j = 0; j < num; ++j) {
            const V weights = load(columns + j * STRIP);
            for (int i = 0; i < R; ++i) sums[i] = fma(splat(outlier[(size_t)i * num + j]), weights, sums[i]);
        }
        for (int i = 0; i < R; ++i) store(acc + (r + i) * STRIP, sums[i]);
    }
    if constexpr (R > 1)
        if (r < num_rows) begin_fixed<R / 2>(x, row + r, num_rows - r, columns, acc + r * STRIP);
}

template <Packing P>
static void linear_packed(const PackedMatrix& matrix, int32_t first, int32_t last, int32_t fetch_last,
                          const QuantizedRows& x, int32_t num_rows, float* out, size_t out_stride, Epilogue epilogue) {
    const size_t bytes = strip_bytes(P, matrix.width), heads = heads_bytes(layout_of(P), matrix.width);
    const int32_t groups = matrix.width / GROUP;
    const int32_t panels = (groups + STAGED_GROUPS - 1) / STAGED_GROUPS;
    alignas(64) float acc[ROWS_AT_ONCE * STRIP];
    alignas(64) float columns[INDEXED_ROWS * MOST_OUTLIERS * STRIP];
    Staged<layout_of(P).bits> staged[STAGED_GROUPS];
    for (int32_t s = first; s < last; ++s) {
        const uint8_t* strip = matrix.data + s * bytes;
        const Weights<P> packed{strip, strip + heads, nullptr}, panel{nullptr, nullptr, staged};
        const int32_t outputs = matrix.rows - s * STRIP < STRIP ? matrix.rows - s * STRIP : STRIP;
        const float* bias = epilogue.bias ? epilogue.bias + s * STRIP : nullptr;
        for (int32_t row = 0; row < x.planes * num_rows; row += ROWS_AT_ONCE) {
            const int32_t left = x.planes * num_rows - row, rows = left < ROWS_AT_ONCE ? left : ROWS_AT_ONCE;
            // The first rows wait for the strip: they ask early for those that follow (the processor's own prefetch stops
            // at each page of 4 KiB). The others find it in the cache.
            const uint8_t* const fetch_end = row == 0 ? matrix.data + bytes * fetch_last : matrix.data;
            // With one tile memory is what is waited for, and it would have nothing to do while columns are unpacked.
            const Ahead beside_column{strip + FETCH_AHEAD, rows <= MAX_TILE, fetch_end};
            int32_t num_columns = 0;
            if (x.fixed) {
                num_columns = row == 0 ? x.num_outliers : 0;
                unpack_columns<P>(packed, x.fixed, num_columns, columns, beside_column);
                begin_fixed<WIDTH == STRIP ? 8 : 4>(x, row, rows, columns, acc);
            } else if (x.num_outliers) {
                const int32_t block = row / INDEXED_ROWS;
                num_columns = x.num_distinct[block];
                const int32_t* distinct = x.distinct + (size_t)block * INDEXED_ROWS * x.num_outliers;
                unpack_columns<P>(packed, distinct, num_columns, columns, beside_column);
                begin_rows(x, row, rows, columns, acc);
            } else {
                memset(acc, 0, rows * STRIP * sizeof(float));
            }
            if (rows < stage_from(layout_of(P).bits)) {
                const size_t most = 64 * (size_t)(num_columns * beside_column.lines), asked = most < bytes ? most : bytes;
                tiles<P, false>(packed, 0, groups, x, row, rows, acc,
                                {strip + FETCH_AHEAD + asked, bytes - asked, fetch_end});
            } else {
                for (int32_t p = 0; p < panels; ++p) {
                    const int32_t from = groups * p / panels, to = groups * (p + 1) / panels;
                    stage<P>(packed, from, to, staged);
                    const size_t at = bytes * p / panels, size = bytes * (p + 1) / panels - at;
                    tiles<P, true>(panel, from, to - from, x, row, rows, acc,
                                   {strip + FETCH_AHEAD + at, size, fetch_end});
                }
            }
            for (int32_t r = 0; r < rows; r += x.planes) {
                float* const sum = acc + r * STRIP;
                if (x.planes > 1) store(sum, add(load(sum), load(sum + STRIP)));
                finish_row(sum, outputs, bias, epilogue.accumulate,
                           out + (size_t)((row + r) / x.planes) * out_stride + s * STRIP);
            }
        }
    }
}

static void linear_quantized(const PackedMatrix& matrix, int32_t first, int32_t last, int32_t fetch_last,
                             const QuantizedRows& x, int32_t num_rows, float* out, size_t out_stride,
                             Epilogue epilogue) {
    auto* run = &linear_packed<Packing::Q4_0>;
    switch (matrix.packing) {
        case Packing::Q4_1: run = &linear_packed<Packing::Q4_1>; break;
        case Packing::Q5_0: run = &linear_packed<Packing::Q5_0>; break;
        case Packing::Q5_1: run = &linear_packed<Packing::Q5_1>; break;
        case Packing::Q8_0: run = &linear_packed<Packing::Q8_0>; break;
        case Packing::Q4_K: run = &linear_packed<Packing::Q4_K>; break;
        case Packing::Q5_K: run = &linear_packed<Packing::Q5_K>; break;
        case Packing::Q6_K: run = &linear_packed<Packing::Q6_K>; break;
        default: break;  // Q4_0; float formats go to linear_float
    }
    run(matrix, first, last, fetch_last, x, num_rows, out, out_stride, epilogue);
}

}  // namespace headrace::HEADRACE_ISA
