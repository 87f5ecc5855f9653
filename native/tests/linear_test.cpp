// Checks and times the linear kernels of every instruction set, without the rest of the extension.
//
//   cd native && F="-O3 -std=c++20 -ffp-contract=off -Wall -Wextra" && T=/tmp/linear_test && mkdir -p $T
//   g++ $F -c -DHEADRACE_ISA=scalar tests/linear_test.cpp -o $T/scalar.o
//   g++ $F -c -DHEADRACE_ISA=avx2 -DHEADRACE_AVX2 -mavx2 -mfma -mf16c tests/linear_test.cpp -o $T/avx2.o
//   g++ $F -c -DHEADRACE_ISA=avx512 -DHEADRACE_AVX512 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mfma
//       -mf16c tests/linear_test.cpp -o $T/avx512.o
//   g++ $F tests/linear_test.cpp $T/scalar.o $T/avx2.o $T/avx512.o -o $T/linear_test
//   $T/linear_test                                   checks; with F="... -fsanitize=address,undefined" as well
//   $T/linear_test --time [isa] [format] [rows]      timings against peaks of the same run
//
// This file is compiled four times: with HEADRACE_ISA it is one instruction set's table, without it the program.
#include "../kernels.h"

namespace linear_test {

// A loop over registers only; runs `count` times and returns the operations (2 per multiply-add) it did.
struct Peaks {
    double (*four_bits)(long count);
    double (*eight_bits)(long count);
    double (*floats)(long count);
};

}  // namespace linear_test

#if defined(HEADRACE_ISA)
// ------------------------------------------------------------------------------------------------ an instruction set
#include "../linear_float.h"
#include "../linear_quantized.h"

namespace linear_test {
namespace isa = headrace::HEADRACE_ISA;

// Loops over registers only, written out because compilers keep such arrays in memory.
#define CLOBBERS                                                                                          \
    "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", \
        "xmm13", "xmm14", "xmm15"
#if defined(HEADRACE_AVX512)
static double peak_ints(long count) {  // vpdpbusd alone: ten sums cover its latency of five cycles, two a cycle
    for (long i = 0; i < count; ++i)
        asm volatile(".irp r,0,1,2,3,4,5,6,7,8,9\n vpdpbusd %%zmm10, %%zmm11, %%zmm\\r\n .endr" ::: CLOBBERS);
    return 10.0 * 128 * (double)count;
}
static double peak_floats(long count) {
    asm volatile("vpxord %%zmm10, %%zmm10, %%zmm10" ::: CLOBBERS);
    for (long i = 0; i < count; ++i)
        asm volatile(".irp r,0,1,2,3,4,5,6,7,8,9\n vfmadd231ps %%zmm10, %%zmm10, %%zmm\\r\n .endr" ::: CLOBBERS);
    return 10.0 * 32 * (double)count;
}
#elif defined(HEADRACE_AVX2)
// Eight maddubs summed in int16, a madd, an add; four sums in flight.
static double peak_four(long count) {
    for (long i = 0; i < count; ++i)
        asm volatile(
            ".irp r,0,1,2,3\n vpmaddubsw %%ymm14, %%ymm15, %%ymm\\r\n .endr\n"
            ".rept 7\n"
            ".irp r,0,1,2,3\n vpmaddubsw %%ymm14, %%ymm15, %%ymm12\n vpaddw %%ymm12, %%ymm\\r, %%ymm\\r\n .endr\n"
            ".endr\n"
            ".irp r,0,1,2,3\n vpmaddwd %%ymm13, %%ymm\\r, %%ymm12\n vpaddd %%ymm12, %%ymm8, %%ymm8\n .endr"
            ::: CLOBBERS);
    return 4.0 * 8 * 64 * (double)count;
}
static double peak_eight(long count) { return peak_four(count) / 2; }  // the same over two nibbles
static double peak_floats(long count) {
    asm volatile("vpxor %%xmm10, %%xmm10, %%xmm10" ::: CLOBBERS);
    for (long i = 0; i < count; ++i)
        asm volatile(".irp r,0,1,2,3,4,5,6,7,8,9\n vfmadd231ps %%ymm10, %%ymm10, %%ymm\\r\n .endr" ::: CLOBBERS);
    return 10.0 * 16 * (double)count;
}
#endif

#define PASTE(a, b) a##b
#define NAMED(isa, what) PASTE(isa, what)
#define TEXT(a) #a
#define NAME(a) TEXT(a)

const headrace::Kernels& NAMED(HEADRACE_ISA, _table)() {
    static const headrace::Kernels table = [] {
        headrace::Kernels k{};
        k.name = NAME(HEADRACE_ISA);
        k.strip_bytes = isa::strip_bytes;
        k.pack = isa::pack;
        k.unpack_row = isa::unpack_row;
        k.quantize = isa::quantize;
        k.linear_quantized = isa::linear_quantized;
        k.linear_float = isa::linear_float;
        return k;
    }();
    return table;
}

Peaks NAMED(HEADRACE_ISA, _peaks)() {
#if defined(HEADRACE_AVX512)
    return {peak_ints, peak_ints, peak_floats};
#elif defined(HEADRACE_AVX2)
    return {peak_four, peak_eight, peak_floats};
#else
    return {nullptr, nullptr, nullptr};
#endif
}

}  // namespace linear_test

#else
// ------------------------------------------------------------------------------------------------------- the program
#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

using namespace headrace;

namespace linear_test {

const Kernels& scalar_table();
const Kernels& avx2_table();
const Kernels& avx512_table();
Peaks avx2_peaks();
Peaks avx512_peaks();

struct FormatCase {
    const char* name;
    Packing packing;
    int block, block_bytes;
};

const FormatCase FORMATS[] = {
    {"F32", Packing::F32, 1, 4},       {"F16", Packing::F16, 1, 2},       {"BF16", Packing::BF16, 1, 2},
    {"Q4_0", Packing::Q4_0, 32, 18},   {"Q4_1", Packing::Q4_1, 32, 20},   {"Q5_0", Packing::Q5_0, 32, 22},
    {"Q5_1", Packing::Q5_1, 32, 24},   {"Q8_0", Packing::Q8_0, 32, 34},   {"Q4_K", Packing::Q4_K, 256, 144},
    {"Q5_K", Packing::Q5_K, 256, 176}, {"Q6_K", Packing::Q6_K, 256, 210},
};

std::mt19937 random_bits(1);

// 64-byte aligned bytes.
struct Buffer {
    uint8_t* data;
    size_t size;
    explicit Buffer(size_t n) : data((uint8_t*)aligned_alloc(64, (n + 63) / 64 * 64 + 64)), size(n) {}
    Buffer(const Buffer&) = delete;
    ~Buffer() { free(data); }
};

// --- the file's formats, decoded plainly -----------------------------------------------------------------------------

float half(const uint8_t* p) {
    const int bits = p[0] | p[1] << 8, e = bits >> 10 & 31, m = bits & 1023;
    const double size = e ? std::ldexp(1024 + m, e - 25) : std::ldexp(m, -24);
    return (float)(bits & 0x8000 ? -size : size);
}
void put_half(uint8_t* p, double value) {  // positive, normal, truncated
    int e;
    const double m = std::frexp(value, &e);
    const int bits = (e + 14) << 10 | ((int)(m * 2048) & 1023);
    p[0] = (uint8_t)bits;
    p[1] = (uint8_t)(bits >> 8);
}

// One block of `format`.
void decode(const FormatCase& format, const uint8_t* b, float* w) {
    switch (format.packing) {
        case Packing::F32: memcpy(w, b, 4); return;
        case Packing::F16: w[0] = half(b); return;
        case Packing::BF16: {
            const uint32_t bits = (uint32_t)(b[0] | b[1] << 8) << 16;
            memcpy(w, &bits, 4);
            return;
        }
        case Packing::Q4_0:
            for (int j = 0; j < 32; ++j) w[j] = half(b) * (float)((j < 16 ? b[2 + j] & 15 : b[2 + j - 16] >> 4) - 8);
            return;
        case Packing::Q4_1:
            for (int j = 0; j < 32; ++j) {
                const float product = half(b) * (float)(j < 16 ? b[4 + j] & 15 : b[4 + j - 16] >> 4);
                w[j] = product + half(b + 2);
            }
            return;
        case Packing::Q5_0:
        case Packing::Q5_1: {
            const bool has_minimum = format.packing == Packing::Q5_1;
            const uint8_t *high = b + (has_minimum ? 4 : 2), *low = high + 4;
            for (int j = 0; j < 32; ++j) {
                const int q = (j < 16 ? low[j] & 15 : low[j - 16] >> 4) + 16 * (high[j / 8] >> (j % 8) & 1);
                const float product = half(b) * (float)(has_minimum ? q : q - 16);
                w[j] = has_minimum ? product + half(b + 2) : product;
            }
            return;
        }
        case Packing::Q8_0:
            for (int j = 0; j < 32; ++j) w[j] = half(b) * (float)(int8_t)b[2 + j];
            return;
        case Packing::Q4_K:
        case Packing::Q5_K:
            for (int g = 0; g < 8; ++g) {
                const uint8_t* st = b + 4;
                const int i = g % 4;
                const int s = g < 4 ? st[i] & 63 : (st[8 + i] & 15) + 16 * (st[i] >> 6);
                const int t = g < 4 ? st[4 + i] & 63 : (st[8 + i] >> 4) + 16 * (st[4 + i] >> 6);
                const float scale = half(b) * (float)s, minimum = half(b + 2) * (float)t;
                const uint8_t* qs = b + (format.packing == Packing::Q5_K ? 48 : 16);
                for (int j = 0; j < 32; ++j) {
                    int q = g % 2 ? qs[g / 2 * 32 + j] >> 4 : qs[g / 2 * 32 + j] & 15;
                    if (format.packing == Packing::Q5_K) q += 16 * (b[16 + j] >> g & 1);
                    const float product = scale * (float)q;
                    w[32 * g + j] = product - minimum;
                }
            }
            return;
        case Packing::Q6_K:
            for (int h = 0; h < 2; ++h)
                for (int j = 0; j < 32; ++j) {
                    const uint8_t *ql = b + 64 * h, *qh = b + 128 + 32 * h;
                    const int q[4] = {(ql[j] & 15) + 16 * (qh[j] & 3), (ql[j + 32] & 15) + 16 * (qh[j] >> 2 & 3),
                                      (ql[j] >> 4) + 16 * (qh[j] >> 4 & 3), (ql[j + 32] >> 4) + 16 * (qh[j] >> 6 & 3)};
                    for (int r = 0; r < 4; ++r) {
                        const int k = 128 * h + 32 * r + j;
                        w[k] = half(b + 208) * (float)(int8_t)b[192 + k / 16] * (float)(q[r] - 32);
                    }
                }
            return;
    }
}

// Random bytes, with scales of a model's size.
std::vector<uint8_t> random_weights(const FormatCase& format, int rows, int width) {
    const size_t blocks = (size_t)rows * (width / format.block);
    std::vector<uint8_t> bytes(blocks * format.block_bytes);
    for (size_t i = 0; i + 4 <= bytes.size(); i += 4) {
        const uint32_t r = random_bits();
        memcpy(&bytes[i], &r, 4);
    }
    std::uniform_real_distribution<double> size(0.001, 0.1), number(-1, 1);
    for (size_t i = 0; i < blocks; ++i) {
        uint8_t* b = &bytes[i * format.block_bytes];
        if (format.packing == Packing::F32 || format.packing == Packing::BF16) {
            const float f = (float)number(random_bits);
            uint8_t raw[4];
            memcpy(raw, &f, 4);
            memcpy(b, format.block_bytes == 4 ? raw : raw + 2, format.block_bytes);
        } else if (format.packing == Packing::F16) {
            put_half(b, size(random_bits));
            b[1] |= random_bits() & 0x80;
        } else {
            uint8_t* d = format.packing == Packing::Q6_K ? b + 208 : b;
            put_half(d, size(random_bits) / (format.block == 256 ? 30 : 1));
            if (format.packing == Packing::Q4_1 || format.packing == Packing::Q5_1 || format.packing == Packing::Q4_K ||
                format.packing == Packing::Q5_K) {
                put_half(d + 2, size(random_bits) / (format.block == 256 ? 30 : 1));
                d[3] |= random_bits() & 0x80;
            }
        }
    }
    return bytes;
}

struct Matrix {
    PackedMatrix packed;
    Buffer buffer;
    Matrix(const Kernels& k, const FormatCase& format, const std::vector<uint8_t>& stored, int rows, int width)
        : packed{format.packing, rows, width, nullptr},
          buffer((size_t)packed.num_strips() * k.strip_bytes(format.packing, width)) {
        packed.data = buffer.data;
        const size_t row_bytes = stored.size() / rows;
        const int middle = packed.num_strips() / 2;
        k.pack(packed, buffer.data, stored.data(), row_bytes, middle, packed.num_strips());
        k.pack(packed, buffer.data, stored.data(), row_bytes, 0, middle);
    }
};

struct Rows {
    std::vector<int8_t> q;
    std::vector<float> scale, scaled_sum;
    std::vector<int32_t> sums;
    QuantizedRows view;
    Rows(const Kernels& k, const std::vector<float>& x, int rows, int width)
        : q((size_t)rows * width), scale(q.size() / 32), scaled_sum(q.size() / 32), sums(q.size() / 16),
          view{width, q.data(), scale.data(), scaled_sum.data(), sums.data()} {
        for (int r = 0; r < rows; ++r) k.quantize(&x[(size_t)r * width], r, view);
    }
};

long failures = 0, checks = 0;
void check(bool ok, const char* what, const char* isa, const char* format, int rows, int width, int num) {
    ++checks;
    if (ok) return;
    if (++failures <= 20)
        printf("FAILED %s: %s %s rows %d width %d num_rows %d\n", what, isa, format, rows, width, num);
}

// --- checks ----------------------------------------------------------------------------------------------------------

std::vector<const Kernels*> tables() {
    std::vector<const Kernels*> all{&scalar_table()};
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) all.push_back(&avx2_table());
    if (__builtin_cpu_supports("avx512vnni")) all.push_back(&avx512_table());
    return all;
}

std::vector<float> random_rows(int rows, int width) {
    std::normal_distribution<float> normal(0, 1);
    std::vector<float> x((size_t)rows * width);
    for (auto& v : x) v = normal(random_bits) * (random_bits() % 97 == 0 ? 20.0f : 1.0f);
    for (int r = 0; r < rows; ++r)
        if (width >= 64 && r % 3 == 1) std::fill_n(&x[(size_t)r * width + 32], 32, 0.0f);  // a group of zeros
    return x;
}

void check_quantize() {
    const int width = 4096;
    std::vector<float> x = random_rows(3, width);
    for (int j = 0; j < 32; ++j) x[j] = 1e-30f * (float)j;                               // too small: zeros
    for (int j = 0; j < 32; ++j) x[64 + j] = ((float)j - 16) * 0.5f;                     // ties
    for (int j = 0; j < 32; ++j) x[128 + j] = j == 5 ? 127.0f : (float)j + 0.5f;         // exact ties to even
    for (const Kernels* k : tables()) {
        Rows rows(*k, x, 3, width);
        for (int g = 0; g < 3 * width / 32; ++g) {
            float amax = 0;
            for (int j = 0; j < 32; ++j) amax = std::max(amax, std::fabs(x[g * 32 + j]));
            const float scale = amax < 0x1p-80f ? 0 : amax / 127, inverse = scale > 0 ? 1 / scale : 0;
            int sum = 0, second = 0;
            bool same = rows.scale[g] == scale;
            for (int j = 0; j < 32; ++j) {
                const int q = (int)std::nearbyint(x[g * 32 + j] * inverse);
                same &= rows.q[g * 32 + j] == q;
                sum += q;
                second += j < 16 ? 0 : q;
            }
            same &= rows.scaled_sum[g] == scale * (float)sum && rows.sums[2 * g] == -128 * sum &&
                    rows.sums[2 * g + 1] == -128 * second;
            check(same, "quantize", k->name, "", g, width, 3);
        }
        std::vector<float> bad(64, 1.0f);
        for (float value : {NAN, INFINITY, -INFINITY})
            for (int at : {0, 15, 16, 31}) {
                std::vector<float> y = bad;
                y[at] = value;
                Rows broken(*k, y, 1, 64);
                check(std::isnan(broken.scale[0]) && broken.scale[1] == 1.0f / 127, "not finite", k->name, "", at, 64,
                      1);
            }
    }
}

void check_format(const FormatCase& format, const std::vector<int>& all_rows, const std::vector<int>& widths,
                  const std::vector<int>& counts) {
    const bool quantized = format.block > 1;
    for (int rows : all_rows)
        for (int width : widths) {
            if (width % (quantized ? std::max(32, format.block) : 1)) continue;
            const std::vector<uint8_t> stored = random_weights(format, rows, width);
            std::vector<float> w((size_t)rows * width);
            for (size_t b = 0; b < w.size() / format.block; ++b)
                decode(format, &stored[b * format.block_bytes], &w[b * format.block]);
            const int most = *std::max_element(counts.begin(), counts.end());
            const std::vector<float> x = random_rows(most, width);
            const int stride = rows + 3;
            std::vector<float> bias(rows), before((size_t)most * stride), expected;
            for (auto& v : bias) v = (float)(random_bits() % 100) / 10;
            for (auto& v : before) v = (float)(random_bits() % 100) / 10;
            for (const Kernels* k : tables()) {
                Matrix m(*k, format, stored, rows, width);
                std::vector<float> row(width);
                for (int r = 0; r < rows; ++r) {
                    k->unpack_row(m.packed, r, row.data());
                    check(!memcmp(row.data(), &w[(size_t)r * width], width * 4), "unpack", k->name, format.name, rows,
                          width, r);
                }
                Rows quants(*k, x, most, quantized ? width : 0);
                auto run = [&](int first, int last, int from, int num, float* out, Epilogue epilogue) {
                    QuantizedRows part = quants.view;
                    if (quantized) {
                        part.q += (size_t)from * width;
                        part.scale += (size_t)from * width / 32;
                        part.scaled_sum += (size_t)from * width / 32;
                        part.sums += (size_t)from * width / 16;
                        k->linear_quantized(m.packed, first, last, part, num, out + (size_t)from * stride, stride,
                                            epilogue);
                    } else {
                        k->linear_float(m.packed, first, last, &x[(size_t)from * width], width, num,
                                        out + (size_t)from * stride, stride, epilogue);
                    }
                };
                const int strips = m.packed.num_strips();
                std::vector<float> whole = before;
                run(0, strips, 0, most, whole.data(), {nullptr, false});
                if (expected.empty()) {  // against doubles
                    expected = whole;
                    for (int r = 0; r < most; ++r)
                        for (int i = 0; i < stride; ++i) {
                            if (i >= rows) {
                                check(whole[r * stride + i] == before[r * stride + i], "beyond", k->name, format.name,
                                      rows, width, r);
                                continue;
                            }
                            double sum = 0, size = 0;
                            for (int c = 0; c < width; ++c) {
                                const size_t at = (size_t)r * width + c;
                                const double a = quantized ? (double)quants.q[at] * quants.scale[at / 32] : x[at];
                                const double product = a * w[(size_t)i * width + c];
                                sum += product;
                                size += std::fabs(product);
                            }
                            check(std::fabs(whole[r * stride + i] - sum) <= 1e-5 * size + 1e-30, "product", k->name,
                                  format.name, rows, width, r);
                        }
                }
                check(!memcmp(whole.data(), expected.data(), whole.size() * 4), "same bits", k->name, format.name, rows,
                      width, most);
                for (int num : counts) {
                    std::vector<float> out = before;
                    for (int from = 0; from < most; from += num)
                        run(0, strips, from, std::min(num, most - from), out.data(), {nullptr, false});
                    check(!memcmp(out.data(), expected.data(), out.size() * 4), "split of rows", k->name, format.name,
                          rows, width, num);
                }
                std::vector<float> out = before;
                for (int s = 0; s < strips;) {
                    const int next = std::min(strips, s + 1 + (int)(random_bits() % 3));
                    run(s, next, 0, most, out.data(), {nullptr, false});
                    s = next;
                }
                check(!memcmp(out.data(), expected.data(), out.size() * 4), "split of strips", k->name, format.name, rows,
                      width, most);
                for (int kind = 1; kind < 4; ++kind) {
                    out = before;
                    run(0, strips, 0, most, out.data(), {kind & 1 ? bias.data() : nullptr, kind > 1});
                    bool same = true;
                    for (int r = 0; r < most; ++r)
                        for (int i = 0; i < rows; ++i) {
                            float want = expected[r * stride + i];
                            if (kind & 1) want += bias[i];
                            if (kind > 1) want += before[r * stride + i];
                            same &= want == out[r * stride + i];
                        }
                    check(same, "epilogue", k->name, format.name, rows, width, kind);
                }
            }
        }
}

// --- timing ----------------------------------------------------------------------------------------------------------

double thread_s() {  // of this thread: others on the core do not count, except through caches and memory
    timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

template <class Call>
double run_s(Call call, int repeat) {
    const double start = thread_s();
    for (int i = 0; i < repeat; ++i) call();
    return (thread_s() - start) / repeat;
}

// Seconds of one call: median of short runs.
template <class Call>
double median_s(Call call) {
    call();
    const int repeat = std::max(1, (int)(0.003 / (run_s(call, 1) + 1e-9)));
    std::vector<double> runs;
    for (int i = 0; i < 15; ++i) runs.push_back(run_s(call, repeat));
    return median(runs);
}

// A kernel beside its peak: each short run of one follows a run of the other, because neighbours on the machine change
// the speed of a core by a factor of two. Medians of the kernel's seconds and of its share of the peak.
struct Timing {
    double s, share;
};
template <class Call>
Timing timed(Call call, double ops, double (*loop)(long)) {
    call();
    const int repeat = std::max(1, (int)(0.002 / (run_s(call, 1) + 1e-9)));
    std::vector<double> runs, shares;
    for (int i = 0; i < 21; ++i) {
        double peak_ops = 0;
        const double before = run_s([&] { peak_ops = loop(20000); }, 1), s = run_s(call, repeat),
                     after = run_s([&] { loop(20000); }, 1);
        runs.push_back(s);
        shares.push_back(ops / s / (2 * peak_ops / (before + after)));
    }
    return {median(runs), median(shares)};
}

double read_gbs(const Buffer& buffer) {
    volatile uint64_t sink = 0;
    return (double)buffer.size / 1e9 / median_s([&] {
        uint64_t sum[8] = {};
        const uint64_t* p = (const uint64_t*)buffer.data;
        for (size_t i = 0; i + 8 <= buffer.size / 8; i += 8)
            for (int j = 0; j < 8; ++j) sum[j] += p[i + j];
        sink = sum[0] + sum[1] + sum[2] + sum[3] + sum[4] + sum[5] + sum[6] + sum[7];
    });
}

void time_all(const std::string& only_isa, const std::string& only_format, int only_rows) {
    struct Shape {
        int rows, width;
    };
    Buffer large((size_t)512 << 20);
    memset(large.data, 1, large.size);
    printf("read of 512 MiB, one thread: %.1f GB/s\n", read_gbs(large));
    for (const Kernels* k : tables()) {
        if (k->name == std::string("scalar") || (only_isa.size() && only_isa != k->name)) continue;
        const Peaks peaks = k->name == std::string("avx2") ? avx2_peaks() : avx512_peaks();
        auto peak = [&](double (*loop)(long)) {
            double ops = 0;
            const double s = median_s([&] { ops = loop(100000); });
            return ops / s / 1e9;
        };
        const double four = peak(peaks.four_bits), eight = peak(peaks.eight_bits), floats = peak(peaks.floats);
        printf("%s peaks of one thread: 4-bit %.0f GOPS, 8-bit %.0f GOPS, float %.0f GFLOPS\n", k->name, four, eight,
               floats);
        for (const FormatCase& format : FORMATS) {
            if (only_format.size() && only_format != format.name) continue;
            std::vector<Shape> shapes{{576, 1536}, {1536, 576}, {2048, 640}};
            if (format.block == 256) shapes = {{640, 2048}, {640, 1024}};
            if (format.packing == Packing::Q8_0) shapes.push_back({49152, 576});
            if (format.packing == Packing::F16) shapes.push_back({49152, 576});
            if (format.packing == Packing::Q4_1) shapes.push_back({49152, 1536});  // larger than the caches
            for (const Shape& shape : shapes) {
                const int rows = shape.rows, width = shape.width;
                Matrix m(*k, format, random_weights(format, rows, width), rows, width);
                printf("%-6s %-5s %5d x %4d  ", k->name, format.name, rows, width);
                for (int num : {1, 2, 4, 8, 16, 64, 256}) {
                    if (only_rows && num != only_rows) continue;
                    if ((double)rows * width * num > 3e9) continue;
                    const std::vector<float> x = random_rows(num, width);
                    Rows quants(*k, x, num, format.block > 1 ? width : 0);
                    std::vector<float> out((size_t)num * rows);
                    const double ops = 2.0 * rows * width * num;
                    const int strips = m.packed.num_strips();
                    auto product = [&] {
                        if (format.block > 1)
                            k->linear_quantized(m.packed, 0, strips, quants.view, num, out.data(), rows, {});
                        else
                            k->linear_float(m.packed, 0, strips, x.data(), width, num, out.data(), rows, {});
                    };
                    const Timing t = timed(product, ops,
                                           format.block == 1                 ? peaks.floats
                                           : format.packing == Packing::Q8_0 ? peaks.eight_bits
                                                                             : peaks.four_bits);
                    printf("| %d: %.0f (%.0f%%)", num, ops / t.s / 1e9, 100 * t.share);
                    if (num == 1) printf(" %.1f GB/s", (double)m.buffer.size / t.s / 1e9);
                    fflush(stdout);
                }
                printf("\n");
            }
        }
        const std::vector<float> x = random_rows(1, 1536);
        Rows quants(*k, x, 1, 1536);
        const double s = median_s([&] { k->quantize(x.data(), 0, quants.view); });
        printf("%-6s quantize: %.2f ns per group of 32\n", k->name, s / 48 * 1e9);
    }
}

}  // namespace linear_test

int main(int argc, char** argv) {
    using namespace linear_test;
    __builtin_cpu_init();
    if (argc > 1 && !strcmp(argv[1], "--time")) {
        time_all(argc > 2 && strcmp(argv[2], "all") ? argv[2] : "", argc > 3 && strcmp(argv[3], "all") ? argv[3] : "",
                 argc > 4 ? atoi(argv[4]) : 0);
        return 0;
    }
    check_quantize();
    for (const FormatCase& format : FORMATS) {
        check_format(format, {1, 15, 16, 17, 48, 100},
                     {32, 64, 96, 256, 512, 768, 1024, 2048, format.block > 1 ? 1056 : 77}, {1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 33, 64});
        check_format(format, {33}, {256, 1024}, {1, 100, 128, 129, 150});  // more rows than pass at once
        printf("%s: %ld checks, %ld failures\n", format.name, checks, failures);
    }
    return failures != 0;
}
#endif
