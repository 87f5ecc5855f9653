// What this machine can do, measured in the same run as the kernels: one thread's reading of memory, and loops over
// registers only. The loops are written out in assembly: compilers keep such arrays in memory, and the tests are
// compiled for no instruction set in particular.
#pragma once

#include "common.h"

namespace headrace {

// Each runs `count` times and returns the operations (2 per multiply-add) it did.
struct PeakLoops {
    double (*four_bits)(long count);
    double (*eight_bits)(long count);
    double (*floats)(long count);
};

#if defined(__x86_64__)

#define CLOBBERS                                                                                               \
    "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", \
        "xmm13", "xmm14", "xmm15"

// vpdpbusd alone: ten sums cover its latency of five cycles, two a cycle.
inline double loop_ints_avx512(long count) {
    for (long i = 0; i < count; ++i)
        asm volatile(".irp r,0,1,2,3,4,5,6,7,8,9\n vpdpbusd %%zmm10, %%zmm11, %%zmm\\r\n .endr" ::: CLOBBERS);
    asm volatile("vzeroupper" ::: CLOBBERS);
    return 10.0 * 128 * (double)count;
}

inline double loop_floats_avx512(long count) {
    asm volatile(".irp r,0,1,2,3,4,5,6,7,8,9,10\n vxorps %%xmm\\r, %%xmm\\r, %%xmm\\r\n .endr" ::: CLOBBERS);
    for (long i = 0; i < count; ++i)
        asm volatile(".irp r,0,1,2,3,4,5,6,7,8,9\n vfmadd231ps %%zmm10, %%zmm10, %%zmm\\r\n .endr" ::: CLOBBERS);
    asm volatile("vzeroupper" ::: CLOBBERS);
    return 10.0 * 32 * (double)count;
}

// Eight maddubs summed in int16, a madd, an add; four sums in flight.
inline double loop_four_bits_avx2(long count) {
    for (long i = 0; i < count; ++i)
        asm volatile(
            ".irp r,0,1,2,3\n vpmaddubsw %%ymm14, %%ymm15, %%ymm\\r\n .endr\n"
            ".rept 7\n"
            ".irp r,0,1,2,3\n vpmaddubsw %%ymm14, %%ymm15, %%ymm12\n vpaddw %%ymm12, %%ymm\\r, %%ymm\\r\n .endr\n"
            ".endr\n"
            ".irp r,0,1,2,3\n vpmaddwd %%ymm13, %%ymm\\r, %%ymm12\n vpaddd %%ymm12, %%ymm8, %%ymm8\n .endr" ::: CLOBBERS);
    asm volatile("vzeroupper" ::: CLOBBERS);
    return 4.0 * 8 * 64 * (double)count;
}

inline double loop_eight_bits_avx2(long count) { return loop_four_bits_avx2(count) / 2; }  // the same over two nibbles

inline double loop_floats_avx2(long count) {
    asm volatile(".irp r,0,1,2,3,4,5,6,7,8,9,10\n vxorps %%xmm\\r, %%xmm\\r, %%xmm\\r\n .endr" ::: CLOBBERS);
    for (long i = 0; i < count; ++i)
        asm volatile(".irp r,0,1,2,3,4,5,6,7,8,9\n vfmadd231ps %%ymm10, %%ymm10, %%ymm\\r\n .endr" ::: CLOBBERS);
    asm volatile("vzeroupper" ::: CLOBBERS);
    return 10.0 * 16 * (double)count;
}

#undef CLOBBERS

inline PeakLoops peak_loops(const Kernels& kernels) {  // of one of fast_kernels()
    if (&kernels == avx512_kernels()) return {loop_ints_avx512, loop_ints_avx512, loop_floats_avx512};
    return {loop_four_bits_avx2, loop_eight_bits_avx2, loop_floats_avx2};
}

#else

inline PeakLoops peak_loops(const Kernels&) { std::abort(); }  // fast_kernels() is empty

#endif

inline double peak_gops(double (*loop)(long count)) {
    return loop(100000) / median_s([&] { loop(100000); }) / 1e9;
}

// By whole words of 16 bytes, two a cycle: more than any memory gives one thread.
inline double read_gbs(size_t size) {
    const Bytes bytes(size, 1);
    const uint64_t* const words = (const uint64_t*)bytes.data();
    volatile uint64_t sink = 0;
    return (double)size / 1e9 / median_s([&] {
        uint64_t sums[8] = {};
        for (size_t i = 0; i + 8 <= size / 8; i += 8)
            for (int j = 0; j < 8; ++j) sums[j] += words[i + j];
        for (int j = 1; j < 8; ++j) sums[0] += sums[j];
        sink = sums[0];
    });
}

// One thread's. `far` is beyond the caches, `near` within the last one.
struct Peaks {
    double far_gbs, near_gbs, four_bits, eight_bits, floats;
};

inline Peaks measure_peaks(const Kernels& kernels) {
    const PeakLoops loops = peak_loops(kernels);
    const Peaks peaks{read_gbs((size_t)512 << 20), read_gbs((size_t)24 << 20), peak_gops(loops.four_bits),
                      peak_gops(loops.eight_bits), peak_gops(loops.floats)};
    std::printf("%s, one thread's peaks: reads %.1f GB/s of 512 MiB, %.1f of 24 MiB; 4-bit %.0f GOPS, 8-bit %.0f GOPS, "
                "float %.0f GFLOPS\n", kernels.name, peaks.far_gbs, peaks.near_gbs, peaks.four_bits, peaks.eight_bits,
                peaks.floats);
    return peaks;
}

}  // namespace headrace
