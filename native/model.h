// A Program, packed and ready: ops in order, each cut into tiles that the threads claim, a barrier between ops.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace headrace {

// Memory that starts zeroed; the operating system gives a page when it is first touched.
class Bytes {
public:
    explicit Bytes(size_t size);
    ~Bytes();
    Bytes(Bytes&& other) noexcept;
    Bytes(const Bytes&) = delete;

    uint8_t* data() const { return data_; }
    size_t size() const { return size_; }

private:
    uint8_t* data_;
    size_t size_;
};

// Memory for many matrices, in few mappings: only a mapping of megabytes gets huge pages, and with small ones a product
// spends a third of its time on misses of the translation cache.
class Shelf {
public:
    uint8_t* place(size_t size);  // 64-byte aligned
    size_t used() const { return used_; }

private:
    static constexpr size_t MAPPING = 64 << 20;
    std::vector<Bytes> mappings_;
    size_t next_ = 0;  // in the last mapping
    size_t used_ = 0;
};

// Where a buffer lies in the arena: with n rows, the n * width floats from n * offset. A quantized buffer holds its
// QuantizedRows in place of the floats (width * 3 / 8 floats a row and plane, and OUTLIER_FLOATS).
struct Buffer {
    int32_t offset, width;
    bool is_quantized;
    int32_t num_outliers;  // of a quantized row; `IndexOutliers` must follow what writes it
    int32_t list;          // of its fixed channels; -1: each row has outliers of its own
};

// `rows` quantized rows that lie one after the other from `place` on.
QuantizedRows quantized_at(float* place, int32_t width, int32_t planes, int32_t rows, int32_t num_outliers,
                           const int32_t* fixed);

// One step, as handed to `Model::run`.
struct Step {
    int32_t num_tokens = 0;
    const int32_t* token_ids = nullptr;
    const int32_t* positions = nullptr;
    const int32_t* parents = nullptr;  // null: every span is a chain
    std::vector<Span> spans;             // `table` is set by the op that reads one
    std::vector<const int32_t*> tables;  // [group * spans.size() + span]
    const int32_t* readout_rows = nullptr;

    // Queries [first, first + num) of a span: what one attention tile does for one kv head.
    struct QueryBlock {
        int32_t span, first, num;
    };
    std::vector<QueryBlock> blocks;
    std::vector<int32_t> span_of;  // of each row
    int32_t num_chunks = 0;  // of the longest context
};

// Rows to read out of a step, and what is asked of each; results beside them.
struct Readouts {
    int32_t count;
    int32_t vocab_size;        // ids from here on are padding: never read
    const int32_t* rows;
    const int32_t* targets;    // the token to score, or -1: sample one
    const int32_t* num_top;    // -1: no logprob; else the logprob, and those of so many most probable tokens
    const double* numbers;     // [count][NUMBERS]: see `Number`
    // Per readout and list a stretch of ids: from starts[r * LISTS + list] to the next start; `values` are parallel.
    const int32_t* ids;
    const double* values;
    const int32_t* starts;
    // What grammars allow: mask_rows[r] is a row of masks [rows of vocab_size bits, whole words], -1: everything.
    const int32_t* mask_rows;
    const uint32_t* masks;
    int32_t* tokens;
    double* logprobs;
    int32_t* ranks;
    int32_t max_top;           // width of the next two
    int32_t* top_ids;
    double* top_logprobs;

    enum Number { TEMPERATURE, TOP_K, TOP_P, MIN_P, UNIFORM, REPETITION, PRESENCE, FREQUENCY, TYPICAL_P, XTC_THRESHOLD, NUMBERS };
    enum List { SEEN, GENERATED, BIASES, BANNED, LISTS };
};

class Model;

struct Scratch {
    std::vector<float> floats;
    float* get(size_t count) {
        if (floats.size() < count) floats.resize(count);
        return floats.data();
    }
};

// Weights that a thread will multiply, in their order: it asks memory for them while it waits. Two stretches are read
// alternately.
struct Upcoming {
    struct Stretch {
        const uint8_t *at = nullptr, *end = nullptr;
    };
    Stretch first, second;

    bool is_empty() const { return first.at >= first.end && second.at >= second.end; }
    void fetch(int lines) {
        for (; lines > 0 && !is_empty(); --lines)
            for (Stretch* stretch : {&first, &second})
                if (stretch->at < stretch->end) {
                    __builtin_prefetch(stretch->at, 0, 3);
                    stretch->at += 64;
                }
    }
};

// A tile for a thread to compute, and the last of those that lie ahead of it in the same stretch.
struct Turn {
    int64_t index, end;
};

// An op of the native list. `num_tiles` is a pure function of the step, so that every thread works it out for itself.
class Op {
public:
    virtual ~Op() = default;
    virtual std::string name() const = 0;
    virtual int64_t num_tiles(const Model& model, int32_t rows) const = 0;
    virtual void tile(const Model& model, int32_t rows, Turn turn, Scratch& scratch) const = 0;
    // Before the threads start on a step.
    virtual void prepare_step(Model&) const {}
    // Bytes of weights that its tiles read, each once.
    virtual int64_t weight_bytes(const Model&) const { return 0; }
    // The weights of the tiles from the turn's on.
    virtual Upcoming upcoming(const Model&, Turn) const { return {}; }
    // Take over an op that follows this one, if both go row by row; null then.
    virtual std::unique_ptr<Op> join(std::unique_ptr<Op> next) { return next; }
};

class Model {
public:
    // `planes`: of the activations of quantized products, 1 (8 bits) or 2 (16).
    Model(int num_threads, int max_tokens, int planes, const std::string& isa);
    ~Model();

    // Room for a matrix; its id. `stored` has `rows` rows, `row_bytes` apart, and must live until `pack`, which reads it.
    int add_matrix(Packing packing, int32_t rows, int32_t width, const uint8_t* stored, size_t row_bytes);
    // Pack all matrices added since the last time, with all threads. To be called before a step.
    void pack();
    int add_vector(const float* values, size_t count);
    int add_cache(int group, int32_t block_size, int32_t num_blocks, bool is_f16, int32_t kv_heads, int32_t key_width,
                  int32_t value_width);
    int add_state(int group, int32_t num_blocks, int64_t size);
    // A list of channels for outliers. Until they are fixed rows have outliers of their own, and steps count their channels.
    int add_list(int32_t width, int32_t num_outliers);
    void count_outliers(int32_t list, const QuantizedRows& rows, int32_t num_rows) const;
    // Ops that go row by row are joined to one, with one barrier behind them all.
    void add_op(std::unique_ptr<Op> op);
    void begin_head() { in_head_ = true; }
    // Nothing more is added. `trunk_width`, `head_width`: floats per row of the two arenas.
    void finish(int32_t trunk_width, int32_t head_width, int32_t rows_per_tile);
    // Pack, then take these steps, whose logits nobody reads, to fix the lists of outliers: the channels that were
    // outliers most often are from now on those of every row. The counts are sums over rows, so that the lists do not
    // depend on how the rows come in steps. Ready to run.
    void load(std::vector<Step> steps, const Buffer& last);

    // Compute all tokens of the step.
    void run_trunk(Step step);
    // Then read out rows [first, first + count) of the step's readouts; the last buffer is returned.
    const float* run_head(const int32_t* readout_rows, int32_t count, const Buffer& last);
    // The whole step in one call: its tokens, and what is read out of it, tile by tile.
    void run(Step step, const Readouts& readouts, const Buffer& last);
    void copy_block(int group, int32_t source, int32_t target);
    // Have the operating system give up to `most_bytes` of the cache ahead of use, in the order that blocks are used: the
    // first touch of a page may cost as much as a token (a virtual machine's memory comes from its host: 0.2 GB/s seen).
    void touch_cache(size_t most_bytes) const { touch_cache(most_bytes, false); }
    // The same on a thread of its own, in moments without a step.
    void touch_cache_meanwhile(size_t most_bytes);

    // Where the time goes: per op, over the steps since profiling was switched on.
    struct OpTime {
        std::string name;
        int64_t weight_bytes, runs, nanoseconds;  // until its last thread was done
    };
    void set_profiling(bool on);
    std::vector<OpTime> op_times() const;

    const PackedMatrix& matrix(int id) const { return matrices_[id]; }
    const float* vector(int id) const { return id < 0 ? nullptr : vectors_[id].data(); }
    float* floats(const Buffer& buffer, int32_t rows) const { return arena() + (size_t)buffer.offset * rows; }
    QuantizedRows quantized(const Buffer& buffer, int32_t rows) const;
    float* trunk_floats(const Buffer& buffer) const {
        return reinterpret_cast<float*>(trunk_arena_->data()) + (size_t)buffer.offset * step_.num_tokens;
    }
    const Step& step() const { return step_; }
    const AttentionCache& cache(int id) const { return caches_[id]; }
    float* state(int id, int32_t block) const { return reinterpret_cast<float*>(states_[id].bytes->data()) + states_[id].size * block; }
    const int32_t* table(int group, int span) const { return step_.tables[(size_t)group * step_.spans.size() + span]; }
    const Kernels& kernels() const { return kernels_; }
    int num_threads() const { return pool_.size(); }
    int num_attending() const { return pool_.attending(); }
    size_t packed_bytes() const { return packed_.used(); }
    // Room for partial attentions; grown by `run_trunk` before the threads start.
    float* parts() const { return parts_->floats.data(); }
    void need_parts(size_t count) { parts_->get(count); }

private:
    // The blocks of a cache group, each with the keys and values of all its ops: so that a huge page, given at its first
    // touch, holds a few blocks, and not thousands of one op's. (60 such pages due at once made a step wait 0.4 s.)
    struct GroupBlocks {
        std::unique_ptr<Bytes> bytes;  // allocated by `finish`
        size_t block_bytes = 0;
        int32_t num_blocks = 0;
    };
    struct CachePlace {
        int group;
        size_t keys_at, values_at;  // in a block
    };
    struct State {
        std::unique_ptr<Bytes> bytes;
        int group;
        int64_t size;
    };
    float* arena() const { return reinterpret_cast<float*>((running_head_ ? head_arena_ : trunk_arena_)->data()); }
    void read_out(const Readouts& readouts, int32_t readout, const float* logits, Scratch& scratch) const;
    using Ops = std::vector<std::unique_ptr<Op>>;
    void run_ops(const Ops& ops, int32_t rows);
    void run_tiles(const Ops& ops, size_t op, int64_t num_tiles, int32_t rows, int thread);
    Turn turn_of(int64_t num_tiles, int thread) const;  // a thread's own stretch of an op's tiles
    Upcoming upcoming(const Ops& ops, size_t op, int32_t rows, int thread) const;
    void took(const Ops& ops, size_t op, int64_t since);

    const Kernels& kernels_;
    Pool pool_;
    const int max_tokens_, planes_;
    std::vector<PackedMatrix> matrices_;
    struct Unpacked {
        PackedMatrix matrix;
        uint8_t* data;
        const uint8_t* stored;
        size_t row_bytes;
    };
    std::vector<Unpacked> unpacked_;
    Shelf packed_;
    std::vector<std::vector<float>> vectors_;
    std::vector<AttentionCache> caches_;
    std::vector<CachePlace> cache_places_;  // parallel to `caches_`
    std::vector<GroupBlocks> groups_;
    std::vector<State> states_;
    struct OutlierList {
        int32_t num;
        std::vector<int32_t> channels;  // rising; empty until they are fixed
        std::vector<int64_t> counts;    // per channel
    };
    mutable std::vector<OutlierList> lists_;
    std::vector<std::unique_ptr<Op>> trunk_, head_;
    std::unique_ptr<Bytes> trunk_arena_, head_arena_;
    std::vector<Scratch> scratch_;
    std::unique_ptr<Scratch> parts_ = std::make_unique<Scratch>();
    // Per thread and op: how many tiles of the thread's share have been handed out in this run.
    std::vector<std::unique_ptr<std::atomic<int64_t>[]>> claimed_;
    std::vector<OpTime> times_;  // of the trunk's ops, then the head's
    bool is_profiling_ = false;
    void fix_outliers();
    void touch_cache(size_t most_bytes, bool only_when_quiet) const;
    void wait_for_quiet() const;
    std::atomic<uint64_t> num_begun_{0}, num_ended_{0};  // steps
    std::atomic<bool> is_closing_{false};
    std::thread toucher_;
    Step step_;
    int32_t rows_per_tile_ = 1;
    bool in_head_ = false, running_head_ = false;
};

const Kernels& kernels_named(const std::string& isa);

}  // namespace headrace
