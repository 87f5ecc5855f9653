// Sixteen float lanes, whatever the instruction set.
//
// Every float kernel is written once over `V` and compiled once per instruction set (see isa.cpp), in a namespace of
// its own. All operations are elementwise IEEE, fma is always fused, and the two horizontal ones add in a fixed tree
// (i with i + 8, then + 4, + 2, + 1): so the scalar, AVX2 and AVX-512 builds give the same bits.
//
// Kernels use no inline functions of the standard library: the linker may keep the copy compiled for a wider
// instruction set than the processor has.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(HEADRACE_AVX512) || defined(HEADRACE_AVX2)
#include <immintrin.h>
#endif

#define HR_INLINE static inline __attribute__((always_inline))

namespace headrace::HEADRACE_ISA {

constexpr int LANES = 16;

// ---------------------------------------------------------------------------------------------------------- AVX-512
#if defined(HEADRACE_AVX512)

struct V {
    __m512 v;
};

HR_INLINE V load(const float* p) { return {_mm512_loadu_ps(p)}; }
HR_INLINE void store(float* p, V a) { _mm512_storeu_ps(p, a.v); }
HR_INLINE V splat(float x) { return {_mm512_set1_ps(x)}; }
HR_INLINE V add(V a, V b) { return {_mm512_add_ps(a.v, b.v)}; }
HR_INLINE V sub(V a, V b) { return {_mm512_sub_ps(a.v, b.v)}; }
HR_INLINE V mul(V a, V b) { return {_mm512_mul_ps(a.v, b.v)}; }
HR_INLINE V div(V a, V b) { return {_mm512_div_ps(a.v, b.v)}; }
HR_INLINE V fma(V a, V b, V c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
HR_INLINE V max(V a, V b) { return {_mm512_max_ps(a.v, b.v)}; }  // b where a is NaN
HR_INLINE V min(V a, V b) { return {_mm512_min_ps(a.v, b.v)}; }
HR_INLINE V sqrt(V a) { return {_mm512_sqrt_ps(a.v)}; }
HR_INLINE V abs(V a) { return {_mm512_abs_ps(a.v)}; }
HR_INLINE V round(V a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
HR_INLINE V load_f16(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
HR_INLINE void store_f16(uint16_t* p, V a) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
HR_INLINE V load_bf16(const uint16_t* p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
// a * 2^n for integral n within -126 ... 127; below it anything.
HR_INLINE V scale2(V a, V n) { return {_mm512_scalef_ps(a.v, n.v)}; }
// yes where a < b, else no.
HR_INLINE V where_less(V a, V b, V yes, V no) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
}
// Integral floats within int8 to bytes.
HR_INLINE void store_i8(int8_t* p, V a) {
    _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a.v)));
}
HR_INLINE V load_i32(const int32_t* p) { return {_mm512_cvtepi32_ps(_mm512_loadu_si512(p))}; }
// Bit i: lane i of `a` is at least that of `least`.
HR_INLINE uint32_t lanes_from(V a, V least) { return _mm512_cmp_ps_mask(a.v, least.v, _CMP_GE_OQ); }

HR_INLINE float reduce_add(V a) {
    __m256 b = _mm256_add_ps(_mm512_castps512_ps256(a.v),
                             _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1)));
    __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_add_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
}
HR_INLINE float reduce_max(V a) {
    __m256 b = _mm256_max_ps(_mm512_castps512_ps256(a.v),
                             _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1)));
    __m128 c = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_max_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_max_ss(c, _mm_shuffle_ps(c, c, 1)));
}

// ------------------------------------------------------------------------------------------------------------- AVX2
#elif defined(HEADRACE_AVX2)

struct V {
    __m256 lo, hi;
};

HR_INLINE V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
HR_INLINE void store(float* p, V a) {
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
}
HR_INLINE V splat(float x) {
    __m256 v = _mm256_set1_ps(x);
    return {v, v};
}
HR_INLINE V add(V a, V b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
HR_INLINE V sub(V a, V b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
HR_INLINE V mul(V a, V b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
HR_INLINE V div(V a, V b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
HR_INLINE V fma(V a, V b, V c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
HR_INLINE V max(V a, V b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
HR_INLINE V min(V a, V b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
HR_INLINE V sqrt(V a) { return {_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)}; }
HR_INLINE V abs(V a) {
    __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    return {_mm256_and_ps(a.lo, mask), _mm256_and_ps(a.hi, mask)};
}
HR_INLINE V round(V a) {
    return {_mm256_round_ps(a.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
            _mm256_round_ps(a.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
HR_INLINE V load_f16(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
            _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
HR_INLINE void store_f16(uint16_t* p, V a) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
HR_INLINE __m256 widen_bf16(const uint16_t* p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
HR_INLINE V load_bf16(const uint16_t* p) { return {widen_bf16(p), widen_bf16(p + 8)}; }
HR_INLINE __m256 scale2_half(__m256 a, __m256 n) {
    __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(a, _mm256_castsi256_ps(bits));
}
HR_INLINE V scale2(V a, V n) { return {scale2_half(a.lo, n.lo), scale2_half(a.hi, n.hi)}; }
HR_INLINE V where_less(V a, V b, V yes, V no) {
    return {_mm256_blendv_ps(no.lo, yes.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ)),
            _mm256_blendv_ps(no.hi, yes.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ))};
}
HR_INLINE void store_i8(int8_t* p, V a) {
    __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi));
    words = _mm256_permute4x64_epi64(words, 0xd8);  // packs works within halves
    __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128((__m128i*)p, bytes);
}
HR_INLINE V load_i32(const int32_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_loadu_si256((const __m256i*)p)),
            _mm256_cvtepi32_ps(_mm256_loadu_si256((const __m256i*)(p + 8)))};
}
HR_INLINE uint32_t lanes_from(V a, V least) {
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(a.lo, least.lo, _CMP_GE_OQ)) |
           (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(a.hi, least.hi, _CMP_GE_OQ)) << 8;
}
HR_INLINE float reduce_add(V a) {
    __m256 b = _mm256_add_ps(a.lo, a.hi);
    __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_add_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
}
HR_INLINE float reduce_max(V a) {
    __m256 b = _mm256_max_ps(a.lo, a.hi);
    __m128 c = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_max_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_max_ss(c, _mm_shuffle_ps(c, c, 1)));
}

// ----------------------------------------------------------------------------------------------------------- scalar
#else

struct V {
    float a[LANES];
};

#define HR_LANES(expression)                      \
    V r;                                          \
    for (int i = 0; i < LANES; ++i) r.a[i] = (expression); \
    return r

HR_INLINE float bits_to_float(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}
HR_INLINE uint32_t float_to_bits(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}
HR_INLINE float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
    if (rest >= 0x7c00) return bits_to_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);  // infinity, NaN
    if (rest < 0x0400) {  // subnormal: exact in float32
        float f = (float)rest * bits_to_float(0x33800000);  // 2^-24
        return bits_to_float(float_to_bits(f) | sign);
    }
    return bits_to_float(sign | ((rest << 13) + (112u << 23)));
}
HR_INLINE uint16_t float_to_half(float f) {  // to nearest, ties to even, as the hardware does
    uint32_t u = float_to_bits(f), sign = (u >> 16) & 0x8000, rest = u & 0x7fffffff;
    if (rest > 0x7f800000) return (uint16_t)(sign | 0x7e00 | ((rest >> 13) & 0x3ff));
    if (rest >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (rest < 0x38800000) {  // subnormal half: let the float adder round
        float shifted = bits_to_float(rest) + 0.5f;
        return (uint16_t)(sign | (float_to_bits(shifted) - 0x3f000000));
    }
    uint32_t odd = (rest >> 13) & 1;
    return (uint16_t)(sign | ((rest - (112u << 23) + 0xfff + odd) >> 13));
}

HR_INLINE V load(const float* p) { HR_LANES(p[i]); }
HR_INLINE void store(float* p, V a) { memcpy(p, a.a, sizeof a.a); }
HR_INLINE V splat(float x) { HR_LANES(x); }
HR_INLINE V add(V a, V b) { HR_LANES(a.a[i] + b.a[i]); }
HR_INLINE V sub(V a, V b) { HR_LANES(a.a[i] - b.a[i]); }
HR_INLINE V mul(V a, V b) { HR_LANES(a.a[i] * b.a[i]); }
HR_INLINE V div(V a, V b) { HR_LANES(a.a[i] / b.a[i]); }
HR_INLINE V fma(V a, V b, V c) { HR_LANES(__builtin_fmaf(a.a[i], b.a[i], c.a[i])); }
HR_INLINE V max(V a, V b) { HR_LANES(a.a[i] > b.a[i] ? a.a[i] : b.a[i]); }
HR_INLINE V min(V a, V b) { HR_LANES(a.a[i] < b.a[i] ? a.a[i] : b.a[i]); }
HR_INLINE V sqrt(V a) { HR_LANES(__builtin_sqrtf(a.a[i])); }
HR_INLINE V abs(V a) { HR_LANES(__builtin_fabsf(a.a[i])); }
HR_INLINE V round(V a) { HR_LANES(__builtin_rintf(a.a[i])); }
HR_INLINE V load_f16(const uint16_t* p) { HR_LANES(half_to_float(p[i])); }
HR_INLINE void store_f16(uint16_t* p, V a) {
    for (int i = 0; i < LANES; ++i) p[i] = float_to_half(a.a[i]);
}
HR_INLINE V load_bf16(const uint16_t* p) { HR_LANES(bits_to_float((uint32_t)p[i] << 16)); }
HR_INLINE V scale2(V a, V n) {
    HR_LANES(n.a[i] < -126.0f ? 0.0f : a.a[i] * bits_to_float((uint32_t)((int)n.a[i] + 127) << 23));
}
HR_INLINE V where_less(V a, V b, V yes, V no) { HR_LANES(a.a[i] < b.a[i] ? yes.a[i] : no.a[i]); }
HR_INLINE void store_i8(int8_t* p, V a) {
    for (int i = 0; i < LANES; ++i) p[i] = (int8_t)(int)a.a[i];
}
HR_INLINE V load_i32(const int32_t* p) { HR_LANES((float)p[i]); }
HR_INLINE uint32_t lanes_from(V a, V least) {
    uint32_t bits = 0;
    for (int i = 0; i < LANES; ++i) bits |= (uint32_t)(a.a[i] >= least.a[i]) << i;
    return bits;
}
HR_INLINE float reduce_add(V a) {
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; ++i) a.a[i] += a.a[i + half];
    return a.a[0];
}
HR_INLINE float reduce_max(V a) {
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; ++i) a.a[i] = a.a[i] > a.a[i + half] ? a.a[i] : a.a[i + half];
    return a.a[0];
}

#endif

// --------------------------------------------------------------------------------------------------- built on the above

// The sum of sixteen bytes.
HR_INLINE int32_t sum_i8(const int8_t* p) {
#if defined(HEADRACE_AVX512) || defined(HEADRACE_AVX2)
    const __m128i above = _mm_xor_si128(_mm_loadu_si128((const __m128i*)p), _mm_set1_epi8((char)0x80));
    const __m128i halves = _mm_sad_epu8(above, _mm_setzero_si128());
    return _mm_cvtsi128_si32(halves) + _mm_extract_epi16(halves, 4) - 128 * LANES;
#else
    int32_t sum = 0;
    for (int i = 0; i < LANES; ++i) sum += p[i];
    return sum;
#endif
}

// The first `count` lanes from memory, `fill` in the others.
HR_INLINE V load_part(const float* p, int count, float fill) {
    float lanes[LANES];
    for (int i = 0; i < LANES; ++i) lanes[i] = i < count ? p[i] : fill;
    return load(lanes);
}
HR_INLINE void store_part(float* p, V a, int count) {
    float lanes[LANES];
    store(lanes, a);
    for (int i = 0; i < count; ++i) p[i] = lanes[i];
}

// e^x to about 1 ulp for x in -87.3 ... 88; 0 below (-infinity included).
// x = n ln 2 + r, |r| <= ln 2 / 2; e^r by a polynomial of degree 6 (Taylor's coefficients; error 2e-9 relative).
HR_INLINE V exp(V x) {
    const V n = round(mul(x, splat(1.44269504088896341f)));
    V r = fma(n, splat(-0.693359375f), x);          // ln 2 in two parts: the first product is exact
    r = fma(n, splat(2.12194440e-4f), r);
    V p = splat(1.0f / 720);
    p = fma(p, r, splat(1.0f / 120));
    p = fma(p, r, splat(1.0f / 24));
    p = fma(p, r, splat(1.0f / 6));
    p = fma(p, r, splat(0.5f));
    p = fma(p, r, splat(1.0f));
    p = fma(p, r, splat(1.0f));
    return where_less(x, splat(-87.3f), splat(0.0f), scale2(p, min(n, splat(127.0f))));
}

HR_INLINE V silu(V x) { return div(x, add(splat(1.0f), exp(sub(splat(0.0f), x)))); }

// tanh(x) = 1 - 2 / (e^2x + 1); saturates at |x| = 40 before exp could overflow.
HR_INLINE V tanh(V x) {
    const V bounded = max(min(x, splat(40.0f)), splat(-40.0f));
    return sub(splat(1.0f), div(splat(2.0f), add(exp(add(bounded, bounded)), splat(1.0f))));
}

// ln(x) to about 2 ulp for normal x > 0: x = 2^k m with m in 0.707 ... 1.414, then 2 atanh((m - 1) / (m + 1)).
HR_INLINE V log(V x) {
    float lanes[LANES], powers[LANES];
    store(lanes, x);
    for (int i = 0; i < LANES; ++i) {
        uint32_t u;
        memcpy(&u, &lanes[i], 4);
        const int32_t k = (int32_t)(u - 0x3f3504f3u) >> 23;  // 0x3f3504f3: sqrt(1/2)
        u -= (uint32_t)k << 23;
        memcpy(&lanes[i], &u, 4);
        powers[i] = (float)k;
    }
    const V m = load(lanes), k = load(powers);
    const V s = div(sub(m, splat(1.0f)), add(m, splat(1.0f))), z = mul(s, s);
    V p = splat(2.0f / 9);
    p = fma(p, z, splat(2.0f / 7));
    p = fma(p, z, splat(2.0f / 5));
    p = fma(p, z, splat(2.0f / 3));
    p = fma(p, z, splat(2.0f));
    return fma(k, splat(0.69314718056f), mul(p, s));
}

// ln(1 + e^x) = max(x, 0) + ln(1 + e^-|x|).
HR_INLINE V softplus(V x) {
    return add(max(x, splat(0.0f)), log(add(splat(1.0f), exp(sub(splat(0.0f), abs(x))))));
}

// GELU with tanh (Hendrycks and Gimpel 2016).
HR_INLINE V gelu_tanh(V x) {
    const V cubed = mul(mul(x, x), x);
    const V inner = mul(splat(0.7978845608028654f), fma(splat(0.044715f), cubed, x));
    return mul(mul(splat(0.5f), x), add(splat(1.0f), tanh(inner)));
}

// The same pointer, unknown to the compiler: broadcasts from it are read again for each vector that they are multiplied
// with, where keeping them would take registers that sums need.
template <typename T>
HR_INLINE const T* again(const T* p) {
    asm volatile("" : "+r"(p));
    return p;
}

}  // namespace headrace::HEADRACE_ISA
