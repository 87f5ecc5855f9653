// What the tests of the kernels share: the instruction sets that run, counted checks, random numbers, memory, medians.
#pragma once

#include "../kernels.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include <sys/mman.h>
#include <time.h>

namespace headrace {

// Under the sanitizers the same shapes, fewer combinations of them (tests/Makefile).
#if defined(HEADRACE_SHORT)
constexpr bool IS_SHORT = true;
#else
constexpr bool IS_SHORT = false;
#endif

// ------------------------------------------------------------------------------------------------ instruction sets

inline std::vector<const Kernels*> fast_kernels() {  // those worth timing
    std::vector<const Kernels*> all;
    for (const Kernels* kernels : {avx512_kernels(), avx2_kernels()})
        if (kernels) all.push_back(kernels);
    return all;
}

inline std::vector<const Kernels*> all_kernels() {  // scalar first
    std::vector<const Kernels*> all = fast_kernels();
    all.push_back(&scalar_kernels());
    std::reverse(all.begin(), all.end());
    return all;
}

// -------------------------------------------------------------------------------------------------------- checking

inline long num_checks = 0, num_failures = 0;

#define EXPECT(condition, ...)                              \
    do {                                                    \
        ++num_checks;                                       \
        if (!(condition) && ++num_failures <= 20) {         \
            std::printf("%s:%d: ", __FILE__, __LINE__);     \
            std::printf(__VA_ARGS__);                       \
            std::printf("\n");                              \
        }                                                   \
    } while (0)

inline int report(const char* name) {  // the exit status of a test
    std::printf("%-10s %8ld checks, %ld failures:", name, num_checks, num_failures);
    for (const Kernels* kernels : all_kernels()) std::printf(" %s", kernels->name);
    std::printf("\n");
    return num_failures != 0;
}

template <typename Vector>
bool same_bits(const Vector& a, const Vector& b) {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(a[0])) == 0);
}

// ----------------------------------------------------------------------------------------------- numbers and memory

// Large ones lie in huge pages, like the executor's: rows of outputs far apart are a page each else, and products of many
// rows up to a sixth slower. Under the address sanitizer none is a byte longer than asked for, and a step beyond is seen.
template <typename T>
struct InHugePages {
    using value_type = T;
    InHugePages() = default;
    template <typename U>
    InHugePages(const InHugePages<U>&) {}

    T* allocate(size_t count) {
        constexpr size_t HUGE_PAGE = 1 << 21, LARGE = 1 << 16;
        size_t size = count * sizeof(T);
        void* data = nullptr;
#if defined(__SANITIZE_ADDRESS__)
        if (posix_memalign(&data, 64, size)) std::abort();
#else
        const bool is_large = size >= LARGE;
        if (is_large) size = (size + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
        if (posix_memalign(&data, is_large ? HUGE_PAGE : 64, size)) std::abort();
        if (is_large) madvise(data, size, MADV_HUGEPAGE);
#endif
        return static_cast<T*>(data);
    }
    void deallocate(T* data, size_t) { std::free(data); }
    bool operator==(const InHugePages&) const { return true; }
};

template <typename T>
using Numbers = std::vector<T, InHugePages<T>>;
using Floats = Numbers<float>;
using Bytes = Numbers<uint8_t>;

inline Floats normals(size_t count, unsigned seed, float scale = 1) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    Floats x(count);
    for (float& v : x) v = scale * normal(random);
    return x;
}

// ---------------------------------------------------------------------------------------------------------- timing

inline double now_s() {  // of this thread's processor time: others may share the machine
    timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

inline double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

template <typename F>
double run_s(F&& work, int repeat = 1) {
    const double begin = now_s();
    for (int i = 0; i < repeat; ++i) work();
    return (now_s() - begin) / repeat;
}

// Seconds of one call, the median of `runs` runs of at least 2 ms each.
template <typename F>
double median_s(F&& work, int runs = 9) {
    const int repeat = std::max(1, (int)(0.002 / (run_s(work) + 1e-9)));
    std::vector<double> times;
    for (int i = 0; i < runs; ++i) times.push_back(run_s(work, repeat));
    return median(times);
}

}  // namespace headrace
