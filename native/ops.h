// The ops of the native list. Each says in how many tiles it comes apart and computes one of them.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "model.h"

namespace headrace {

constexpr int32_t MOST_ROWS = 8;    // of a tile of the ops that go row by row
constexpr int32_t SINGLE_ROWS = 4;  // so few are one tile: a barrier costs as much as they do

// An op of which a row of the output needs that row of the inputs only. Those that follow each other are one op: a tile
// takes its rows through all of them.
struct RowOp : Op {
    std::vector<std::unique_ptr<RowOp>> followers;

    static int32_t rows_per_tile(const Model& model, int32_t rows) {
        if (rows <= SINGLE_ROWS) return SINGLE_ROWS;
        return std::clamp(rows / (2 * model.num_threads()), 1, MOST_ROWS);
    }
    std::string name() const override {
        std::string all = one_name();
        for (const auto& follower : followers) all += std::string(" + ") + follower->one_name();
        return all;
    }
    int64_t num_tiles(const Model& model, int32_t rows) const override {
        const int32_t at_once = rows_per_tile(model, rows);
        return (rows + at_once - 1) / at_once;
    }
    void tile(const Model& model, int32_t rows, Turn turn, Scratch& scratch) const override {
        const int32_t at_once = rows_per_tile(model, rows);
        const int32_t first = (int32_t)turn.index * at_once, last = std::min(first + at_once, rows);
        for (int32_t row = first; row < last; ++row) {
            one(model, rows, row, scratch);
            for (const auto& follower : followers) follower->one(model, rows, row, scratch);
        }
    }
    std::unique_ptr<Op> join(std::unique_ptr<Op> next) override {
        if (auto* row_op = dynamic_cast<RowOp*>(next.get())) {
            next.release();
            followers.emplace_back(row_op);
        }
        return next;
    }
    virtual const char* one_name() const = 0;
    virtual void one(const Model& model, int32_t rows, int32_t row, Scratch& scratch) const = 0;
};

struct Embed : RowOp {
    int matrix;
    Buffer out;
    Embed(int matrix, Buffer out) : matrix(matrix), out(out) {}
    const char* one_name() const override { return "embed"; }
    void one(const Model& model, int32_t rows, int32_t row, Scratch&) const override {
        float* to = model.floats(out, rows) + (size_t)row * out.width;
        model.kernels().unpack_row(model.matrix(matrix), model.step().token_ids[row], to);
    }
};

// Rows to read out, from the trunk's last buffer.
struct SelectRows : RowOp {
    Buffer in, out;
    SelectRows(Buffer in, Buffer out) : in(in), out(out) {}
    const char* one_name() const override { return "select rows"; }
    void one(const Model& model, int32_t rows, int32_t row, Scratch&) const override {
        const float* from = model.trunk_floats(in) + (size_t)model.step().readout_rows[row] * in.width;
        std::copy(from, from + in.width, model.floats(out, rows) + (size_t)row * out.width);
    }
};

// Norm, and where only quantized products read it, quantization in the same pass.
struct Norm : RowOp {
    Buffer in, out;
    int weight;
    int32_t heads;
    float eps, offset;
    Norm(Buffer in, Buffer out, int weight, int32_t heads, float eps, float offset)
        : in(in), out(out), weight(weight), heads(heads), eps(eps), offset(offset) {}
    const char* one_name() const override { return "norm"; }
    void one(const Model& model, int32_t rows, int32_t row, Scratch& scratch) const override {
        const float* x = model.floats(in, rows) + (size_t)row * in.width;
        const int32_t width = in.width / heads;
        float* to = out.is_quantized ? scratch.get(in.width) : model.floats(out, rows) + (size_t)row * out.width;
        for (int32_t head = 0; head < heads; ++head)
            model.kernels().rms_norm(x + head * width, model.vector(weight), width, eps, offset, to + head * width);
        if (out.is_quantized) model.kernels().quantize(to, row, model.quantized(out, rows));
    }
};

struct Quantize : RowOp {
    Buffer in, out;
    Quantize(Buffer in, Buffer out) : in(in), out(out) {}
    const char* one_name() const override { return "quantize"; }
    void one(const Model& model, int32_t rows, int32_t row, Scratch&) const override {
        model.kernels().quantize(model.floats(in, rows) + (size_t)row * in.width, row, model.quantized(out, rows));
    }
};

// Behind what quantizes rows that have outliers. One tile: a thread does it while others wait for it anyway.
struct IndexOutliers : Op {
    Buffer rows;
    explicit IndexOutliers(Buffer rows) : rows(rows) {}
    std::string name() const override { return "index outliers"; }
    int64_t num_tiles(const Model&, int32_t) const override { return 1; }
    void tile(const Model& model, int32_t num_rows, Turn, Scratch&) const override {
        const QuantizedRows quantized = model.quantized(rows, num_rows);
        model.kernels().index_outliers(quantized, num_rows);
        if (rows.list >= 0 && !quantized.fixed) model.count_outliers(rows.list, quantized, num_rows);
    }
};

enum class Elementwise : int32_t { GATE, ACT, ADD, SCALE, SOFTCAP };

struct Element : RowOp {
    Elementwise verb;
    int32_t kind;   // of activation
    float number;   // factor or cap
    Buffer a, b, out;
    Element(Elementwise verb, int32_t kind, float number, Buffer a, Buffer b, Buffer out)
        : verb(verb), kind(kind), number(number), a(a), b(b), out(out) {}
    const char* one_name() const override { return "element"; }
    void one(const Model& model, int32_t rows, int32_t row, Scratch&) const override {
        const Kernels& k = model.kernels();
        const float* x = model.floats(a, rows) + (size_t)row * a.width;
        const float* y = model.floats(b, rows) + (size_t)row * b.width;
        float* to = model.floats(out, rows) + (size_t)row * out.width;
        switch (verb) {
            case Elementwise::GATE: return k.gate(kind, x, y, a.width, to);
            case Elementwise::ACT: return k.act(kind, x, a.width, to);
            case Elementwise::ADD: return k.add(x, y, a.width, to);
            case Elementwise::SCALE: return k.scale(x, number, a.width, to);
            case Elementwise::SOFTCAP: return k.softcap(x, number, a.width, to);
        }
    }
};

// Numbers [start, start + width) of each head of `in` to [to_start, ...) of each head of `out`: slices and concatenations.
struct CopyHeads : RowOp {
    Buffer in, out;
    int32_t heads, start, to_start, width;
    CopyHeads(Buffer in, Buffer out, int32_t heads, int32_t start, int32_t to_start, int32_t width)
        : in(in), out(out), heads(heads), start(start), to_start(to_start), width(width) {}
    const char* one_name() const override { return "copy heads"; }
    void one(const Model& model, int32_t rows, int32_t row, Scratch&) const override {
        const int32_t in_head = in.width / heads, out_head = out.width / heads;
        const float* from = model.floats(in, rows) + (size_t)row * in.width + start;
        float* to = model.floats(out, rows) + (size_t)row * out.width + to_start;
        for (int32_t head = 0; head < heads; ++head)
            std::copy(from + head * in_head, from + head * in_head + width, to + head * out_head);
    }
};

// `table`: [position][cosines, sines].
struct Rope : RowOp {
    Buffer in, out;
    int table;
    int32_t heads, start, pairs;
    bool interleaved;
    Rope(Buffer in, Buffer out, int table, int32_t heads, int32_t start, int32_t pairs, bool interleaved)
        : in(in), out(out), table(table), heads(heads), start(start), pairs(pairs), interleaved(interleaved) {}
    const char* one_name() const override { return "rope"; }
    void one(const Model& model, int32_t rows, int32_t row, Scratch&) const override {
        const float* turns = model.vector(table) + (size_t)model.step().positions[row] * 2 * pairs;
        model.kernels().rope(model.floats(in, rows) + (size_t)row * in.width, turns, heads, in.width / heads, start, pairs,
                             interleaved, model.floats(out, rows) + (size_t)row * out.width);
    }
};

// One or more products of the same input: q, k and v are one op.
struct Linear : Op {
    struct Part {
        int matrix, bias;
        Buffer out;
        bool accumulate;
    };
    Buffer in;
    std::vector<Part> parts;
    std::vector<int32_t> first_tile;  // of each part, and the total
    int32_t strips_per_tile;

    Linear(const Model& model, Buffer in, std::vector<Part> parts);
    size_t part_of(int64_t tile) const;
    int32_t strip_of(const Model& model, size_t part, int64_t tile) const;  // the first strip of a tile, or all strips
    std::string name() const override { return "linear"; }
    int64_t num_tiles(const Model&, int32_t) const override { return first_tile.back(); }
    int64_t weight_bytes(const Model& model) const override;
    Upcoming upcoming(const Model& model, Turn turn) const override;
    void tile(const Model& model, int32_t rows, Turn turn, Scratch&) const override;
};

// activation(gate x) * (up x), into a float or a quantized buffer: a tile is a group of 32 outputs.
struct GatedLinear : Op {
    Buffer in, out;
    int gate, up;
    int32_t kind;
    GatedLinear(Buffer in, Buffer out, int gate, int up, int32_t kind) : in(in), out(out), gate(gate), up(up), kind(kind) {}
    int32_t strip_of(const Model& model, int64_t tile) const;  // the first strip of a tile, or all strips
    std::string name() const override { return "gated linear"; }
    int64_t num_tiles(const Model& model, int32_t) const override {
        return (model.matrix(gate).rows + GROUP - 1) / GROUP;
    }
    int64_t weight_bytes(const Model& model) const override;
    Upcoming upcoming(const Model& model, Turn turn) const override;
    void tile(const Model& model, int32_t rows, Turn turn, Scratch& scratch) const override;
};

// Each head through its own matrix (float weights).
struct HeadLinear : Op {
    Buffer in, out;
    std::vector<int> matrices;
    HeadLinear(Buffer in, Buffer out, std::vector<int> matrices) : in(in), out(out), matrices(std::move(matrices)) {}
    std::string name() const override { return "head linear"; }
    int64_t num_tiles(const Model&, int32_t) const override { return (int64_t)matrices.size(); }
    void tile(const Model& model, int32_t rows, Turn turn, Scratch&) const override;
};

struct StoreKV : RowOp {
    Buffer k, v;
    int group, cache;
    bool is_latent;
    StoreKV(Buffer k, Buffer v, int group, int cache, bool is_latent)
        : k(k), v(v), group(group), cache(cache), is_latent(is_latent) {}
    const char* one_name() const override { return "store kv"; }
    void one(const Model& model, int32_t rows, int32_t row, Scratch&) const override;
};

// Attention: a tile is a block of queries and a kv head. Where those are too few for the threads and contexts are long,
// a tile is one chunk of the context as well, and AttendMerge joins them; the bits are the same.
struct Attend : Op {
    Buffer q, out;
    int group, cache;
    AttentionShape shape;

    Attend(Buffer q, Buffer out, int group, int cache, AttentionShape shape)
        : q(q), out(out), group(group), cache(cache), shape(shape) {}
    static bool is_split(const Model& model, const AttentionShape& shape) {
        const int64_t num_pairs = (int64_t)model.step().blocks.size() * shape.kv_heads;
        return model.num_threads() > 1 && model.step().num_chunks > 1 && num_pairs < 4 * model.num_threads();
    }
    std::string name() const override { return "attend"; }
    int64_t num_tiles(const Model& model, int32_t) const override {
        const int64_t num_pairs = (int64_t)model.step().blocks.size() * shape.kv_heads;
        return is_split(model, shape) ? num_pairs * model.step().num_chunks : num_pairs;
    }
    void tile(const Model& model, int32_t rows, Turn turn, Scratch& scratch) const override;
    void prepare_step(Model& model) const override;
    size_t part_floats(const Model& model) const;  // of one chunk of one tile
};

struct AttendMerge : Op {
    Attend attend;
    explicit AttendMerge(const Attend& attend) : attend(attend) {}
    std::string name() const override { return "merge attention"; }
    int64_t num_tiles(const Model& model, int32_t) const override {
        return Attend::is_split(model, attend.shape) ? (int64_t)model.step().blocks.size() * attend.shape.kv_heads : 0;
    }
    void tile(const Model& model, int32_t rows, Turn turn, Scratch& scratch) const override;
};

// A span's state goes through all its channels; a tile is a stretch of channels of one span.
struct Recurrent : Op {
    static constexpr int32_t CHANNELS = 256;
    int group, state;
    int32_t width;
    Recurrent(int group, int state, int32_t width) : group(group), state(state), width(width) {}
    int64_t tiles_per_span() const { return (width + CHANNELS - 1) / CHANNELS; }
    int64_t num_tiles(const Model& model, int32_t) const override {
        return (int64_t)model.step().spans.size() * tiles_per_span();
    }
};

struct Conv : Recurrent {
    Buffer in, out;
    int weight, bias;
    int32_t kernel;
    Conv(Buffer in, Buffer out, int weight, int bias, int32_t kernel, int group, int state)
        : Recurrent(group, state, in.width), in(in), out(out), weight(weight), bias(bias), kernel(kernel) {}
    std::string name() const override { return "convolution"; }
    void tile(const Model& model, int32_t rows, Turn turn, Scratch&) const override;
};

struct SsmScan : Recurrent {
    Buffer x, dt, b, c, out;
    int a, d;
    int32_t state_size;
    SsmScan(Buffer x, Buffer dt, Buffer b, Buffer c, Buffer out, int a, int d, int32_t state_size, int group, int state)
        : Recurrent(group, state, x.width), x(x), dt(dt), b(b), c(c), out(out), a(a), d(d), state_size(state_size) {}
    std::string name() const override { return "ssm scan"; }
    void tile(const Model& model, int32_t rows, Turn turn, Scratch&) const override;
};

struct Route : RowOp {
    Buffer in, out;
    int bias;
    RouteShape shape;
    Route(Buffer in, Buffer out, int bias, RouteShape shape) : in(in), out(out), bias(bias), shape(shape) {}
    const char* one_name() const override { return "route"; }
    void one(const Model& model, int32_t rows, int32_t row, Scratch& scratch) const override;
};

// A mixture's products are grouped: the rows that go to an expert are gathered and multiplied together. A pair is a row
// and a place in its routing; pair p = row * top_k + place. A tile is an expert and a stretch of its outputs.
struct ExpertOp : Op {
    static constexpr int32_t COLUMNS = 4 * GROUP;
    Buffer routing;
    int32_t num_experts, top_k, outputs;
    ExpertOp(Buffer routing, size_t num_experts, int32_t top_k, int32_t outputs)
        : routing(routing), num_experts((int32_t)num_experts), top_k(top_k), outputs(outputs) {}
    int32_t tiles_per_expert() const { return (outputs + COLUMNS - 1) / COLUMNS; }
    int64_t num_tiles(const Model&, int32_t) const override { return (int64_t)num_experts * tiles_per_expert(); }
    // Those of an expert, in order; how many.
    int32_t find_pairs(const Model& model, int32_t rows, int32_t expert, int32_t* pairs) const;
};

// activation(gate x) * (up x) of each pair's expert: [rows][top_k * inner].
struct ExpertsGated : ExpertOp {
    Buffer gate_in, up_in, out;  // x for either: quantized where its weights are
    std::vector<int> gate, up;
    int32_t kind;
    ExpertsGated(Buffer gate_in, Buffer up_in, Buffer routing, Buffer out, std::vector<int> gate, std::vector<int> up,
                 int32_t top_k, int32_t kind)
        : ExpertOp(routing, gate.size(), top_k, out.width / top_k), gate_in(gate_in), up_in(up_in), out(out),
          gate(std::move(gate)), up(std::move(up)), kind(kind) {}
    std::string name() const override { return "experts, gated"; }
    int64_t weight_bytes(const Model& model) const override;
    void tile(const Model& model, int32_t rows, Turn turn, Scratch& scratch) const override;
};

// down of each pair's expert: [rows][top_k * hidden].
struct ExpertsDown : ExpertOp {
    Buffer in, out;
    std::vector<int> down;
    ExpertsDown(Buffer in, Buffer routing, Buffer out, std::vector<int> down, int32_t top_k)
        : ExpertOp(routing, down.size(), top_k, out.width / top_k), in(in), out(out), down(std::move(down)) {}
    std::string name() const override { return "experts, down"; }
    int64_t weight_bytes(const Model& model) const override;
    void tile(const Model& model, int32_t rows, Turn turn, Scratch& scratch) const override;
};

// A row's outputs, weighted and added in the order of its routing.
struct ExpertsSum : RowOp {
    Buffer in, routing, out;
    int32_t top_k;
    ExpertsSum(Buffer in, Buffer routing, Buffer out, int32_t top_k) : in(in), routing(routing), out(out), top_k(top_k) {}
    const char* one_name() const override { return "experts, sum"; }
    void one(const Model& model, int32_t rows, int32_t row, Scratch& scratch) const override;
};

}  // namespace headrace
