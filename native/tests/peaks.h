// What this machine can do, measured in the same run as the kernels: one thread's read bandwidth and fma peak.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ctime>

#include <immintrin.h>
#include <sys/mman.h>

namespace {

struct Bytes {  // huge pages, like the executor's memory
    explicit Bytes(size_t size) : size_((size + 4095) / 4096 * 4096), data_(static_cast<uint8_t*>(std::aligned_alloc(1 << 21, (size_ + (1 << 21) - 1) >> 21 << 21))) {
        madvise(data_, size_, MADV_HUGEPAGE);
    }
    ~Bytes() { std::free(data_); }
    Bytes(const Bytes&) = delete;
    uint8_t* data() { return data_; }
    void fill(bool is_f16) {  // small numbers
        for (size_t i = 0; i + 4 <= size_; i += 4) {
            const uint32_t bits = (uint32_t)(i * 2654435761u);
            uint32_t value = is_f16 ? (0x30003000u | (bits & 0x83ff83ffu)) : (0x3e000000u | (bits & 0x807fffffu));
            std::memcpy(data_ + i, &value, 4);
        }
    }
    size_t size() const { return size_; }

private:
    size_t size_;
    uint8_t* data_;
};

inline double now() {  // seconds of this thread's processor time: others may share the machine
    timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

__attribute__((target("avx2"))) inline double read_bandwidth(size_t size) {
    Bytes bytes(size);
    std::memset(bytes.data(), 1, bytes.size());
    double rates[5];
    for (double& rate : rates) {
        const double begin = now();
        __m256i sums[8] = {};
        const int repeats = size < ((size_t)100 << 20) ? 8 : 1;
        for (int repeat = 0; repeat < repeats; ++repeat)
            for (size_t i = 0; i + 256 <= bytes.size(); i += 256)
                for (int j = 0; j < 8; ++j)
                    sums[j] = _mm256_add_epi32(sums[j], _mm256_load_si256((const __m256i*)(bytes.data() + i + 32 * j)));
        for (int j = 1; j < 8; ++j) sums[0] = _mm256_add_epi32(sums[0], sums[j]);
        volatile int keep = _mm256_extract_epi32(sums[0], 0);
        (void)keep;
        rate = (double)bytes.size() * repeats / (now() - begin) / 1e9;
    }
    std::sort(rates, rates + 5);
    return rates[2];  // the kernels' times are medians too
}

__attribute__((target("avx2,fma"))) inline double peak_gflops_avx2() {
    double best = 0;
    for (int run = 0; run < 5; ++run) {
        __m256 a = _mm256_set1_ps(1.0001f), b = _mm256_set1_ps(0.5f), s[12];
        for (int j = 0; j < 12; ++j) s[j] = _mm256_set1_ps((float)j);  // all different, or the compiler keeps one
        const double begin = now();
        const int count = 2000000;
        for (int i = 0; i < count; ++i)
#pragma GCC unroll 12
            for (int j = 0; j < 12; ++j) s[j] = _mm256_fmadd_ps(s[j], b, a);
        const double rate = 12.0 * 16 * count / (now() - begin) / 1e9;
        for (int j = 1; j < 12; ++j) s[0] = _mm256_add_ps(s[0], s[j]);
        volatile float keep = _mm256_cvtss_f32(s[0]);
        (void)keep;
        if (rate > best) best = rate;
    }
    return best;
}

__attribute__((target("avx512f"))) inline double peak_gflops_avx512() {
    double best = 0;
    for (int run = 0; run < 5; ++run) {
        __m512 a = _mm512_set1_ps(1.0001f), b = _mm512_set1_ps(0.5f), s[16];
        for (int j = 0; j < 16; ++j) s[j] = _mm512_set1_ps((float)j);
        const double begin = now();
        const int count = 2000000;
        for (int i = 0; i < count; ++i)
#pragma GCC unroll 16
            for (int j = 0; j < 16; ++j) s[j] = _mm512_fmadd_ps(s[j], b, a);
        const double rate = 16.0 * 32 * count / (now() - begin) / 1e9;
        for (int j = 1; j < 16; ++j) s[0] = _mm512_add_ps(s[0], s[j]);
        volatile float keep = _mm512_cvtss_f32(s[0]);
        (void)keep;
        if (rate > best) best = rate;
    }
    return best;
}

}  // namespace
