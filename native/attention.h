// Attention over a paged cache: softmax(scale q k^T) v, one kernel for any span.
//
// Layout. Positions lie in units of 16; a block of `block_size` positions is block_size / 16 units, one after the other:
//     keys   [unit][kv_head][key_width][16]      lanes over positions, the sum over key_width in order
//     values [unit][kv_head][16][value_width]    lanes over value_width, the sum over positions in order
// Numbers never written are zero, and what is stored is made finite: a masked position has weight exactly 0, and
// 0 times a finite number adds nothing, so a query may be computed with any masked neighbours.
//
// Order of sums. The context is cut at multiples of CHUNK positions. A chunk gives, per query and head, its largest
// score, the sum of its weights e^(score - largest) and the weighted sum of its values; chunks merge in order. Within
// a chunk nothing depends on which queries share a tile or which thread computes: the same bits always.
//
// Rows. A row is a query of one head; the rows of a call are all heads that share a key head, query by query. Tiles of
// up to TILE_ROWS rows share each load of keys and values.
//
// Count: 2 * (key_width + value_width) flops per row and position, and about 25 for softmax; each byte of keys and
// values is read once per tile of rows.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace headrace::HEADRACE_ISA {

constexpr int32_t UNIT = LANES;                 // positions
constexpr int32_t CHUNK_UNITS = CHUNK / UNIT;
constexpr int32_t ROW_STRIDE = CHUNK + LANES;   // of scores: not a power of two, which would crowd a few cache sets
constexpr float NOTHING = -__builtin_inff();

// Sums held in registers: TILE_ROWS rows times 2 (AVX-512) or 1 (AVX2) vectors, beside a vector of keys or two, so that what
// each row multiplies with is read again for each of those; a few rows take more vectors, so that enough sums are under way
// to hide the latency of fma.
#if defined(HEADRACE_AVX512)
constexpr int TILE_ROWS = 14;
#define HR_TILE static __attribute__((noinline))  // inside others pointers end up in vector registers
constexpr int tile_vectors(int rows) { return rows <= 3 ? 8 : rows <= 6 ? 4 : 2; }
constexpr bool reads_again(int rows) { return rows > 6; }
#elif defined(HEADRACE_AVX2)
constexpr int TILE_ROWS = 6;
#define HR_TILE static inline
constexpr int tile_vectors(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
constexpr bool reads_again(int) { return true; }
#else
constexpr int TILE_ROWS = 3;
#define HR_TILE static inline
constexpr int tile_vectors(int) { return 1; }
constexpr bool reads_again(int) { return false; }
#endif

// The first tile of a chunk waits for memory: each asks early for what is read next, which costs the others nothing that
// could be measured. A list of units therefore goes on for LOOKAHEAD units behind the last one that is summed: values
// follow keys, the next chunk follows the values.
constexpr int LOOKAHEAD = 8;
constexpr int MIX_AHEAD = 4;  // units

HR_INLINE V load_kv(const uint16_t* p) { return load_f16(p); }
HR_INLINE V load_kv(const float* p) { return load(p); }

// --------------------------------------------------------------------------------------------------------- the cache

struct Unit {
    size_t block_at;  // bytes from block 0
    int32_t inside;   // units from the block's first
};

HR_INLINE Unit unit_of(const AttentionCache& cache, const int32_t* table, int32_t position) {
    const int32_t block = position / cache.block_size, inside = position % cache.block_size / UNIT;
    return {(size_t)table[block] * cache.stride, inside};
}

HR_INLINE int32_t stored_value_width(const AttentionCache& cache) {
    return cache.value_width ? cache.value_width : cache.key_width;
}

template <typename T>
HR_INLINE const T* key_unit(const AttentionCache& cache, Unit unit, int32_t kv_head) {
    const T* const block = (const T*)(cache.keys + unit.block_at);
    return block + ((size_t)unit.inside * cache.kv_heads + kv_head) * cache.key_width * UNIT;
}

template <typename T>
HR_INLINE const T* value_unit(const AttentionCache& cache, Unit unit, int32_t kv_head) {
    const T* const block = (const T*)(cache.values + unit.block_at);
    return block + ((size_t)unit.inside * cache.kv_heads + kv_head) * stored_value_width(cache) * UNIT;
}

// What the cache holds is finite: an infinity or NaN would reach whoever is given the block next.
HR_INLINE V finite(V x, float largest) { return max(min(x, splat(largest)), splat(-largest)); }

HR_INLINE void convert(V x, uint16_t* to) { store_f16(to, finite(x, 65504.0f)); }
HR_INLINE void convert(V x, float* to) { store(to, finite(x, 3.402823466e38f)); }

template <typename T>
static void store_row(T* to, size_t step, const float* from, int32_t width) {  // to[i * step] = from[i]
    T lanes[LANES];
    for (int32_t i = 0; i < width; i += LANES) {
        const int32_t count = width - i < LANES ? width - i : LANES;
        convert(count == LANES ? load(from + i) : load_part(from + i, count, 0.0f), lanes);
        for (int32_t j = 0; j < count; ++j) to[(size_t)(i + j) * step] = lanes[j];
    }
}

template <typename T>
static void store_kv_as(const AttentionCache& cache, const int32_t* table, int32_t slot, const float* k, const float* v) {
    const Unit unit = unit_of(cache, table, slot);
    const int32_t inside = slot % UNIT, value_width = stored_value_width(cache);
    if (!cache.value_width) v = k;
    for (int32_t head = 0; head < cache.kv_heads; ++head) {
        store_row((T*)key_unit<T>(cache, unit, head) + inside, UNIT, k + (size_t)head * cache.key_width, cache.key_width);
        store_row((T*)value_unit<T>(cache, unit, head) + inside * value_width, 1, v + (size_t)head * value_width,
                  value_width);
    }
}

static void store_kv(const AttentionCache& cache, const int32_t* table, int32_t slot, const float* k, const float* v) {
    if (cache.is_f16)
        store_kv_as<uint16_t>(cache, table, slot, k, v);
    else
        store_kv_as<float>(cache, table, slot, k, v);
}

// ---------------------------------------------------------------------------------------------------- register tiles

// scores[row][unit * 16 + lane] = q . k for ROWS rows and UNITS units; q is [key_width][ROWS].
template <typename T, int ROWS, int UNITS>
HR_TILE void score_tile(const T* const* units, int32_t key_width, const float* q, float* scores) {
    V sums[ROWS][UNITS];
    const T *k[UNITS], *next[UNITS];
#pragma GCC unroll 16
    for (int u = 0; u < UNITS; ++u) {
        k[u] = units[u];
        next[u] = units[UNITS + u];
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) sums[r][u] = splat(0.0f);
    }
    for (int32_t d = 0; d < key_width; ++d, q += ROWS) {
#pragma GCC unroll 16
        for (int u = 0; u < UNITS; ++u) {
            const V key = load_kv(k[u] + (size_t)d * UNIT);
            __builtin_prefetch(next[u] + (size_t)d * UNIT);
            const float* const factors = reads_again(ROWS) ? again(q) : q;
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; ++r) sums[r][u] = fma(splat(factors[r]), key, sums[r][u]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
        for (int u = 0; u < UNITS; ++u) store(scores + r * ROW_STRIDE + u * UNIT, sums[r][u]);
}

template <typename T, int ROWS, int UNITS = tile_vectors(ROWS)>
static void score_units(const T* const* units, int32_t num_units, int32_t key_width, const float* q, float* scores) {
    for (; num_units >= UNITS; num_units -= UNITS, units += UNITS, scores += UNITS * UNIT)
        score_tile<T, ROWS, UNITS>(units, key_width, q, scores);
    if constexpr (UNITS > 1)
        if (num_units) score_units<T, ROWS, UNITS / 2>(units, num_units, key_width, q, scores);
}

template <typename T, int ROWS = TILE_ROWS>
static void score(int32_t rows, const T* const* units, int32_t num_units, int32_t key_width, const float* q,
                  float* scores) {
    if constexpr (ROWS > 1)
        if (rows < ROWS) return score<T, ROWS - 1>(rows, units, num_units, key_width, q, scores);
    score_units<T, ROWS>(units, num_units, key_width, q, scores);
}

// to[row][column ...] = from[row][column ...] + sum over positions, in order, of weights[row][position] * v[position];
// `from` null: zeros. ROWS rows, VECTORS * 16 columns; `v_stride` is the width of a position's stored values.
template <typename T, int ROWS, int VECTORS>
HR_TILE void mix_tile(const T* const* units, int32_t num_units, int32_t v_stride, int32_t column, const float* weights,
                      const float* from, float* to, int32_t stride) {
    V sums[ROWS][VECTORS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
        for (int c = 0; c < VECTORS; ++c)
            sums[r][c] = from ? load(from + (size_t)r * stride + column + c * LANES) : splat(0.0f);
    for (int32_t u = 0; u < num_units; ++u, weights += UNIT) {
        const T *v = units[u] + column, *next = units[u + MIX_AHEAD] + column;
        for (int32_t j = 0; j < UNIT; ++j, v += v_stride, next += v_stride) {
#pragma GCC unroll 16
            for (int c = 0; c < VECTORS; ++c) {
                __builtin_prefetch(next + c * LANES);
                const V value = load_kv(v + c * LANES);
                const float* const factors = reads_again(ROWS) ? again(weights + j) : weights + j;
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; ++r) sums[r][c] = fma(splat(factors[r * ROW_STRIDE]), value, sums[r][c]);
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
        for (int c = 0; c < VECTORS; ++c) store(to + (size_t)r * stride + column + c * LANES, sums[r][c]);
}

// Columns [column, width). The last vectors end at `width`: they may compute some columns again, to the same bits.
template <typename T, int ROWS, int VECTORS = tile_vectors(ROWS)>
static void mix_columns(const T* const* units, int32_t num_units, int32_t v_stride, int32_t column, int32_t width,
                        const float* weights, const float* from, float* to, int32_t stride) {
    for (; column + VECTORS * LANES <= width; column += VECTORS * LANES)
        mix_tile<T, ROWS, VECTORS>(units, num_units, v_stride, column, weights, from, to, stride);
    if (column >= width) return;
    if constexpr (VECTORS > 1)
        mix_columns<T, ROWS, VECTORS / 2>(units, num_units, v_stride, column, width, weights, from, to, stride);
    else
        mix_tile<T, ROWS, 1>(units, num_units, v_stride, width - LANES, weights, from, to, stride);
}

// Values narrower than a vector: the same sums, lane by lane out of copies.
template <typename T>
static void mix_narrow(int32_t rows, const T* const* units, int32_t num_units, int32_t v_stride, int32_t width,
                       const float* weights, const float* from, float* to, int32_t stride) {
    for (int32_t r = 0; r < rows; ++r) {
        V sum = from ? load_part(from + (size_t)r * stride, width, 0.0f) : splat(0.0f);
        for (int32_t p = 0; p < num_units * UNIT; ++p) {
            T lanes[LANES] = {};
            memcpy(lanes, units[p / UNIT] + (size_t)(p % UNIT) * v_stride, width * sizeof(T));
            sum = fma(splat(weights[r * ROW_STRIDE + p]), load_kv(lanes), sum);
        }
        store_part(to + (size_t)r * stride, sum, width);
    }
}

template <typename T, int ROWS = TILE_ROWS>
static void mix(int32_t rows, const T* const* units, int32_t num_units, int32_t v_stride, int32_t width,
                const float* weights, const float* from, float* to, int32_t stride) {
    if constexpr (ROWS > 1)
        if (rows < ROWS) return mix<T, ROWS - 1>(rows, units, num_units, v_stride, width, weights, from, to, stride);
    if (width < LANES)
        mix_narrow<T>(rows, units, num_units, v_stride, width, weights, from, to, stride);
    else
        mix_columns<T, ROWS>(units, num_units, v_stride, 0, width, weights, from, to, stride);
}

// ----------------------------------------------------------------------------------------------------------- softmax

HR_INLINE float exp_of(float x) {
    float lanes[LANES];
    store(lanes, exp(splat(x)));
    return lanes[0];
}

// Scores of units [first, last) to weights e^(score - largest); positions outside [low, high) get 0.
// Returns the largest score (NOTHING where no position is inside) and the sum of the weights.
static float weigh(float* scores, int32_t first, int32_t last, int32_t low, int32_t high, float cap, float* sum) {
    static const float lanes[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    V largest = splat(NOTHING);
    for (int32_t u = first; u < last; ++u) {
        V s = load(scores + u * UNIT);
        const bool is_masked = u * UNIT < low || (u + 1) * UNIT > high;
        if (cap != 0.0f) s = mul(splat(cap), tanh(div(s, splat(cap))));
        if (is_masked) {
            const V position = add(load(lanes), splat((float)(u * UNIT)));
            s = where_less(position, splat((float)high), s, splat(NOTHING));
            s = where_less(position, splat((float)low), splat(NOTHING), s);
        }
        if (is_masked || cap != 0.0f) store(scores + u * UNIT, s);
        largest = max(largest, s);
    }
    const float peak = reduce_max(largest);
    V total = splat(0.0f);
    if (peak == NOTHING) {
        for (int32_t u = first; u < last; ++u) store(scores + u * UNIT, total);
        *sum = 0.0f;
        return NOTHING;
    }
    for (int32_t u = first; u < last; ++u) {
        const V w = exp(sub(load(scores + u * UNIT), splat(peak)));
        store(scores + u * UNIT, w);
        total = add(total, w);
    }
    *sum = reduce_add(total);
    return peak;
}

// What a chunk, or all chunks so far, gives for a row: value_width weighted values, the largest score, the sum of weights.
HR_INLINE int32_t partial_size(const AttentionShape& shape) { return shape.value_width + 2; }

static void merge_partial(float* into, const float* values, float peak, float sum, int32_t width) {
    if (peak == NOTHING) return;
    const float largest = into[width] > peak ? into[width] : peak;
    const float old_factor = exp_of(into[width] - largest), factor = exp_of(peak - largest);
    const V a = splat(old_factor), b = splat(factor);
    int32_t i = 0;
    for (; i + LANES <= width; i += LANES) store(into + i, fma(load(values + i), b, mul(load(into + i), a)));
    if (i < width) {
        const int32_t rest = width - i;
        const V old = mul(load_part(into + i, rest, 0.0f), a);
        store_part(into + i, fma(load_part(values + i, rest, 0.0f), b, old), rest);
    }
    into[width] = largest;
    into[width + 1] = __builtin_fmaf(sum, factor, into[width + 1] * old_factor);
}

static void clear_partial(float* part, int32_t width) {
    for (int32_t i = 0; i < width; ++i) part[i] = 0.0f;
    part[width] = NOTHING;
    part[width + 1] = 0.0f;
}

static void finish_row(const float* part, int32_t width, float* out) {
    const V inverse = div(splat(1.0f), splat(part[width + 1]));
    const V zero = splat(0.0f);  // added: a sum of tiny numbers must not show in the sign of a zero
    int32_t i = 0;
    for (; i + LANES <= width; i += LANES) store(out + i, add(mul(load(part + i), inverse), zero));
    if (i < width) store_part(out + i, add(mul(load_part(part + i, width - i, 0.0f), inverse), zero), width - i);
}

// ------------------------------------------------------------------------------------------------------------ a call

struct AttendCall {
    const AttentionShape& shape;
    const AttentionCache& cache;
    const Span& span;
    const int32_t* parents;
    int32_t kv_head, first, num;

    int32_t sharing() const { return shape.heads / shape.kv_heads; }
    int32_t num_rows() const { return num * sharing(); }

    // Of query `i` of the call: its place in the sequence. In a tree, the depth below the cache counts.
    int32_t position(int32_t i) const {
        if (!parents) return span.start + first + i;
        int32_t depth = 0;
        for (int32_t row = parents[first + i]; row >= 0; row = parents[row]) ++depth;
        return span.start + depth;
    }
    int32_t lowest(int32_t position) const {  // the first position that a query at `position` sees
        return shape.window && position >= shape.window ? position - shape.window + 1 : 0;
    }
};

HR_INLINE size_t padded(size_t count) { return (count + LANES - 1) / LANES * LANES; }

// Working memory of a thread; `attend_scratch` floats.
struct AttendScratch {
    float* q;        // [tile][key_width][rows of the tile], scaled
    float* running;  // [rows][partial_size]
    float* scores;   // [TILE_ROWS][ROW_STRIDE]
    float* mixed;    // [TILE_ROWS][value_width]
    float* row_q;    // [key_width]       trees only, as all below
    float* row_mixed;  // [value_width]
    float* keys;     // a chunk of one path, in the layout of the cache
    float* values;
    size_t size;

    AttendScratch(const AttentionShape& shape, int32_t num, float* at) {
        const size_t rows = (size_t)num * (shape.heads / shape.kv_heads), kw = shape.key_width, vw = shape.value_width;
        float* const begin = at;
        const auto take = [&](size_t count) {
            float* const taken = at;
            at += padded(count);
            return taken;
        };
        q = take(rows * kw);
        running = take(rows * (vw + 2));
        scores = take(TILE_ROWS * ROW_STRIDE);
        mixed = take(TILE_ROWS * vw);
        row_q = take(kw);
        row_mixed = take(vw);
        keys = take(CHUNK * kw);
        values = take(CHUNK * vw);
        size = at - begin;
    }
};

// Rows are cut into tiles as equal as can be.
HR_INLINE int32_t tile_rows(int32_t rows_left) {
    const int32_t tiles = (rows_left + TILE_ROWS - 1) / TILE_ROWS;
    return (rows_left + tiles - 1) / tiles;
}

static void pack_queries(const AttendCall& call, const float* q, size_t q_stride, float* packed) {
    const int32_t width = call.shape.key_width, sharing = call.sharing(), rows = call.num_rows();
    for (int32_t row = 0, count; row < rows; row += count) {
        count = tile_rows(rows - row);
        float* const tile = packed + (size_t)row * width;
        for (int32_t r = 0; r < count; ++r) {
            const int32_t query = (row + r) / sharing, head = call.kv_head * sharing + (row + r) % sharing;
            const float* from = q + (size_t)(call.span.first_row + call.first + query) * q_stride + (size_t)head * width;
            for (int32_t d = 0; d < width; ++d) tile[(size_t)d * count + r] = from[d] * call.shape.scale;
        }
    }
}

// The part of a chunk that a row of a tree sees on its own path, [from, to) of the chunk's positions, copied into units
// in order of position: `keys` (or, with `as_values`, values) of the cache before the span in the first unit, then of the
// ancestors. Everything else in the units is zero.
template <typename T>
static void gather_path(const AttendCall& call, int32_t query, int32_t chunk_start, int32_t from, int32_t to, T* keys,
                        T* values) {
    const AttentionCache& cache = call.cache;
    const int32_t start = call.span.start, kw = call.shape.key_width, vw = call.shape.value_width;
    const int32_t v_stride = stored_value_width(cache), units = (to - from + UNIT - 1) / UNIT;
    if (keys) memset(keys, 0, (size_t)units * UNIT * kw * sizeof(T));
    if (values) memset(values, 0, (size_t)units * UNIT * vw * sizeof(T));
    const auto copy = [&](int32_t slot, int32_t position) {
        const Unit unit = unit_of(cache, call.span.table, slot);
        const int32_t place = position - chunk_start - from;
        if (keys) {
            const T* k = key_unit<T>(cache, unit, call.kv_head) + slot % UNIT;
            T* target = keys + (size_t)(place / UNIT) * UNIT * kw + place % UNIT;
            for (int32_t d = 0; d < kw; ++d) target[(size_t)d * UNIT] = k[(size_t)d * UNIT];
        }
        if (values)
            memcpy(values + (size_t)place * vw,
                   value_unit<T>(cache, unit, call.kv_head) + (size_t)(slot % UNIT) * v_stride, vw * sizeof(T));
    };
    for (int32_t position = chunk_start + from; position < start; ++position) copy(position, position);
    int32_t position = call.position(query);
    for (int32_t row = call.first + query; row >= 0; row = call.parents[row], --position)
        if (position >= chunk_start + from && position < chunk_start + to) copy(start + row, position);
}

// One tile of rows over one chunk; leaves weighted values in scratch.mixed, and peaks and sums. Returns whether any row
// sees any of it.
template <typename T>
static bool attend_tile(const AttendCall& call, int32_t chunk, int32_t row, int32_t count, const AttendScratch& scratch,
                        float* peaks, float* sums) {
    const AttentionShape& shape = call.shape;
    const int32_t sharing = call.sharing(), base = chunk * CHUNK, vw = shape.value_width;
    // What each row sees of the chunk, and what all of them may see: positions [low, high) relative to the chunk.
    int32_t lows[TILE_ROWS], highs[TILE_ROWS], low = CHUNK, high = 0;
    for (int32_t r = 0; r < count; ++r) {
        const int32_t position = call.position((row + r) / sharing), lowest = call.lowest(position);
        lows[r] = lowest > base ? lowest - base : 0;
        highs[r] = position + 1 - base < CHUNK ? position + 1 - base : CHUNK;
        if (lows[r] >= highs[r]) continue;
        if (lows[r] < low) low = lows[r];
        if (highs[r] > high) high = highs[r];
    }
    if (low >= high) return false;
    const int32_t first_unit = low / UNIT;
    int32_t last_unit = (high + UNIT - 1) / UNIT, shared_end = last_unit;
    if (call.parents) {  // from the unit that holds the span's start on, each row of a tree has a context of its own
        shared_end = call.span.start / UNIT - chunk * CHUNK_UNITS;
        shared_end = shared_end < first_unit ? first_unit : shared_end < last_unit ? shared_end : last_unit;
    }
    const int32_t shared_units = shared_end - first_unit;
    const T* units[2 * CHUNK_UNITS + LOOKAHEAD] = {};
    const T* const* const keys = units;
    const T* const* const values = units + shared_units;
    for (int32_t u = 0; u < shared_units; ++u) {
        const Unit unit = unit_of(call.cache, call.span.table, base + (first_unit + u) * UNIT);
        units[u] = key_unit<T>(call.cache, unit, call.kv_head);
        units[shared_units + u] = value_unit<T>(call.cache, unit, call.kv_head);
    }
    for (int32_t u = 0; u < LOOKAHEAD && shared_units; ++u) {
        const int32_t position = base + (shared_end + u) * UNIT;
        const bool is_there = position < call.span.start + call.span.count;
        const Unit unit = is_there ? unit_of(call.cache, call.span.table, position) : Unit{};
        units[2 * shared_units + u] = is_there ? key_unit<T>(call.cache, unit, call.kv_head) : units[0];
    }
    const float* q = scratch.q + (size_t)row * shape.key_width;
    score<T>(count, keys, shared_units, shape.key_width, q, scratch.scores + first_unit * UNIT);

    const int32_t own_units = last_unit - shared_end, from = shared_end * UNIT, to = last_unit * UNIT;
    const T *own_keys[CHUNK_UNITS + LOOKAHEAD], *own_values[CHUNK_UNITS + LOOKAHEAD];
    for (int32_t u = 0; own_units && u < CHUNK_UNITS + LOOKAHEAD; ++u) {
        const size_t at = u < own_units ? u : 0;
        own_keys[u] = (const T*)scratch.keys + at * UNIT * shape.key_width;
        own_values[u] = (const T*)scratch.values + at * UNIT * vw;
    }
    for (int32_t r = 0, gathered = -1; own_units && r < count; ++r) {
        const int32_t query = (row + r) / sharing;
        if (query != gathered) gather_path<T>(call, query, base, from, to, (T*)scratch.keys, nullptr);
        gathered = query;
        for (int32_t d = 0; d < shape.key_width; ++d) scratch.row_q[d] = q[(size_t)d * count + r];
        score<T>(1, own_keys, own_units, shape.key_width, scratch.row_q, scratch.scores + r * ROW_STRIDE + from);
    }

    for (int32_t r = 0; r < count; ++r)
        peaks[r] = weigh(scratch.scores + r * ROW_STRIDE, first_unit, last_unit, lows[r], highs[r], shape.softcap, sums + r);

    mix<T>(count, values, shared_units, stored_value_width(call.cache), vw,
           scratch.scores + first_unit * UNIT, nullptr, scratch.mixed, vw);
    for (int32_t r = 0, gathered = -1; own_units && r < count; ++r) {
        const int32_t query = (row + r) / sharing;
        if (query != gathered) gather_path<T>(call, query, base, from, to, nullptr, (T*)scratch.values);
        gathered = query;
        float* const mixed = scratch.mixed + (size_t)r * vw;
        mix<T>(1, own_values, own_units, vw, vw, scratch.scores + r * ROW_STRIDE + from, mixed, scratch.row_mixed, vw);
        memcpy(mixed, scratch.row_mixed, vw * sizeof(float));
    }
    return true;
}

// Chunks [first_chunk, last_chunk) of all rows: each into a partial of its own in `parts` [chunk][row][partial_size],
// or, where that is null, merged into scratch.running.
template <typename T>
static void attend_chunks(const AttendCall& call, int32_t first_chunk, int32_t last_chunk, const AttendScratch& scratch,
                          float* parts) {
    const int32_t rows = call.num_rows(), width = call.shape.value_width, size = partial_size(call.shape);
    float peaks[TILE_ROWS], sums[TILE_ROWS];
    for (int32_t chunk = first_chunk; chunk < last_chunk; ++chunk)
        for (int32_t row = 0, count; row < rows; row += count) {
            count = tile_rows(rows - row);
            const bool seen = attend_tile<T>(call, chunk, row, count, scratch, peaks, sums);
            for (int32_t r = 0; r < count; ++r) {
                float* const mixed = scratch.mixed + (size_t)r * width;
                if (parts) {
                    float* const to = parts + ((size_t)(chunk - first_chunk) * rows + row + r) * size;
                    if (seen) memcpy(to, mixed, width * sizeof(float));
                    to[width] = seen ? peaks[r] : NOTHING;
                    to[width + 1] = seen ? sums[r] : 0.0f;
                } else if (seen) {
                    merge_partial(scratch.running + (size_t)(row + r) * size, mixed, peaks[r], sums[r], width);
                }
            }
        }
}

static size_t attend_scratch(const AttentionShape& shape, int32_t num) { return AttendScratch(shape, num, nullptr).size; }

static void finish_rows(const AttentionShape& shape, const Span& span, int32_t kv_head, int32_t first, int32_t num,
                        const float* running, float* out, size_t out_stride) {
    const int32_t width = shape.value_width, sharing = shape.heads / shape.kv_heads;
    for (int32_t row = 0; row < num * sharing; ++row) {
        const int32_t query = row / sharing, head = kv_head * sharing + row % sharing;
        float* const to = out + (size_t)(span.first_row + first + query) * out_stride + (size_t)head * width;
        finish_row(running + (size_t)row * partial_size(shape), width, to);
    }
}

static void attend(const AttentionShape& shape, const AttentionCache& cache, const Span& span, const int32_t* parents,
                   int32_t kv_head, int32_t first, int32_t num, const float* q, size_t q_stride, float* out,
                   size_t out_stride, float* scratch) {
    const AttendCall call{shape, cache, span, parents, kv_head, first, num};
    const AttendScratch at(shape, num, scratch);
    int32_t lowest = INT32_MAX, end = 0;
    for (int32_t i = 0; i < num; ++i) {
        const int32_t position = call.position(i), low = call.lowest(position);
        if (low < lowest) lowest = low;
        if (position >= end) end = position + 1;
    }
    pack_queries(call, q, q_stride, at.q);
    for (int32_t row = 0; row < call.num_rows(); ++row)
        clear_partial(at.running + (size_t)row * partial_size(shape), shape.value_width);
    const int32_t first_chunk = lowest / CHUNK, last_chunk = (end + CHUNK - 1) / CHUNK;
    if (cache.is_f16)
        attend_chunks<uint16_t>(call, first_chunk, last_chunk, at, nullptr);
    else
        attend_chunks<float>(call, first_chunk, last_chunk, at, nullptr);
    finish_rows(shape, span, kv_head, first, num, at.running, out, out_stride);
}

static size_t attend_part_size(const AttentionShape& shape, int32_t num) {
    return (size_t)num * (shape.heads / shape.kv_heads) * partial_size(shape);
}

static void attend_part(const AttentionShape& shape, const AttentionCache& cache, const Span& span,
                        const int32_t* parents, int32_t kv_head, int32_t first, int32_t num, int32_t first_chunk,
                        int32_t last_chunk, const float* q, size_t q_stride, float* parts, float* scratch) {
    const AttendCall call{shape, cache, span, parents, kv_head, first, num};
    const AttendScratch at(shape, num, scratch);
    pack_queries(call, q, q_stride, at.q);
    if (cache.is_f16)
        attend_chunks<uint16_t>(call, first_chunk, last_chunk, at, parts);
    else
        attend_chunks<float>(call, first_chunk, last_chunk, at, parts);
}

static void attend_merge(const AttentionShape& shape, const Span& span, int32_t kv_head, int32_t first, int32_t num,
                         const float* parts, int32_t num_chunks, float* out, size_t out_stride, float* scratch) {
    const int32_t rows = num * (shape.heads / shape.kv_heads), width = shape.value_width, size = partial_size(shape);
    const AttendScratch at(shape, num, scratch);
    for (int32_t row = 0; row < rows; ++row) {
        float* const running = at.running + (size_t)row * size;
        clear_partial(running, width);
        for (int32_t chunk = 0; chunk < num_chunks; ++chunk) {
            const float* part = parts + ((size_t)chunk * rows + row) * size;
            merge_partial(running, part, part[width], part[width + 1], width);
        }
    }
    finish_rows(shape, span, kv_head, first, num, at.running, out, out_stride);
}

}  // namespace headrace::HEADRACE_ISA
