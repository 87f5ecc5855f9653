#include "model.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <utility>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace headrace {

namespace {
constexpr int LINES_PER_SPIN = 8;  // about what memory gives one thread meanwhile
constexpr int32_t QUERIES = 16;  // rows of a span in one attention tile: they share each load of keys and values

}  // namespace

Bytes::Bytes(size_t size) : size_(size) {
    const size_t mapped = std::max<size_t>(size, 1);
    void* data = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED) throw std::bad_alloc();
    madvise(data, mapped, MADV_HUGEPAGE);  // fewer misses of the translation cache; refusal is harmless
    data_ = static_cast<uint8_t*>(data);
}

Bytes::~Bytes() {
    if (data_) munmap(data_, std::max<size_t>(size_, 1));
}

Bytes::Bytes(Bytes&& other) noexcept : data_(other.data_), size_(other.size_) { other.data_ = nullptr; }

uint8_t* Shelf::place(size_t size) {
    size = (size + 63) / 64 * 64;
    if (mappings_.empty() || next_ + size > mappings_.back().size()) {
        mappings_.emplace_back(std::max(size, MAPPING));
        next_ = 0;
    }
    uint8_t* at = mappings_.back().data() + next_;
    next_ += size;
    used_ += size;
    return at;
}

const Kernels& kernels_named(const std::string& isa) {
    if (isa.empty()) return best_kernels();
    if (isa == "scalar") return scalar_kernels();
    const Kernels* kernels = isa == "avx2" ? avx2_kernels() : isa == "avx512" ? avx512_kernels() : nullptr;
    if (!kernels) throw std::invalid_argument("instruction set '" + isa + "' is not known or this processor lacks it");
    return *kernels;
}

Model::Model(int num_threads, int max_tokens, int planes, const std::string& isa)
    : kernels_(kernels_named(isa)), pool_(num_threads), max_tokens_(max_tokens), planes_(planes), scratch_(pool_.size()) {}

void Model::add_op(std::unique_ptr<Op> op) {
    auto& ops = in_head_ ? head_ : trunk_;
    if (!ops.empty()) op = ops.back()->join(std::move(op));
    if (op) ops.push_back(std::move(op));
}

int Model::add_matrix(Packing packing, int32_t rows, int32_t width, const uint8_t* stored, size_t row_bytes) {
    PackedMatrix matrix{packing, rows, width, nullptr};
    const int32_t num_strips = matrix.num_strips();
    uint8_t* data = packed_.place(kernels_.strip_bytes(packing, width) * num_strips);
    matrix.data = data;
    unpacked_.push_back({matrix, data, stored, row_bytes});
    matrices_.push_back(matrix);
    return (int)matrices_.size() - 1;
}

void Model::pack() {
    constexpr int32_t strips_at_once = 8;
    std::vector<std::atomic<int32_t>> next(unpacked_.size());
    pool_.run([&](int) {
        for (size_t i = 0; i < unpacked_.size(); ++i) {
            const auto& [matrix, data, stored, row_bytes] = unpacked_[i];
            const int32_t num_strips = matrix.num_strips();
            for (int32_t first; (first = next[i].fetch_add(strips_at_once)) < num_strips;)
                kernels_.pack(matrix, data, stored, row_bytes, first, std::min(first + strips_at_once, num_strips));
        }
    });
    unpacked_.clear();
}

int Model::add_vector(const float* values, size_t count) {
    vectors_.emplace_back(values, values + count);
    return (int)vectors_.size() - 1;
}

int Model::add_cache(int group, int32_t block_size, int32_t num_blocks, bool is_f16, int32_t kv_heads, int32_t key_width,
                     int32_t value_width) {
    if ((int)groups_.size() <= group) groups_.resize(group + 1);
    GroupBlocks& blocks = groups_[group];
    blocks.num_blocks = num_blocks;
    const auto add = [&](int32_t width) {
        constexpr size_t LINE = 64;
        const size_t at = blocks.block_bytes, size = (is_f16 ? 2 : 4) * (size_t)block_size * kv_heads * width;
        blocks.block_bytes += (size + LINE - 1) / LINE * LINE;
        return at;
    };
    const size_t keys_at = add(key_width);
    const size_t values_at = add(value_width ? value_width : key_width);  // latent keys are kept both ways
    cache_places_.push_back({group, keys_at, values_at});
    AttentionCache cache{};
    cache.is_f16 = is_f16;
    cache.kv_heads = kv_heads;
    cache.key_width = key_width;
    cache.value_width = value_width;
    cache.block_size = block_size;
    caches_.push_back(cache);
    return (int)caches_.size() - 1;
}

int Model::add_state(int group, int32_t num_blocks, int64_t size) {
    states_.push_back({std::make_unique<Bytes>(sizeof(float) * size * num_blocks), group, size});
    return (int)states_.size() - 1;
}

int Model::add_list(int32_t width, int32_t num_outliers) {
    lists_.push_back({num_outliers, {}, std::vector<int64_t>(width)});
    return (int)lists_.size() - 1;
}

void Model::count_outliers(int32_t list, const QuantizedRows& rows, int32_t num_rows) const {
    for (int32_t i = 0; i < num_rows * rows.num_outliers; ++i) ++lists_[list].counts[rows.channels[i]];
}

void Model::fix_outliers() {
    for (OutlierList& list : lists_) {
        std::vector<int32_t> order(list.counts.size());
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return list.counts[a] > list.counts[b]; });
        order.resize(list.num);
        std::sort(order.begin(), order.end());
        list.channels = order;
    }
}

void Model::finish(int32_t trunk_width, int32_t head_width, int32_t rows_per_tile) {
    rows_per_tile_ = rows_per_tile;
    for (GroupBlocks& blocks : groups_) {
        // A chunk's keys come from many blocks: at the same place of a page each, they would share half of the first
        // cache's sets. Small blocks are left alone, for the padding would be much of them.
        constexpr size_t PAGE = 4096, OFFSET = 2112, LARGE = 64 << 10;
        if (blocks.block_bytes >= LARGE) blocks.block_bytes += (PAGE + OFFSET - blocks.block_bytes % PAGE) % PAGE;
        blocks.bytes = std::make_unique<Bytes>(blocks.block_bytes * blocks.num_blocks);
    }
    for (size_t i = 0; i < caches_.size(); ++i) {
        const CachePlace& place = cache_places_[i];
        uint8_t* const data = groups_[place.group].bytes->data();
        caches_[i].keys = data + place.keys_at;
        caches_[i].values = data + place.values_at;
        caches_[i].stride = groups_[place.group].block_bytes;
    }
    trunk_arena_ = std::make_unique<Bytes>(sizeof(float) * trunk_width * max_tokens_);
    head_arena_ = std::make_unique<Bytes>(sizeof(float) * head_width * rows_per_tile);
    for (int thread = 0; thread < pool_.size(); ++thread)
        claimed_.push_back(std::make_unique<std::atomic<int64_t>[]>(std::max(trunk_.size(), head_.size())));
}

QuantizedRows quantized_at(float* place, int32_t width, int32_t planes, int32_t rows, int32_t num_outliers,
                           const int32_t* fixed) {
    const size_t cells = (size_t)rows * planes * width, num = (size_t)rows * num_outliers;
    QuantizedRows result;
    result.width = width;
    result.planes = planes;
    result.q = reinterpret_cast<int8_t*>(place);
    result.scale = place + cells / 4;
    result.scaled_sum = result.scale + cells / GROUP;
    result.sums = reinterpret_cast<int32_t*>(result.scaled_sum + cells / GROUP);
    result.num_outliers = num_outliers;
    result.fixed = fixed;
    result.outliers = reinterpret_cast<float*>(result.sums + cells / (GROUP / 2));
    result.channels = reinterpret_cast<int32_t*>(result.outliers + num);
    result.slots = result.channels + num;
    result.distinct = result.slots + num;
    result.num_distinct = result.distinct + num;
    return result;
}

QuantizedRows Model::quantized(const Buffer& buffer, int32_t rows) const {
    const bool is_fixed = buffer.list >= 0 && !lists_[buffer.list].channels.empty();
    return quantized_at(floats(buffer, rows), buffer.width, planes_, rows,
                        is_fixed ? buffer.num_outliers : std::min(buffer.num_outliers, MOST_OUTLIERS),
                        is_fixed ? lists_[buffer.list].channels.data() : nullptr);
}

// The tiles of an op lie in one stretch per thread, so that each reads its weights front to back; who is done takes
// from the stretches of the others.
void Model::run_tiles(const Ops& ops, size_t op, int64_t num_tiles, int32_t rows, int thread) {
    const int num_threads = pool_.size();
    for (int i = 0; i < num_threads; ++i) {
        const int owner = (thread + i) % num_threads;
        const auto [first, end] = turn_of(num_tiles, owner);
        auto& claimed = claimed_[owner][op];
        for (int64_t tile; (tile = first + claimed.fetch_add(1, std::memory_order_relaxed)) < end;)
            ops[op]->tile(*this, rows, {tile, end}, scratch_[thread]);
    }
}

Turn Model::turn_of(int64_t num_tiles, int thread) const {
    return {num_tiles * thread / pool_.size(), num_tiles * (thread + 1) / pool_.size()};
}

// Of the first op from `op` on that has any.
Upcoming Model::upcoming(const Ops& ops, size_t op, int32_t rows, int thread) const {
    for (; op < ops.size(); ++op) {
        const Turn turn = turn_of(ops[op]->num_tiles(*this, rows), thread);
        const Upcoming found = turn.index < turn.end ? ops[op]->upcoming(*this, turn) : Upcoming{};
        if (!found.is_empty()) return found;
    }
    return {};
}

// Ops of a single tile are done by the thread that comes last to the barrier before them, which so serves for both.
void Model::run_ops(const Ops& ops, int32_t rows) {
    for (auto& claimed : claimed_)
        for (size_t i = 0; i < ops.size(); ++i) claimed[i].store(0, std::memory_order_relaxed);
    int64_t since = is_profiling_ ? now() : 0;  // moved on by one thread at a time: the last one at a barrier
    const auto finished = [&](size_t op) {
        if (is_profiling_) took(ops, op, std::exchange(since, now()));
    };
    // The ops of one tile from `op` on; where the next one of more begins.
    const auto run_single = [&](size_t op, int thread) {
        for (int64_t num; op < ops.size() && (num = ops[op]->num_tiles(*this, rows)) <= 1; ++op) {
            if (num == 0) continue;
            ops[op]->tile(*this, rows, {0, 1}, scratch_[thread]);
            finished(op);
        }
        return op;
    };
    const size_t begin = run_single(0, 0);
    if (begin == ops.size()) return;
    pool_.run([&](int thread) {
        for (size_t op = begin, next; op < ops.size(); op = next) {
            run_tiles(ops, op, ops[op]->num_tiles(*this, rows), rows, thread);
            for (next = op + 1; next < ops.size() && ops[next]->num_tiles(*this, rows) <= 1;) ++next;
            // Memory is never left idle: not while one thread does what only one can do, nor while others lag behind.
            Upcoming weights = upcoming(ops, next, rows, thread);
            weights.fetch(FETCH_AHEAD / 64);
            const auto alone = [&] {
                finished(op);
                run_single(op + 1, thread);
            };
            pool_.barrier(thread, alone, [&] { weights.fetch(LINES_PER_SPIN); });
        }
    });
}

void Model::set_profiling(bool on) {
    is_profiling_ = on;
    times_.clear();
    for (const Ops* ops : {&trunk_, &head_})
        for (const auto& op : *ops) times_.push_back({op->name(), op->weight_bytes(*this), 0, 0});
}

void Model::took(const Ops& ops, size_t op, int64_t since) {
    OpTime& time = times_[(&ops == &head_ ? trunk_.size() : 0) + op];
    time.runs += 1;
    time.nanoseconds += now() - since;
}

void Model::run_trunk(Step step) {
    if (step.num_tokens > max_tokens_)
        throw std::invalid_argument("a step of " + std::to_string(step.num_tokens) + " tokens; at most " +
                                    std::to_string(max_tokens_) + " were allowed for");
    step_ = std::move(step);
    step_.span_of.resize(step_.num_tokens);
    for (int32_t i = 0; i < (int32_t)step_.spans.size(); ++i) {
        const Span& span = step_.spans[i];
        std::fill_n(step_.span_of.begin() + span.first_row, span.count, i);
        step_.num_chunks = std::max(step_.num_chunks, (span.start + span.count + CHUNK - 1) / CHUNK);
        for (int32_t first = 0; first < span.count; first += QUERIES)
            step_.blocks.push_back({i, first, std::min(QUERIES, span.count - first)});
    }
    running_head_ = false;
    for (const auto& op : trunk_) op->prepare_step(*this);
    run_ops(trunk_, step_.num_tokens);
}

void Model::load(std::vector<Step> steps, const Buffer& last) {
    pack();
    for (Step& step : steps) {
        const int32_t num_tokens = step.num_tokens;
        std::vector<int32_t> rows(num_tokens);
        std::iota(rows.begin(), rows.end(), 0);
        run_trunk(std::move(step));
        for (int32_t first = 0; first < num_tokens; first += rows_per_tile_)
            run_head(rows.data() + first, std::min(rows_per_tile_, num_tokens - first), last);
    }
    fix_outliers();
}

const float* Model::run_head(const int32_t* readout_rows, int32_t count, const Buffer& last) {
    step_.readout_rows = readout_rows;
    running_head_ = true;
    run_ops(head_, count);
    return floats(last, count);
}

void Model::run(Step step, const Readouts& readouts, const Buffer& last) {
    num_begun_.fetch_add(1, std::memory_order_relaxed);
    run_trunk(std::move(step));
    for (int32_t first = 0; first < readouts.count; first += rows_per_tile_) {
        const int32_t count = std::min(rows_per_tile_, readouts.count - first);
        const float* logits = run_head(readouts.rows + first, count, last);
        std::atomic<int32_t> next{0};
        pool_.run([&](int thread) {
            for (int32_t row; (row = next.fetch_add(1, std::memory_order_relaxed)) < count;)
                read_out(readouts, first + row, logits + (size_t)row * last.width, scratch_[thread]);
        });
    }
    num_ended_.fetch_add(1, std::memory_order_relaxed);
}

void Model::read_out(const Readouts& r, int32_t readout, const float* logits, Scratch& scratch) const {
    int32_t token = r.targets[readout];
    double* room = reinterpret_cast<double*>(scratch.get(2 * (kernels_.sample_scratch(r.vocab_size) + 2 * (size_t)r.max_top)));
    if (token < 0) {
        const double* n = r.numbers + (size_t)readout * Readouts::NUMBERS;
        const int32_t* starts = r.starts + (size_t)readout * Readouts::LISTS;
        const auto ids = [&](int list) { return r.ids + starts[list]; };
        const auto values = [&](int list) { return r.values + starts[list]; };
        const auto size = [&](int list) { return starts[list + 1] - starts[list]; };
        const int32_t mask = r.mask_rows[readout];
        const bool is_plain = starts[0] == starts[Readouts::LISTS] && mask < 0;
        if (is_plain && n[Readouts::TEMPERATURE] == 0.0) {
            token = kernels_.argmax(logits, r.vocab_size);
        } else {
            std::vector<int32_t> counts(values(Readouts::GENERATED), values(Readouts::GENERATED) + size(Readouts::GENERATED));
            SampleParams p{};
            p.temperature = n[Readouts::TEMPERATURE];
            p.top_k = (int32_t)n[Readouts::TOP_K];
            p.top_p = n[Readouts::TOP_P];
            p.min_p = n[Readouts::MIN_P];
            p.uniform = n[Readouts::UNIFORM];
            p.repetition_penalty = n[Readouts::REPETITION];
            p.presence_penalty = n[Readouts::PRESENCE];
            p.frequency_penalty = n[Readouts::FREQUENCY];
            p.typical_p = n[Readouts::TYPICAL_P];
            p.xtc_threshold = n[Readouts::XTC_THRESHOLD];
            p.seen = ids(Readouts::SEEN), p.num_seen = size(Readouts::SEEN);
            p.generated = ids(Readouts::GENERATED), p.num_generated = size(Readouts::GENERATED);
            p.generated_counts = counts.data();
            p.bias_ids = ids(Readouts::BIASES), p.num_biases = size(Readouts::BIASES);
            p.biases = values(Readouts::BIASES);
            p.banned = ids(Readouts::BANNED), p.num_banned = size(Readouts::BANNED);
            p.allowed = mask < 0 ? nullptr : r.masks + (size_t)mask * ((r.vocab_size + 31) / 32);
            token = kernels_.sample_row(logits, r.vocab_size, p, room);
        }
    }
    r.tokens[readout] = token;
    const int32_t num_top = r.num_top[readout];
    if (num_top < 0 || token < 0) return;
    const double log_sum = kernels_.log_sum_exp(logits, r.vocab_size);
    r.logprobs[readout] = logits[token] - log_sum;
    r.ranks[readout] = kernels_.rank_of(logits, r.vocab_size, token);
    const int32_t k = std::min(num_top, r.vocab_size);
    if (k == 0) return;
    int32_t* top = r.top_ids + (size_t)readout * r.max_top;
    float* top_logits = scratch.floats.data() + scratch.floats.size() - k;
    kernels_.top_k(logits, r.vocab_size, k, top, top_logits, room);
    for (int32_t i = 0; i < k; ++i) r.top_logprobs[(size_t)readout * r.max_top + i] = top_logits[i] - log_sum;
}

void Model::copy_block(int group, int32_t source, int32_t target) {
    if (group < (int)groups_.size()) {
        const GroupBlocks& blocks = groups_[group];
        uint8_t* const data = blocks.bytes->data();
        memcpy(data + blocks.block_bytes * target, data + blocks.block_bytes * source, blocks.block_bytes);
    }
    for (auto& state : states_)
        if (state.group == group) {
            float* base = reinterpret_cast<float*>(state.bytes->data());
            memcpy(base + state.size * target, base + state.size * source, sizeof(float) * state.size);
        }
}

std::vector<Model::OpTime> Model::op_times() const { return times_; }

void Model::touch_cache(size_t most_bytes, bool only_when_quiet) const {
    constexpr size_t PIECE = 2 << 20;  // a huge page
    std::vector<const Bytes*> arrays;
    for (const GroupBlocks& blocks : groups_) arrays.push_back(blocks.bytes.get());
    for (const auto& state : states_) arrays.push_back(state.bytes.get());
    size_t total = 0;
    bool is_left = true;
    for (size_t at = 0; is_left; at += PIECE) {
        is_left = false;
        for (const Bytes* array : arrays) {
            if (at >= array->size()) continue;
            if (only_when_quiet) wait_for_quiet();
            if (total >= most_bytes || is_closing_) return;
            is_left = true;
            const size_t size = std::min(PIECE, array->size() - at);
            if (madvise(array->data() + at, size, MADV_POPULATE_WRITE) != 0) return;  // an old kernel: pages come as used
            total += size;
        }
    }
}

void Model::touch_cache_meanwhile(size_t most_bytes) {
    if (!toucher_.joinable()) toucher_ = std::thread([this, most_bytes] { touch_cache(most_bytes, true); });
}

// Until no step has run for some milliseconds.
void Model::wait_for_quiet() const {
    for (uint64_t before = ~num_begun_; !is_closing_;) {
        const uint64_t begun = num_begun_;
        if (begun == num_ended_ && begun == before) return;
        before = begun;
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
}

Model::~Model() {
    is_closing_ = true;
    if (toucher_.joinable()) toucher_.join();
}

}  // namespace headrace
