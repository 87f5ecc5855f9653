// Attention kernels against double-precision brute force, and against each other bit for bit.
//
// `--time [d|p]` (decoding or prompts only): GB/s and GFLOPS of each instruction set, beside the peaks of the same run.
#include "peaks.h"

using namespace headrace;

namespace {

struct Case {
    int heads, kv_heads, key_width, value_width;
    int block_size, start, count, window = 0;
    float softcap = 0;
    bool is_f16 = true, is_tree = false, is_latent = false;
    float loudness = 1;  // of q: large ones give weights of exactly 0
};

// A cache filled for one sequence through store_kv, blocks scattered over the pool, and what it should hold.
struct Sequence {
    Case c;
    AttentionShape shape{};
    AttentionCache cache{};
    Span span{};
    std::vector<int32_t> table, parents;
    std::vector<uint8_t> blocks;  // keys and values of a block lie side by side
    Floats q, k, v;  // k, v of every slot
    size_t q_stride, out_stride;

    Sequence(const Case& c, const Kernels& kernels, unsigned seed) : c(c) {
        std::mt19937 random(seed);
        std::normal_distribution<float> normal;
        const int slots = c.start + c.count, num_blocks = (slots + c.block_size - 1) / c.block_size;
        const int pool = num_blocks + 3, stored_width = c.is_latent ? c.key_width : c.value_width;
        shape = {c.heads, c.kv_heads, c.key_width, c.value_width, 1.0f / std::sqrt((float)c.key_width), c.window, c.softcap};
        const size_t unit = (c.is_f16 ? 2 : 4) * (size_t)c.block_size * c.kv_heads, stride = unit * (c.key_width + stored_width);
        blocks.assign(stride * pool, 0);
        uint8_t* const values = blocks.data() + unit * c.key_width;
        const int32_t value_width = c.is_latent ? 0 : c.value_width;
        cache = {blocks.data(), values, stride, c.is_f16, c.kv_heads, c.key_width, value_width, c.block_size};
        std::vector<int32_t> ids(pool);
        for (int i = 0; i < pool; ++i) ids[i] = i;
        std::shuffle(ids.begin(), ids.end(), random);
        table.assign(ids.begin(), ids.begin() + num_blocks);
        k.resize((size_t)slots * c.kv_heads * c.key_width);
        v.resize((size_t)slots * c.kv_heads * stored_width);
        for (float& x : k) x = normal(random);
        for (float& x : v) x = normal(random);
        if (c.is_latent) v = k;
        // What another sequence left behind in this one's blocks: finite, arbitrary.
        Floats stale_k(c.kv_heads * c.key_width), stale_v(c.kv_heads * stored_width);
        for (int slot = 0; slot < num_blocks * c.block_size; ++slot) {
            for (float& x : stale_k) x = 1e6f * normal(random);  // beyond f16: stored as its largest
            for (float& x : stale_v) x = 1e6f * normal(random);
            if (slot % 3 == 0) stale_k[0] = INFINITY, stale_v[0] = NAN;
            kernels.store_kv(cache, table.data(), slot, stale_k.data(), stale_v.data());
        }
        for (int slot = 0; slot < slots; ++slot)
            kernels.store_kv(cache, table.data(), slot, &k[(size_t)slot * c.kv_heads * c.key_width],
                             &v[(size_t)slot * c.kv_heads * stored_width]);
        if (c.is_tree)
            for (int row = 0; row < c.count; ++row) parents.push_back((int)(random() % (row + 1)) - 1);
        if (c.window)  // blocks below the window are given away
            for (int b = 0; (b + 1) * c.block_size <= c.start + 1 - c.window; ++b) table[b] = -1;
        span = {c.start, c.count, 2, table.data()};
        q_stride = c.heads * c.key_width + 5;
        out_stride = c.heads * c.value_width + 3;
        q.resize(q_stride * (span.first_row + c.count));
        for (float& x : q) x = c.loudness * normal(random);
    }

    const int32_t* tree() const { return c.is_tree ? parents.data() : nullptr; }

    // Slots that a row sees, in order of position.
    std::vector<int> seen(int row) const {
        std::vector<int> path;
        if (c.is_tree)
            for (int r = row; r >= 0; r = parents[r]) path.insert(path.begin(), c.start + r);
        else
            for (int r = 0; r <= row; ++r) path.push_back(c.start + r);
        std::vector<int> all;
        for (int s = 0; s < c.start; ++s) all.push_back(s);
        all.insert(all.end(), path.begin(), path.end());
        if (c.window && (int)all.size() > c.window) all.erase(all.begin(), all.end() - c.window);
        return all;
    }

    // In f16 the cache holds rounded numbers.
    double held(float x) const { return c.is_f16 ? (double)(float)(_Float16)x : (double)x; }

    void brute_force(int row, int head, std::vector<double>& out) const {
        const int kv = head / (c.heads / c.kv_heads), stored_width = c.is_latent ? c.key_width : c.value_width;
        const float* query = &q[(size_t)(span.first_row + row) * q_stride + (size_t)head * c.key_width];
        const std::vector<int> slots = seen(row);
        std::vector<double> scores;
        for (int slot : slots) {
            double s = 0;
            for (int d = 0; d < c.key_width; ++d)
                s += (double)query[d] * held(k[((size_t)slot * c.kv_heads + kv) * c.key_width + d]);
            s *= shape.scale;
            if (c.softcap) s = c.softcap * std::tanh(s / c.softcap);
            scores.push_back(s);
        }
        const double peak = *std::max_element(scores.begin(), scores.end());
        double total = 0;
        out.assign(c.value_width, 0.0);
        for (size_t i = 0; i < slots.size(); ++i) {
            const double w = std::exp(scores[i] - peak);
            total += w;
            for (int d = 0; d < c.value_width; ++d)
                out[d] += w * held(v[((size_t)slots[i] * c.kv_heads + kv) * stored_width + d]);
        }
        for (double& x : out) x /= total;
    }
};

// Scratch is exactly as long as promised, so that the address sanitizer sees a step beyond.
Floats run_whole(const Kernels& kernels, const Sequence& s, int queries) {
    Floats out(s.out_stride * (s.span.first_row + s.c.count), 0.0f);
    for (int kv = 0; kv < s.c.kv_heads; ++kv)
        for (int first = 0; first < s.c.count; first += queries) {
            const int num = std::min(queries, s.c.count - first);
            Floats scratch(kernels.attend_scratch(s.shape, num), NAN);
            kernels.attend(s.shape, s.cache, s.span, s.tree(), kv, first, num, s.q.data(), s.q_stride, out.data(),
                           s.out_stride, scratch.data());
        }
    return out;
}

Floats run_parts(const Kernels& kernels, const Sequence& s, int queries, int chunks_at_once) {
    Floats out(s.out_stride * (s.span.first_row + s.c.count), 0.0f);
    const int num_chunks = (s.c.start + s.c.count + CHUNK - 1) / CHUNK;
    for (int kv = 0; kv < s.c.kv_heads; ++kv)
        for (int first = 0; first < s.c.count; first += queries) {
            const int num = std::min(queries, s.c.count - first);
            const size_t size = kernels.attend_part_size(s.shape, num);
            Floats parts(size * num_chunks, NAN), scratch(kernels.attend_scratch(s.shape, num), NAN);
            for (int chunk = (num_chunks - 1) / chunks_at_once * chunks_at_once; chunk >= 0; chunk -= chunks_at_once)
                kernels.attend_part(s.shape, s.cache, s.span, s.tree(), kv, first, num, chunk,
                                    std::min(chunk + chunks_at_once, num_chunks), s.q.data(), s.q_stride,
                                    parts.data() + size * chunk, scratch.data());
            kernels.attend_merge(s.shape, s.span, kv, first, num, parts.data(), num_chunks, out.data(), s.out_stride,
                                 scratch.data());
        }
    return out;
}

void describe(const Case& c, char* text, size_t size) {
    std::snprintf(text, size, "heads %d/%d widths %d/%d block %d start %d count %d window %d cap %g %s%s%s", c.heads, c.kv_heads,
                  c.key_width, c.value_width, c.block_size, c.start, c.count, c.window, c.softcap, c.is_f16 ? "f16" : "f32",
                  c.is_tree ? " tree" : "", c.is_latent ? " latent" : "");
}

void check(const Case& c, unsigned seed) {
    std::vector<const Kernels*> all = fast_kernels();
    const long size = (long)c.count * c.heads * (c.start + c.count) * c.key_width;
    if (size < (IS_SHORT ? 300000 : 1500000) || all.empty()) all.push_back(&scalar_kernels());
    char name[300];
    describe(c, name, sizeof name);
    const Sequence first(c, *all[0], seed);
    const Floats expected = run_whole(*all[0], first, c.count);
    double worst = 0;
    for (int row = 0; row < c.count; row += 1 + c.count / 12)
        for (int head = 0; head < c.heads; ++head) {
            std::vector<double> right;
            first.brute_force(row, head, right);
            for (int d = 0; d < c.value_width; ++d) {
                const double got = expected[(first.span.first_row + row) * first.out_stride + head * c.value_width + d];
                const double error = std::fabs(got - right[d]);
                worst = std::isnan(error) ? INFINITY : std::max(worst, error);
            }
        }
    EXPECT(worst < (c.loudness > 1 ? 2e-4 : 2e-5), "%s: error %g", name, worst);
    for (const Kernels* kernels : all) {
        const Sequence s(c, *kernels, seed);
        EXPECT(s.blocks == first.blocks, "%s: store_kv differs on %s", name, kernels->name);
        for (int queries : {c.count, 1, 3, 5, 16})
            if (queries <= c.count)
                EXPECT(same_bits(run_whole(*kernels, s, queries), expected), "%s: %s, %d queries", name, kernels->name, queries);
        for (int queries : {c.count, 2})
            for (int chunks : {1, 2, 7})
                EXPECT(same_bits(run_parts(*kernels, s, queries, chunks), expected), "%s: %s, %d queries in parts of %d", name,
                       kernels->name, queries, chunks);
        if (!c.is_tree) {  // the same as a tree that happens to be a chain, row by row and together
            Sequence chain = s;
            chain.c.is_tree = true;
            chain.span.table = chain.table.data(), chain.cache = s.cache;
            for (int row = 0; row < c.count; ++row) chain.parents.push_back(row - 1);
            EXPECT(same_bits(run_whole(*kernels, chain, std::min(c.count, 4)), expected), "%s: %s as a tree", name, kernels->name);
        }
    }
    // A row of a tree is a decode step after its path: store the path behind the cache and ask again.
    if (c.is_tree) {
        const int row = c.count - 1;
        const std::vector<int> slots = first.seen(row);
        Case alone = c;
        alone.is_tree = false, alone.count = 1;
        int depth = 0;
        for (int r = first.parents[row]; r >= 0; r = first.parents[r]) ++depth;
        Sequence chain = first;
        chain.cache.keys = chain.blocks.data();
        chain.cache.values = chain.cache.keys + (first.cache.values - first.cache.keys);
        chain.span.table = chain.table.data();
        const int stored_width = c.is_latent ? c.key_width : c.value_width;
        for (int i = 0; i <= depth; ++i) {
            const size_t slot = slots[slots.size() - 1 - depth + i];
            all[0]->store_kv(chain.cache, chain.table.data(), c.start + i, &first.k[slot * c.kv_heads * c.key_width],
                             &first.v[slot * c.kv_heads * stored_width]);
        }
        chain.c = alone;
        chain.span.start = c.start + depth, chain.span.count = 1, chain.span.first_row = first.span.first_row + row;
        Floats out(first.out_stride * (chain.span.first_row + 1), 0.0f);
        for (int kv = 0; kv < c.kv_heads; ++kv) {
            Floats scratch(all[0]->attend_scratch(chain.shape, 1), NAN);
            all[0]->attend(chain.shape, chain.cache, chain.span, nullptr, kv, 0, 1, chain.q.data(), chain.q_stride, out.data(),
                           chain.out_stride, scratch.data());
        }
        EXPECT(std::memcmp(&out[chain.span.first_row * first.out_stride], &expected[chain.span.first_row * first.out_stride],
                           c.heads * c.value_width * sizeof(float)) == 0,
               "%s: the last row of the tree decoded after its path", name);
    }
}

// Prompts in pieces: the rows of one span, computed as several spans over the same cache.
void check_chunking(const Case& c, unsigned seed) {
    const Kernels& kernels = best_kernels();
    const Sequence s(c, kernels, seed);
    const Floats expected = run_whole(kernels, s, c.count);
    std::mt19937 random(seed);
    for (int trial = 0; trial < 3; ++trial) {
        Floats out(expected.size(), 0.0f);
        for (int begin = 0; begin < c.count;) {
            const int count = std::min<int>(1 + random() % 40, c.count - begin);
            const Span span{c.start + begin, count, s.span.first_row + begin, s.table.data()};
            for (int kv = 0; kv < c.kv_heads; ++kv) {
                Floats scratch(kernels.attend_scratch(s.shape, count), NAN);
                kernels.attend(s.shape, s.cache, span, nullptr, kv, 0, count, s.q.data(), s.q_stride, out.data(), s.out_stride,
                               scratch.data());
            }
            begin += count;
        }
        EXPECT(same_bits(out, expected), "prompt in pieces");
    }
}

void run_checks() {
    const int widths[][2] = {{16, 16}, {24, 24}, {40, 40}, {64, 64}, {128, 128}, {256, 256}, {64, 40}, {24, 8}, {16, 100}, {72, 17}};
    const int heads[][2] = {{1, 1}, {3, 3}, {9, 3}, {4, 1}, {5, 1}, {7, 7}, {14, 2}, {16, 1}};
    const int starts[] = {0, 1, 15, 16, 250, 600, 777, 255, 256, 1020};
    const int counts[] = {1, 2, 3, 7, 16, 33, 1, 60};
    const int windows[] = {0, 0, 5, 100, 300, 16, 0, 512};
    unsigned seed = 1;
    for (int i = 0; i < 90; i += IS_SHORT ? 7 : 1) {  // 7 meets every entry of the tables
        Case c{};
        c.key_width = widths[i % 10][0], c.value_width = widths[i % 10][1];
        c.heads = heads[i * 7 / 3 % 8][0], c.kv_heads = heads[i * 7 / 3 % 8][1];
        c.start = starts[i * 3 / 2 % 10], c.count = counts[i * 5 / 3 % 8];
        c.window = windows[i * 11 / 5 % 8];
        c.block_size = i % 3 == 0 ? 64 : 16 * (1 + i % 3);
        c.softcap = i % 4 == 1 ? 30.0f : 0.0f;
        c.is_f16 = i % 5 != 2;
        c.is_tree = i % 3 == 2 && c.count > 1;
        if (i % 9 == 4) c.is_latent = true, c.kv_heads = 1, c.value_width = std::min(c.value_width, c.key_width);
        if (i % 8 == 6) c.loudness = 30;
        check(c, ++seed);
    }
    // A tree across the border of a chunk, small windows below a deep tree, and DeepSeek's latent widths.
    check({9, 3, 64, 64, 16, 250, 40, 0, 0, true, true, false, 1}, 1001);
    check({4, 2, 32, 48, 32, 510, 64, 7, 0, true, true, false, 1}, 1002);
    check({4, 1, 576, 512, 16, 900, 3, 0, 0, true, false, true, 1}, 1003);
    check({2, 1, 64, 48, 16, 0, 50, 0, 0, false, true, true, 1}, 1004);
    check_chunking({9, 3, 64, 64, 16, 0, IS_SHORT ? 300 : 900, 0, 0, true, false, false, 1}, 7);
    check_chunking({4, 2, 40, 56, 32, 123, IS_SHORT ? 150 : 400, 77, 20, false, false, false, 1}, 8);
}

// ------------------------------------------------------------------------------------------------------------- timing

void fill(Bytes& bytes, bool is_f16) {  // with small numbers
    for (size_t i = 0; i + 4 <= bytes.size(); i += 4) {
        const uint32_t bits = (uint32_t)(i * 2654435761u);
        const uint32_t value = is_f16 ? (0x30003000u | (bits & 0x83ff83ffu)) : (0x3e000000u | (bits & 0x807fffffu));
        std::memcpy(bytes.data() + i, &value, 4);
    }
}

// Decode: one query per sequence over 8k of context, as many sequences as make the cache larger than any cache memory.
void time_decode(const Kernels& kernels, int heads, int kv_heads, int width, bool is_f16, int context, size_t bytes,
                 double bandwidth) {
    const int block_size = 16;
    const size_t per_sequence = (size_t)context * kv_heads * width * 2 * (is_f16 ? 2 : 4);
    const int sequences = std::max<int>(1, bytes / per_sequence), num_blocks = sequences * context / block_size;
    Bytes blocks(per_sequence * sequences);
    fill(blocks, is_f16);
    const size_t stride = blocks.size() / num_blocks;
    const AttentionShape shape{heads, kv_heads, width, width, 0.125f, 0, 0};
    const AttentionCache cache{blocks.data(), blocks.data() + stride / 2, stride, is_f16, kv_heads, width, width, block_size};
    std::vector<int32_t> table(num_blocks);
    for (int i = 0; i < num_blocks; ++i) table[i] = i;
    std::shuffle(table.begin(), table.end(), std::mt19937(1));
    Floats q(heads * width), out(heads * width), scratch(kernels.attend_scratch(shape, 1));
    for (size_t i = 0; i < q.size(); ++i) q[i] = std::sin((float)i);
    const double time = median_s([&] {
        for (int s = 0; s < sequences; ++s) {
            const Span span{context - 1, 1, 0, table.data() + (size_t)s * context / block_size};
            for (int kv = 0; kv < kv_heads; ++kv)
                kernels.attend(shape, cache, span, nullptr, kv, 0, 1, q.data(), 0, out.data(), 0, scratch.data());
        }
    }, 5);
    const double rate = per_sequence * sequences / time / 1e9;
    std::printf("%-7s decode %4d %s heads %2d/%d width %3d, %4.0f MB: %6.1f GB/s = %3.0f %% of read bandwidth, %6.1f GFLOPS\n", kernels.name, context,
                is_f16 ? "f16" : "f32", heads, kv_heads, width, per_sequence * sequences / 1e6, rate, 100 * rate / bandwidth,
                4.0 * context * heads * width * sequences / time / 1e9);
}

void time_prompt(const Kernels& kernels, int heads, int kv_heads, int width, int start, int count, int queries, double peak) {
    Case c{};
    c.heads = heads, c.kv_heads = kv_heads, c.key_width = c.value_width = width, c.block_size = 16, c.start = start, c.count = count;
    const Sequence s(c, kernels, 3);
    Floats out(s.out_stride * (s.span.first_row + count)), scratch(kernels.attend_scratch(s.shape, queries));
    const double time = median_s([&] {
        for (int kv = 0; kv < kv_heads; ++kv)
            for (int first = 0; first < count; first += queries)
                kernels.attend(s.shape, s.cache, s.span, nullptr, kv, first, std::min(queries, count - first), s.q.data(), s.q_stride,
                               out.data(), s.out_stride, scratch.data());
    });
    const double pairs = (double)count * start + 0.5 * count * (count + 1);
    const double rate = 4 * pairs * heads * width / time / 1e9;
    const double store = median_s([&] {
        for (int slot = 0; slot < count; ++slot)
            kernels.store_kv(s.cache, s.span.table, start + slot, s.k.data(), s.v.data());
    });
    std::printf("%-7s prompt %d after %d, f16 heads %d/%d width %d, %d queries a call: %6.1f GFLOPS = %3.0f %% of peak; store_kv %.0f ns a row\n",
                kernels.name, count, start, heads, kv_heads, width, queries, rate, 100 * rate / peak, store / count * 1e9);
}

void run_times(const char* only) {
    const size_t large = (size_t)800 << 20, small = (size_t)24 << 20;
    for (const Kernels* kernels : fast_kernels()) {
        const Peaks peaks = measure_peaks(*kernels);
        const double far = peaks.far_gbs, near = peaks.near_gbs, peak = peaks.floats;
        if (*only != 'p')
        for (const int* h : (const int[][3]){{9, 3, 64}, {3, 3, 64}, {4, 1, 256}, {32, 8, 128}}) {
            time_decode(*kernels, h[0], h[1], h[2], true, 8192, large, far);
            time_decode(*kernels, h[0], h[1], h[2], true, 8192, small, near);
            time_decode(*kernels, h[0] / h[1], 1, h[2], true, 1024, 0, near);  // in the second-level cache: the cost of computing
        }
        if (*only == 'd') continue;
        for (int queries : {16, 64}) {
            time_prompt(*kernels, 9, 3, 64, 768, 256, queries, peak);
            time_prompt(*kernels, 4, 1, 256, 768, 256, queries, peak);
            time_prompt(*kernels, 8, 8, 64, 768, 256, queries, peak);
        }
    }
}

}  // namespace

int main(int argc, char** argv) {
    if (argc > 1 && !std::strcmp(argv[1], "--time")) {
        run_times(argc > 2 ? argv[2] : "");
        return 0;
    }
    run_checks();
    return report("attention");
}
