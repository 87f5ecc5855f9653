// The kernels an instruction set offers: a table of plain functions, chosen once at load.
//
// isa_scalar.cpp, isa_avx2.cpp and isa_avx512.cpp compile the same files into namespaces of their own and fill one
// table each. All three give the same bits (tests compare them op by op).
#pragma once

#include <cstddef>
#include <cstdint>

namespace headrace {

constexpr int STRIP = 16;   // output rows that a packed matrix interleaves
constexpr int GROUP = 32;   // inputs that share an activation scale, and a weight scale in most formats
constexpr size_t FETCH_AHEAD = 12288;  // bytes of weights between what is asked of memory and what is multiplied
constexpr int CHUNK = 256;  // positions of context whose attention is summed on its own; chunks merge in order

// How a packed matrix keeps its numbers. Values are exactly those of the file; see linear_*.h for the layouts.
enum class Packing : int32_t { F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K };

// A weight [rows, width], row-major in the model, packed in strips of 16 rows. The last strip is padded with zeros.
struct PackedMatrix {
    Packing packing;
    int32_t rows, width;
    const uint8_t* data;  // num_strips * strip_bytes, 64-byte aligned

    int32_t num_strips() const { return (rows + STRIP - 1) / STRIP; }
    bool is_quantized() const { return packing > Packing::BF16; }
};

// Activations of a quantized product: int8 per row and group of 32. value = scale * q, q = round(x / scale),
// scale = max|x| / 127. With two planes, what is left of a row, x - scale * q, is quantized in the same way to a row of
// its own: 16 bits in all. Plane p of row r is row planes * r + p here; row i begins at i * width (q), i * width / 32
// (scale, scaled_sum), i * width / 16 (sums).
//
// Outliers: `num_outliers` numbers of a row are kept apart as floats, and q has zeros in their places: they are far larger
// than the rest of their group, whose scale they would spoil (Dettmers et al., LLM.int8(), 2022). They are those of
// the `fixed` channels, or, where it is null, the row's largest, falling. Of one plane only.
struct QuantizedRows {
    int32_t width, planes;
    int8_t* q;
    float* scale;
    float* scaled_sum;  // scale * sum of q over the group: what an offset of the weights (Q4_1's minimum) is times
    int32_t* sums;      // -128 * (sum of q): over each group, then over its second half of 16
    int32_t num_outliers;
    float* outliers;       // [rows][num_outliers]
    const int32_t* fixed;  // [num_outliers] or null
    int32_t* channels;     // of each outlier: its input; like what follows only where none are fixed
    // By `index_outliers`: rows come in blocks of INDEXED_ROWS, whose outliers share columns of the weights.
    int32_t* slots;         // of each outlier: the place of its channel among the distinct ones of the block
    int32_t* distinct;      // distinct channels, block b's from b * INDEXED_ROWS * num_outliers on
    int32_t* num_distinct;  // [blocks]
};
constexpr int32_t INDEXED_ROWS = 128;
constexpr int32_t MOST_OUTLIERS = 8;  // of a row that has its own
constexpr int32_t MOST_FIXED = 32;
constexpr int32_t OUTLIER_FLOATS = 4 * MOST_OUTLIERS + 1;  // room for all of a row: four numbers each, and a block's count
static_assert(MOST_FIXED <= OUTLIER_FLOATS);
constexpr int32_t MOST_WIDTH_WITH_OUTLIERS = 1 << 15;

// What a linear does with its sum: out = sum (+ bias) (+ what out held).
struct Epilogue {
    const float* bias;  // [rows] or null
    bool accumulate;
};

// One attention op's place in the cache. A block of `block_size` positions (a multiple of 16) is units of 16, one after the
// other: keys [unit][kv_head][key_width][16] (transposed: lanes over positions), values [unit][kv_head][16][value_width].
// `value_width` 0: values are the first numbers of the keys (latent attention); such keys are kept
// [unit][kv_head][16][key_width] as well, in `values`. Starts zeroed; stored numbers are made finite (see attention.h).
// Keys and values of block b are b * `stride` bytes from those of block 0.
struct AttentionCache {
    uint8_t* keys;
    uint8_t* values;
    size_t stride;
    bool is_f16;  // else float32
    int32_t kv_heads, key_width, value_width, block_size;
};

// One sequence's part of a step, as a backend needs it.
struct Span {
    int32_t start, count, first_row;
    const int32_t* table;  // of the op's cache group
};

struct AttentionShape {
    int32_t heads, kv_heads, key_width, value_width;
    float scale;
    int32_t window;   // 0: all before; else the last `window` positions, the query's own included
    float softcap;    // 0: none
};

// What sampling a row depends on besides its logits (headrace/executor/sampler.py). Ids are distinct within each list
// but that of biases, which add up in order.
struct SampleParams {
    double temperature;  // 0: greedy
    int32_t top_k;       // 0: all
    double top_p, min_p;
    double uniform;      // in [0, 1)
    double repetition_penalty;  // for ids seen in prompt or reply
    const int32_t* seen;
    int32_t num_seen;
    double presence_penalty, frequency_penalty;  // for ids of the reply, and how often each came
    const int32_t* generated;
    const int32_t* generated_counts;
    int32_t num_generated;
    const int32_t* bias_ids;
    const double* biases;
    int32_t num_biases;
    const int32_t* banned;
    int32_t num_banned;
    const uint32_t* allowed;  // null: all; else bit id % 32 of word id / 32 for each token that a grammar allows
    double typical_p;         // 0, or from 1 on: all
    double xtc_threshold;     // 0: none is dropped
};

struct ConvShape {
    int32_t width, kernel;
    const float* weight;  // [kernel][width]: transposed from the model's
    const float* bias;    // [width] or null
};

struct SsmShape {
    int32_t width, state_size;
    const float* a;  // [state_size][width]: transposed from the model's
    const float* d;  // [width]
};

struct SsmInputs {  // of the span's first token; strides in floats
    const float *x, *dt, *b, *c;
    size_t x_stride, dt_stride, b_stride, c_stride;
};

struct RouteShape {
    int32_t num_experts, top_k;
    bool is_sigmoid;     // else softmax
    const float* bias;   // [num_experts] or null: for the choice only
    int32_t num_groups, top_groups;
    bool renormalize;
    float scaling;
};

struct Kernels {
    const char* name;

    // --- linear -----------------------------------------------------------------------------------------------------
    size_t (*strip_bytes)(Packing packing, int32_t width);
    // Pack strips [first, last) of a matrix from its stored rows (`row_bytes` apart, in the file's format).
    void (*pack)(const PackedMatrix& matrix, uint8_t* data, const uint8_t* stored, size_t row_bytes, int32_t first,
                 int32_t last);
    // Row `row` of the matrix as floats.
    void (*unpack_row)(const PackedMatrix& matrix, int32_t row, float* out);
    void (*quantize)(const float* x, int32_t row, const QuantizedRows& to);
    // Ready for products: fills `slots`, `distinct` and `num_distinct`.
    void (*index_outliers)(const QuantizedRows& rows, int32_t num_rows);
    // x [num_rows][32]: inputs [32 * group, 32 * (group + 1)) of the rows, without outliers.
    void (*quantize_column)(const float* x, int32_t num_rows, int32_t group, const QuantizedRows& to);
    // out[r][s * 16 + i] for rows of activations [0, num_rows), planes added up, and strips [first, last) of the matrix. The caller goes on
    // with strips [last, fetch_last): few rows, which wait for memory, ask for them early.
    void (*linear_quantized)(const PackedMatrix& matrix, int32_t first, int32_t last, int32_t fetch_last,
                             const QuantizedRows& x, int32_t num_rows, float* out, size_t out_stride, Epilogue epilogue);
    void (*linear_float)(const PackedMatrix& matrix, int32_t first, int32_t last, int32_t fetch_last, const float* x,
                         size_t x_stride, int32_t num_rows, float* out, size_t out_stride, Epilogue epilogue);

    // --- row by row -------------------------------------------------------------------------------------------------
    void (*rms_norm)(const float* x, const float* weight, int32_t width, float eps, float offset, float* out);
    void (*gate)(int32_t kind, const float* gate, const float* up, int32_t width, float* out);
    void (*act)(int32_t kind, const float* x, int32_t width, float* out);
    void (*add)(const float* a, const float* b, int32_t width, float* out);
    void (*scale)(const float* x, float factor, int32_t width, float* out);
    void (*softcap)(const float* x, float cap, int32_t width, float* out);
    void (*rope)(const float* x, const float* cos_sin, int32_t heads, int32_t head_dim, int32_t offset, int32_t pairs,
                 bool interleaved, float* out);

    // --- attention --------------------------------------------------------------------------------------------------
    // Store the keys and values of one row at `slot` (its index in the sequence's table x block size).
    void (*store_kv)(const AttentionCache& cache, const int32_t* table, int32_t slot, const float* k, const float* v);
    // Queries `first` ... `first + num` - 1 of the span, the heads of one kv head. `q` and `out` are whole buffers of the
    // step: the span's rows begin at its first_row. Keys and values of the span are stored before.
    // `parents`: null for a chain; else per row of the span the parent's row in the span, -1 for the cache before it.
    // `scratch` has attend_scratch(shape, num) floats. Any split of a span into calls gives the same bits.
    void (*attend)(const AttentionShape& shape, const AttentionCache& cache, const Span& span, const int32_t* parents,
                   int32_t kv_head, int32_t first, int32_t num, const float* q, size_t q_stride, float* out,
                   size_t out_stride, float* scratch);
    size_t (*attend_scratch)(const AttentionShape& shape, int32_t num);
    // The same by chunks of context, for few queries with a long one: attend_part leaves chunks [first_chunk, last_chunk)
    // (chunk c is positions [c * CHUNK, (c + 1) * CHUNK)) in `parts`, attend_part_size(shape, num) floats each; attend_merge
    // takes those of all chunks, in order and one after the other, and writes the bits that attend would have. Chunks of
    // which the queries see nothing (below the window, past the end) may be given or left out.
    void (*attend_part)(const AttentionShape& shape, const AttentionCache& cache, const Span& span,
                        const int32_t* parents, int32_t kv_head, int32_t first, int32_t num, int32_t first_chunk,
                        int32_t last_chunk, const float* q, size_t q_stride, float* parts, float* scratch);
    size_t (*attend_part_size)(const AttentionShape& shape, int32_t num);
    void (*attend_merge)(const AttentionShape& shape, const Span& span, int32_t kv_head, int32_t first, int32_t num,
                         const float* parts, int32_t num_chunks, float* out, size_t out_stride, float* scratch);

    // --- reading out ------------------------------------------------------------------------------------------------
    int32_t (*argmax)(const float* x, int32_t count);           // the first of equals
    double (*log_sum_exp)(const float* x, int32_t count);
    int32_t (*rank_of)(const float* x, int32_t count, int32_t at);  // how many are larger than x[at]
    // The k <= count largest, falling, the smaller id first where equal. `scratch` has 2 k doubles.
    void (*top_k)(const float* x, int32_t count, int32_t k, int32_t* ids, float* values, double* scratch);
    // The next token, -1 where none is allowed or a number is NaN. `scratch` has sample_scratch(vocab) doubles.
    int32_t (*sample_row)(const float* logits, int32_t vocab, const SampleParams& params, double* scratch);
    size_t (*sample_scratch)(int32_t vocab);

    // --- recurrent --------------------------------------------------------------------------------------------------
    // Channels [first, last) over `count` tokens of one sequence. x and y begin at the span's first row. State
    // [kernel - 1][width] and [state_size][width]; `read_state` null: zeros; it may be `write_state`.
    void (*conv)(const ConvShape& shape, const float* x, size_t x_stride, int32_t count, const float* read_state,
                 float* write_state, float* y, size_t y_stride, int32_t first, int32_t last);
    void (*ssm_scan)(const SsmShape& shape, const SsmInputs& in, int32_t count, const float* read_state,
                     float* write_state, float* y, size_t y_stride, int32_t first, int32_t last);

    // --- mixtures ---------------------------------------------------------------------------------------------------
    // One row: `out` gets top_k expert ids, then their weights. `scratch` has route_scratch(shape) floats.
    void (*route)(const RouteShape& shape, const float* logits, float* out, float* scratch);
    size_t (*route_scratch)(const RouteShape& shape);
};

const Kernels& scalar_kernels();
const Kernels* avx2_kernels();    // null where they are not compiled in or the processor lacks AVX2, FMA or F16C
const Kernels* avx512_kernels();  // null likewise: AVX-512 F, BW, VL, DQ, VNNI
const Kernels& best_kernels();

}  // namespace headrace
