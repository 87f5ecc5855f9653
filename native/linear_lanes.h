// What the quantized product is made of, per instruction set: bytes of weights, integer sums, floats.
//
// A register covers WIDTH of a strip's 16 rows. `Sum<BITS>` adds up unsigned weights of BITS bits times int8
// activations over at most a group of 32 inputs, exactly, whatever the instructions; k4 counts its steps of four inputs.
//
//   AVX-512  vpdpbusd: one instruction per 16 rows x 4 inputs, the activations an embedded broadcast
//   AVX2     vpmaddubsw per 8 rows x 4 inputs, sums kept in int16 for 8 steps (4 bits: 8 * 2 * 15 * 127 < 32768),
//            4 (5 bits) or 2 (6 bits), then vpmaddwd by ones. 8 bits are two sums over nibbles, joined by a vpmaddwd
//            by sixteens: 33 instructions per 8 steps, where abs + sign + maddubs + madd + add takes 4 per step.
//
// Weights with an offset (w = q - 2^(BITS - 1)): quantized rows hold -128 * the sum of the activations, which AVX-512
// broadcasts from memory as the first value of its sum. For that it takes its quants shifted up to the top of their
// byte (a choice of masks, no instruction more), so that the offset is 128 in every format, and scales divided by as
// much. Powers of two: the bits are those of the others.
#pragma once

#include "packing.h"

namespace headrace::HEADRACE_ISA {

HR_INLINE int32_t load_dword(const void* p) {
    int32_t x;
    memcpy(&x, p, 4);
    return x;
}

// Counts of `bits_of`, broadcast from memory: from a register they would cost an instruction of those that compute.
constexpr int32_t SHIFTS[32] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31};

// ---------------------------------------------------------------------------------------------------------- AVX-512
#if defined(HEADRACE_AVX512)

constexpr int WIDTH = 16;
constexpr bool SHIFTED_UP = true;
constexpr int MAX_TILE = 8;  // rows of activations: 8 integer and 8 float sums in flight

using F = V;
struct Bytes {
    __m512i v;
};

HR_INLINE Bytes load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
HR_INLINE void store_bytes(uint8_t* p, Bytes a) { _mm512_storeu_si512(p, a.v); }
// Each byte left by N bits (right by -N); bits that cross into another byte are for `mask` to clear.
template <int N>
HR_INLINE Bytes shift(Bytes a) {
    if constexpr (N > 0) return {_mm512_slli_epi16(a.v, N)};
    if constexpr (N < 0) return {_mm512_srli_epi16(a.v, -N)};
    return a;
}
HR_INLINE Bytes mask(Bytes a, int m) { return {_mm512_and_si512(a.v, _mm512_set1_epi8((char)m))}; }
HR_INLINE Bytes join(Bytes a, Bytes b) { return {_mm512_or_si512(a.v, b.v)}; }

// Weights as `step` takes them.
template <int BITS>
struct Operand {
    Bytes all;
};
template <int BITS>
HR_INLINE Operand<BITS> operand(Bytes w) { return {w}; }
template <int BITS>
HR_INLINE void store_operand(uint8_t* p, Operand<BITS> w) { store_bytes(p, w.all); }
template <int BITS>
HR_INLINE Operand<BITS> load_operand(const uint8_t* p) { return {load_bytes(p)}; }

HR_INLINE F floats(const float* p) { return load(p); }
HR_INLINE void keep(float* p, F a) { store(p, a); }
HR_INLINE F same(float x) { return splat(x); }
HR_INLINE F halves(const uint8_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
HR_INLINE F unsigned_bytes(const uint8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
HR_INLINE F signed_bytes(const uint8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}

// Bits of WIDTH words as numbers: (word >> shift) & mask.
HR_INLINE F bits_of(const uint8_t* words, int shift, int mask) {
    const __m512i moved = _mm512_srlv_epi32(_mm512_loadu_si512(words), _mm512_set1_epi32(SHIFTS[shift]));
    return {_mm512_cvtepi32_ps(_mm512_and_si512(moved, _mm512_set1_epi32(mask)))};
}

constexpr float MAGIC = 0x1.8p23f;  // sums are within 2^22
constexpr int32_t MAGIC_BITS = 0x4b400000;
template <int BITS>
struct Sum {
    __m512i v;
};
template <int BITS>
HR_INLINE void begin(Sum<BITS>& sum, int32_t offset) { sum.v = _mm512_set1_epi32(offset + MAGIC_BITS); }
template <int BITS>
HR_INLINE void step(Sum<BITS>& sum, int, const Operand<BITS>& w, const int8_t* q) {
    sum.v = _mm512_dpbusd_epi32(sum.v, w.all.v, _mm512_set1_epi32(load_dword(q)));
}
// sum * scale, rounded once. Sums begin at the bits of MAGIC, so that as floats they are MAGIC + sum, exactly; and MAGIC *
// scale is exact. One fma per row, where converting and multiplying would be two instructions.
template <int BITS>
HR_INLINE F scaled(const Sum<BITS>& sum, int32_t, F scale) {
    return fma(F{_mm512_castsi512_ps(sum.v)}, scale, mul(scale, same(-MAGIC)));
}

// ------------------------------------------------------------------------------------------------------------- AVX2
#elif defined(HEADRACE_AVX2)

constexpr int WIDTH = 8;
constexpr bool SHIFTED_UP = false;
constexpr int MAX_TILE = 4;

struct F {
    __m256 v;
};
struct Bytes {
    __m256i v;
};

HR_INLINE Bytes load_bytes(const uint8_t* p) { return {_mm256_loadu_si256((const __m256i*)p)}; }
HR_INLINE void store_bytes(uint8_t* p, Bytes a) { _mm256_storeu_si256((__m256i*)p, a.v); }
template <int N>
HR_INLINE Bytes shift(Bytes a) {
    if constexpr (N > 0) return {_mm256_slli_epi16(a.v, N)};
    if constexpr (N < 0) return {_mm256_srli_epi16(a.v, -N)};
    return a;
}
HR_INLINE Bytes mask(Bytes a, int m) { return {_mm256_and_si256(a.v, _mm256_set1_epi8((char)m))}; }
HR_INLINE Bytes join(Bytes a, Bytes b) { return {_mm256_or_si256(a.v, b.v)}; }

// Weights as `step` takes them: for 8 bits, nibbles apart.
template <int BITS>
struct Operand {
    Bytes all;
};
template <>
struct Operand<8> {
    Bytes low, high;
};
template <int BITS>
HR_INLINE Operand<BITS> operand(Bytes w) {
    if constexpr (BITS == 8)
        return {mask(w, 15), mask(shift<-4>(w), 15)};
    else
        return {w};
}
template <int BITS>
HR_INLINE void store_operand(uint8_t* p, Operand<BITS> w) {
    if constexpr (BITS == 8) {
        store_bytes(p, w.low);
        store_bytes(p + 32, w.high);
    } else {
        store_bytes(p, w.all);
    }
}
template <int BITS>
HR_INLINE Operand<BITS> load_operand(const uint8_t* p) {
    if constexpr (BITS == 8)
        return {load_bytes(p), load_bytes(p + 32)};
    else
        return {load_bytes(p)};
}

HR_INLINE F floats(const float* p) { return {_mm256_loadu_ps(p)}; }
HR_INLINE void keep(float* p, F a) { _mm256_storeu_ps(p, a.v); }
HR_INLINE F same(float x) { return {_mm256_set1_ps(x)}; }
HR_INLINE F mul(F a, F b) { return {_mm256_mul_ps(a.v, b.v)}; }
HR_INLINE F fma(F a, F b, F c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
HR_INLINE F halves(const uint8_t* p) { return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p))}; }
HR_INLINE F unsigned_bytes(const uint8_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)))};
}
HR_INLINE F signed_bytes(const uint8_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)))};
}

HR_INLINE F bits_of(const uint8_t* words, int shift, int mask) {
    const __m256i moved = _mm256_srlv_epi32(_mm256_loadu_si256((const __m256i*)words), _mm256_set1_epi32(SHIFTS[shift]));
    return {_mm256_cvtepi32_ps(_mm256_and_si256(moved, _mm256_set1_epi32(mask)))};
}

template <int BITS>
struct Sum {
    __m256i words;  // int16, the last steps
    __m256i ints;   // int32, those before
};
template <>
struct Sum<8> {
    __m256i low, high;  // int16: nibbles
};
// a + b, now: compilers reassociate integer sums into trees of products, all of them spilled.
HR_INLINE __m256i add_words(__m256i a, __m256i b) {
    __m256i sum = _mm256_add_epi16(a, b);
    asm("" : "+x"(sum));
    return sum;
}

template <int BITS>
HR_INLINE void begin(Sum<BITS>&, int32_t) {}
template <int BITS>
HR_INLINE void step(Sum<BITS>& sum, int k4, const Operand<BITS>& w, const int8_t* q) {
    const __m256i a = _mm256_set1_epi32(load_dword(q));
    if constexpr (BITS == 8) {
        const __m256i low = _mm256_maddubs_epi16(w.low.v, a);
        const __m256i high = _mm256_maddubs_epi16(w.high.v, a);
        sum.low = k4 ? add_words(sum.low, low) : low;
        sum.high = k4 ? add_words(sum.high, high) : high;
    } else {
        constexpr int DEPTH = BITS == 4 ? 8 : BITS == 5 ? 4 : 2;
        const __m256i product = _mm256_maddubs_epi16(w.all.v, a);
        if (k4 % DEPTH) {
            sum.words = add_words(sum.words, product);
            return;
        }
        if (k4) {
            const __m256i ints = _mm256_madd_epi16(sum.words, _mm256_set1_epi16(1));
            sum.ints = k4 == DEPTH ? ints : _mm256_add_epi32(sum.ints, ints);
        } else {
            sum.ints = _mm256_setzero_si256();
        }
        sum.words = product;
    }
}
template <int BITS>
HR_INLINE F scaled(const Sum<BITS>& sum, int32_t offset, F scale) {
    __m256i ints;
    if constexpr (BITS == 8)
        ints = _mm256_add_epi32(_mm256_madd_epi16(sum.low, _mm256_set1_epi16(1)),
                                _mm256_madd_epi16(sum.high, _mm256_set1_epi16(16)));
    else
        ints = _mm256_madd_epi16(sum.words, _mm256_set1_epi16(1));
    if constexpr (BITS == 5 || BITS == 6) ints = _mm256_add_epi32(ints, sum.ints);
    return mul({_mm256_cvtepi32_ps(_mm256_add_epi32(ints, _mm256_set1_epi32(offset >> (8 - BITS))))}, scale);
}

// ----------------------------------------------------------------------------------------------------------- scalar
#else

constexpr int WIDTH = 16;
constexpr bool SHIFTED_UP = false;
constexpr int MAX_TILE = 1;  // nothing to keep in registers: staging alone shares the unpacking

using F = V;
struct Bytes {
    uint64_t v[8];
};

HR_INLINE Bytes load_bytes(const uint8_t* p) {
    Bytes a;
    memcpy(a.v, p, 64);
    return a;
}
HR_INLINE void store_bytes(uint8_t* p, Bytes a) { memcpy(p, a.v, 64); }
template <int N>
HR_INLINE Bytes shift(Bytes a) {
    for (int i = 0; i < 8; ++i) a.v[i] = N > 0 ? a.v[i] << (N > 0 ? N : 0) : a.v[i] >> (N < 0 ? -N : 0);
    return a;
}
HR_INLINE Bytes mask(Bytes a, int m) {
    for (int i = 0; i < 8; ++i) a.v[i] &= 0x0101010101010101u * (uint64_t)m;
    return a;
}
HR_INLINE Bytes join(Bytes a, Bytes b) {
    for (int i = 0; i < 8; ++i) a.v[i] |= b.v[i];
    return a;
}

// Weights as `step` takes them.
template <int BITS>
struct Operand {
    Bytes all;
};
template <int BITS>
HR_INLINE Operand<BITS> operand(Bytes w) { return {w}; }
template <int BITS>
HR_INLINE void store_operand(uint8_t* p, Operand<BITS> w) { store_bytes(p, w.all); }
template <int BITS>
HR_INLINE Operand<BITS> load_operand(const uint8_t* p) { return {load_bytes(p)}; }

HR_INLINE F floats(const float* p) { return load(p); }
HR_INLINE void keep(float* p, F a) { store(p, a); }
HR_INLINE F same(float x) { return splat(x); }
HR_INLINE F halves(const uint8_t* p) {
    uint16_t bits[LANES];
    memcpy(bits, p, sizeof bits);
    return load_f16(bits);
}
HR_INLINE F unsigned_bytes(const uint8_t* p) { HR_LANES((float)p[i]); }
HR_INLINE F signed_bytes(const uint8_t* p) { HR_LANES((float)(int8_t)p[i]); }

HR_INLINE F bits_of(const uint8_t* words, int shift, int mask) {
    HR_LANES((float)((load_dword(words + 4 * i) >> shift) & mask));
}

template <int BITS>
struct Sum {
    int32_t v[LANES];
};
template <int BITS>
HR_INLINE void begin(Sum<BITS>& sum, int32_t offset) {
    for (int i = 0; i < LANES; ++i) sum.v[i] = offset >> (8 - BITS);
}
template <int BITS>
HR_INLINE void step(Sum<BITS>& sum, int, const Operand<BITS>& w, const int8_t* q) {
    uint8_t bytes[64];
    memcpy(bytes, w.all.v, 64);
    for (int i = 0; i < LANES; ++i)
        for (int c = 0; c < 4; ++c) sum.v[i] += bytes[4 * i + c] * q[c];
}
template <int BITS>
HR_INLINE F scaled(const Sum<BITS>& sum, int32_t, F scale) { return mul(load_i32(sum.v), scale); }

#endif

}  // namespace headrace::HEADRACE_ISA
