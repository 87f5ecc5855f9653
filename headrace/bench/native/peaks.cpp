// What the processor can do at most: float32 and int8 arithmetic in registers, reading from memory.
//
// Built with -O3 -march=native and run as: peaks <largest number of threads> <buffer MiB>. Prints one JSON object; each
// figure is an array over thread counts 1, 2, 4, ..., N, or null where the processor lacks the instructions.
//
// Operations per vector of 32 bytes: maddubs multiplies 32 pairs of bytes and adds them in pairs to int16, madd and add
// do the rest of a sum: counted as 32 multiplications and 32 additions, 64 operations, however they are spelled.
#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

using Clock = std::chrono::steady_clock;

static double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

// Keeps a value in a register and unknown to the compiler, at no cost: equal chains are not merged, sums not reordered.
template <class T> static inline void opaque(T& value) {
#if defined(__AVX512F__)
    asm volatile("" : "+v"(value));
#elif defined(__x86_64__)
    asm volatile("" : "+x"(value));
#else
    asm volatile("" : "+w"(value));
#endif
}

#if defined(__AVX512F__)
constexpr int kFloats = 16;
#elif defined(__AVX__)
constexpr int kFloats = 8;
#else
constexpr int kFloats = 4;
#endif
typedef float Floats __attribute__((vector_size(4 * kFloats)));
typedef std::int32_t Ints __attribute__((vector_size(4 * kFloats)));

// Twelve independent chains: two units with a latency of four or five cycles need ten.
constexpr int kChains = 12;  // inner loops are unrolled, or their accumulators would live in memory

static double float_fma(long iterations) {
    Floats sums[kChains] = {};
    Floats a = Floats{} + 0.999f, b = Floats{} + 0.5f;
    opaque(a);
    opaque(b);
    for (long i = 0; i < iterations; ++i)
#pragma GCC unroll 16
        for (auto& sum : sums) {
            sum = sum * a + b;  // one fma, by -ffp-contract=fast
            opaque(sum);
        }
    return 2.0 * kFloats * kChains * iterations;
}

#if defined(__AVX2__)
static double int8_maddubs(long iterations) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i sums[8] = {}, a = _mm256_set1_epi8(7), w = _mm256_set1_epi8(3);
    for (long i = 0; i < iterations; ++i)
#pragma GCC unroll 16
        for (auto& sum : sums) {
            opaque(w);
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(w, a), ones));
            opaque(sum);
        }
    return 64.0 * 8 * iterations;
}

// Eight products of unsigned 4-bit weights fit in int16: one madd and one add for eight maddubs.
static double int8_maddubs_x8(long iterations) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i sums[4] = {}, a = _mm256_set1_epi8(7), w = _mm256_set1_epi8(3);
    for (long i = 0; i < iterations; ++i) {
        __m256i partial[4];
#pragma GCC unroll 16
        for (auto& p : partial) {
            opaque(w);
            p = _mm256_maddubs_epi16(w, a);
        }
#pragma GCC unroll 16
        for (int k = 1; k < 8; ++k)
#pragma GCC unroll 16
            for (auto& p : partial) {
                opaque(w);
                p = _mm256_add_epi16(p, _mm256_maddubs_epi16(w, a));
                opaque(p);
            }
#pragma GCC unroll 16
        for (int c = 0; c < 4; ++c) {
            sums[c] = _mm256_add_epi32(sums[c], _mm256_madd_epi16(partial[c], ones));
            opaque(sums[c]);
        }
    }
    return 64.0 * 8 * 4 * iterations;
}
#endif

#if defined(__AVX512VNNI__) && defined(__AVX512F__)
static double int8_vnni512(long iterations) {
    __m512i sums[kChains] = {}, a = _mm512_set1_epi8(7), w = _mm512_set1_epi8(3);
    for (long i = 0; i < iterations; ++i)
#pragma GCC unroll 16
        for (auto& sum : sums) {
            sum = _mm512_dpbusd_epi32(sum, w, a);
            opaque(sum);
        }
    return 128.0 * kChains * iterations;
}
#endif

#if defined(__AVXVNNI__)
static double int8_vnni256(long iterations) {
    __m256i sums[kChains] = {}, a = _mm256_set1_epi8(7), w = _mm256_set1_epi8(3);
    for (long i = 0; i < iterations; ++i)
#pragma GCC unroll 16
        for (auto& sum : sums) {
            sum = _mm256_dpbusd_avx_epi32(sum, w, a);
            opaque(sum);
        }
    return 64.0 * kChains * iterations;
}
#endif

// Of several rounds in which all threads start together. A round lasts from the first one's start to the last one's end.
static std::vector<double> rates(int num_threads, int rounds, const std::function<double(int, int)>& work) {
    struct Share {
        double done;
        Clock::time_point begin, end;
    };
    std::vector<double> all_rates;
    for (int round = 0; round < rounds; ++round) {
        std::barrier<> start(num_threads);
        std::vector<Share> shares(num_threads);
        std::vector<std::thread> threads;
        for (int t = 0; t < num_threads; ++t)
            threads.emplace_back([&, t] {
                start.arrive_and_wait();
                const auto begin = Clock::now();
                const double done = work(t, round);
                shares[t] = {done, begin, Clock::now()};
            });
        for (auto& thread : threads) thread.join();
        Share all = shares[0];
        for (int t = 1; t < num_threads; ++t) {
            all.done += shares[t].done;
            all.begin = std::min(all.begin, shares[t].begin);
            all.end = std::max(all.end, shares[t].end);
        }
        all_rates.push_back(all.done / std::chrono::duration<double>(all.end - all.begin).count());
    }
    return all_rates;
}

// What the machine can do: others on it can only slow a round down.
static double best_rate(int num_threads, int rounds, const std::function<double(int, int)>& work) {
    const std::vector<double> all = rates(num_threads, rounds, work);
    return *std::max_element(all.begin(), all.end());
}

static void report(const char* name, const std::vector<int>& counts, double (*kernel)(long)) {
    long iterations = 1 << 14;  // grown until a round takes 3 ms: it may fit between two turns of somebody else
    for (;;) {
        const auto begin = Clock::now();
        kernel(iterations);
        if (seconds_since(begin) > 0.003 || iterations > (1L << 40)) break;
        iterations *= 2;
    }
    std::printf(",\n  \"%s\": [", name);
    for (std::size_t i = 0; i < counts.size(); ++i)
        std::printf("%s%.1f", i ? ", " : "", best_rate(counts[i], 25, [&](int, int) { return kernel(iterations); }) / 1e9);
    std::printf("]");
}

[[maybe_unused]] static void report_absent(const char* name) { std::printf(",\n  \"%s\": null", name); }

// Sums a slice of the buffer with wide loads, eight chains.
static double read_slice(const Ints* begin, const Ints* end) {
    Ints sums[8] = {};
    const Ints* p = begin;
    for (; p + 8 <= end; p += 8)
#pragma GCC unroll 16
        for (int c = 0; c < 8; ++c) sums[c] += p[c];
    for (auto& sum : sums) opaque(sum);
    return double(p - begin) * sizeof(Ints);
}

// `is_typical`: the median of many rounds, what there is now, others on the machine included; else the best.
static void report_reading(const std::vector<int>& counts, std::size_t num_bytes, bool is_typical) {
    const std::size_t size = num_bytes / sizeof(Ints);
    std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(4096, num_bytes), &std::free);
    auto* buffer = static_cast<Ints*>(memory.get());
    std::printf(",\n  \"read_gb_per_s\": ");
    if (buffer == nullptr) {
        std::printf("null");
        return;
    }
    best_rate(counts.back(), 1, [&](int t, int) {  // each page is first touched by a thread, and is memory from then on
        const int n = counts.back();
        std::fill(buffer + size * t / n, buffer + size * (t + 1) / n, Ints{} + 1);
        return 0.0;
    });
    std::printf("[");
    for (std::size_t i = 0; i < counts.size(); ++i) {
        const int n = counts[i];
        // A round reads an eighth: short, and by the time it comes again the caches hold the seven others.
        std::vector<double> all = rates(n, is_typical ? 64 : 24, [&](int t, int round) {
            const Ints* part = buffer + size / 8 * (round % 8);
            return read_slice(part + size / 8 * t / n, part + size / 8 * (t + 1) / n);
        });
        std::sort(all.begin(), all.end());
        const double rate = is_typical ? all[all.size() / 2] : all.back();
        std::printf("%s%.2f", i ? ", " : "", rate / 1e9);
    }
    std::printf("]");
}

int main(int argc, char** argv) {
    const int max_threads = argc > 1 ? std::max(1, std::atoi(argv[1])) : 1;
    const std::size_t num_bytes = std::size_t(argc > 2 ? std::max(1, std::atoi(argv[2])) : 1024) << 20;
    std::vector<int> counts;
    for (int n = 1; n < max_threads; n *= 2) counts.push_back(n);
    counts.push_back(max_threads);

    std::printf("{\n  \"threads\": [");
    for (std::size_t i = 0; i < counts.size(); ++i) std::printf("%s%d", i ? ", " : "", counts[i]);
    std::printf("],\n  \"buffer_mib\": %zu,\n  \"float_vector_bytes\": %d", num_bytes >> 20, 4 * kFloats);
    const bool only_reading = argc > 3 && std::string(argv[3]) == "read";
    report_reading(counts, num_bytes, only_reading);
    if (only_reading) {
        std::printf("\n}\n");
        return 0;
    }
    report("float32_fma_gflops", counts, float_fma);
#if defined(__AVX2__)
    report("int8_maddubs_gops", counts, int8_maddubs);
    report("int8_maddubs_x8_gops", counts, int8_maddubs_x8);
#else
    report_absent("int8_maddubs_gops");
    report_absent("int8_maddubs_x8_gops");
#endif
#if defined(__AVXVNNI__)
    report("int8_avx_vnni_gops", counts, int8_vnni256);
#else
    report_absent("int8_avx_vnni_gops");
#endif
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
    report("int8_avx512_vnni_gops", counts, int8_vnni512);
#else
    report_absent("int8_avx512_vnni_gops");
#endif
    std::printf("\n}\n");
    return 0;
}
