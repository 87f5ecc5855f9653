// Packed weights: how a strip of 16 output rows lies in memory, and the ways in (pack) and out (unpack_row).
//
// Float formats: [k][16 rows]; strips padded to 64 bytes.
//
// Quantized formats: two sections, each read front to back, the second beginning at a multiple of 64 bytes:
//
//   heads    one per block of 32 or 256 inputs: f16 d[16] (, f16 minimum[16]), and for K-quants per group the 6-bit
//            scale[16] and minimum[16] as bytes (Q6_K: int8 scale[16] per half group)
//   quants   one per group of 32 inputs, unsigned: with (row, c) the byte row * 4 + c of a vector of 64 bytes and input
//            k = 4 * k4 + c,
//              vectors 0-3   vector j holds the low four bits of k4 = j (low nibbles) and k4 = j + 4 (high nibbles)
//              5 bits: vector 4     bit k4 is the fifth bit
//              6 bits: vectors 4-5  bits 2f, 2f + 1 of vector 4 + k4 / 4 are the upper two bits, f = k4 % 4
//              8 bits: vectors 0-7  vector k4 holds q + 128
//
// One vector times a broadcast of four activations is then what vpdpbusd and vpmaddubsw take.
//
// Bytes per 16 rows x 256 inputs are those of the file, but for Q4_K (2368 for 2304) and Q5_K (2880 for 2816): their
// subscales take a byte each; a strip's heads are padded by at most 32 bytes.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace headrace::HEADRACE_ISA {

struct Layout {
    int bits;           // of a quant
    int block;          // inputs a head covers
    int file_bytes;     // of a block in the file
    int head_bytes;     // of a block, 16 rows
    int quants_bytes;   // of a group, 16 rows
    bool has_minimum;   // w = scale * q + minimum; else w = scale * (q - 2^(bits - 1))
    bool has_subscales; // K-quants
};

constexpr Layout layout_of(Packing p) {
    switch (p) {
        case Packing::Q4_0: return {4, 32, 18, 32, 256, false, false};
        case Packing::Q4_1: return {4, 32, 20, 64, 256, true, false};
        case Packing::Q5_0: return {5, 32, 22, 32, 320, false, false};
        case Packing::Q5_1: return {5, 32, 24, 64, 320, true, false};
        case Packing::Q8_0: return {8, 32, 34, 32, 512, false, false};
        case Packing::Q4_K: return {4, 256, 144, 320, 256, true, true};
        case Packing::Q5_K: return {5, 256, 176, 320, 320, true, true};
        case Packing::Q6_K: return {6, 256, 210, 288, 384, false, true};
        default: return {0, 1, p == Packing::F32 ? 4 : 2, 0, 0, false, false};
    }
}

HR_INLINE size_t round_up_64(size_t n) { return (n + 63) / 64 * 64; }

// Bytes before the quants of a strip.
HR_INLINE size_t heads_bytes(const Layout& layout, int32_t width) {
    return round_up_64((size_t)(width / layout.block) * layout.head_bytes);
}

static size_t strip_bytes(Packing packing, int32_t width) {
    const Layout layout = layout_of(packing);
    if (!layout.bits) return round_up_64((size_t)width * STRIP * layout.file_bytes);
    return heads_bytes(layout, width) + (size_t)(width / GROUP) * layout.quants_bytes;
}

// The 6-bit scale and minimum of group g of a K-quant block (`st`, see formats.py).
HR_INLINE void read_subscales(const uint8_t* st, int g, uint8_t* scale, uint8_t* minimum) {
    const int i = g & 3;
    *scale = g < 4 ? st[i] & 63 : (st[8 + i] & 15) | (st[i] >> 6) << 4;
    *minimum = g < 4 ? st[4 + i] & 63 : st[8 + i] >> 4 | (st[4 + i] >> 6) << 4;
}

// The 32 unsigned quants of group g of a block as the file stores it.
template <Packing P>
HR_INLINE void read_quants(const uint8_t* block, int g, uint8_t* q) {
    if constexpr (P == Packing::Q8_0) {
        for (int j = 0; j < 32; ++j) q[j] = block[2 + j] ^ 0x80;
    } else if constexpr (P == Packing::Q6_K) {
        const int half = g / 4, run = g % 4;
        const uint8_t *low = block + 64 * half + 32 * (run & 1), *high = block + 128 + 32 * half;
        for (int j = 0; j < 32; ++j)
            q[j] = (uint8_t)(((low[j] >> (run & 2 ? 4 : 0)) & 15) | (((high[j] >> (2 * run)) & 3) << 4));
    } else if constexpr (layout_of(P).has_subscales) {
        const uint8_t* low = block + (P == Packing::Q5_K ? 48 : 16) + 32 * (g / 2);
        for (int j = 0; j < 32; ++j) q[j] = (low[j] >> (g & 1 ? 4 : 0)) & 15;
        if constexpr (P == Packing::Q5_K)
            for (int j = 0; j < 32; ++j) q[j] |= (uint8_t)(((block[16 + j] >> g) & 1) << 4);
    } else {
        constexpr int begin = layout_of(P).has_minimum ? 4 : 2;
        const uint8_t* low = block + begin + (layout_of(P).bits == 5 ? 4 : 0);
        for (int j = 0; j < 16; ++j) {
            q[j] = low[j] & 15;
            q[j + 16] = low[j] >> 4;
        }
        if constexpr (layout_of(P).bits == 5)
            for (int j = 0; j < 32; ++j) q[j] |= (uint8_t)(((block[begin + j / 8] >> (j % 8)) & 1) << 4);
    }
}

// Row i's part of a head.
template <Packing P>
HR_INLINE void pack_head(uint8_t* head, const uint8_t* block, int i) {
    if constexpr (P == Packing::Q6_K) {
        memcpy(head + 2 * i, block + 208, 2);
        for (int h = 0; h < 16; ++h) head[32 + 16 * h + i] = block[192 + h];
    } else {
        memcpy(head + 2 * i, block, 2);
        if constexpr (layout_of(P).has_minimum) memcpy(head + 32 + 2 * i, block + 2, 2);
        if constexpr (layout_of(P).has_subscales)
            for (int g = 0; g < 8; ++g) read_subscales(block + 4, g, head + 64 + 32 * g + i, head + 80 + 32 * g + i);
    }
}

// quants [16 rows][32] -> a group of the strip.
template <Packing P>
HR_INLINE void pack_quants(uint8_t* to, const uint8_t* q) {
    constexpr int bits = layout_of(P).bits;
    alignas(64) uint8_t w[8 * 64];  // [k4][row][4]
    for (int i = 0; i < STRIP; ++i)
        for (int k4 = 0; k4 < 8; ++k4) memcpy(w + 64 * k4 + 4 * i, q + 32 * i + 4 * k4, 4);
    if constexpr (bits == 8) {
        memcpy(to, w, sizeof w);
        return;
    }
    for (int b = 0; b < 256; ++b) to[b] = (uint8_t)((w[b] & 15) | (w[b + 256] & 15) << 4);
    if constexpr (bits == 5)
        for (int b = 0; b < 64; ++b) {
            uint8_t plane = 0;
            for (int k4 = 0; k4 < 8; ++k4) plane |= (uint8_t)((w[64 * k4 + b] >> 4) << k4);
            to[256 + b] = plane;
        }
    if constexpr (bits == 6)
        for (int p = 0; p < 2; ++p)
            for (int b = 0; b < 64; ++b) {
                uint8_t plane = 0;
                for (int f = 0; f < 4; ++f) plane |= (uint8_t)((w[64 * (4 * p + f) + b] >> 4) << (2 * f));
                to[256 + 64 * p + b] = plane;
            }
}

template <Packing P>
static void pack_quantized(const PackedMatrix& matrix, uint8_t* data, const uint8_t* stored, size_t row_bytes,
                           int32_t first, int32_t last) {
    constexpr Layout layout = layout_of(P);
    const size_t bytes = strip_bytes(P, matrix.width), heads = heads_bytes(layout, matrix.width);
    for (int32_t s = first; s < last; ++s) {
        uint8_t* strip = data + s * bytes;
        const int32_t num = matrix.rows - s * STRIP < STRIP ? matrix.rows - s * STRIP : STRIP;
        memset(strip, 0, heads);
        for (int32_t b = 0; b < matrix.width / layout.block; ++b) {
            const uint8_t* block = stored + (size_t)s * STRIP * row_bytes + (size_t)b * layout.file_bytes;
            for (int i = 0; i < num; ++i)
                pack_head<P>(strip + (size_t)b * layout.head_bytes, block + i * row_bytes, i);
            for (int g = 0; g < layout.block / GROUP; ++g) {
                alignas(64) uint8_t q[STRIP * GROUP];
                if (num < STRIP) memset(q, 0, sizeof q);
                for (int i = 0; i < num; ++i) read_quants<P>(block + i * row_bytes, g, q + GROUP * i);
                pack_quants<P>(strip + heads + (size_t)(b * (layout.block / GROUP) + g) * layout.quants_bytes, q);
            }
        }
    }
}

template <typename T>
static void pack_numbers(const PackedMatrix& matrix, uint8_t* data, const uint8_t* stored, size_t row_bytes,
                         int32_t first, int32_t last) {
    const size_t bytes = strip_bytes(matrix.packing, matrix.width);
    for (int32_t s = first; s < last; ++s) {
        uint8_t* strip = data + s * bytes;
        const int32_t num = matrix.rows - s * STRIP < STRIP ? matrix.rows - s * STRIP : STRIP;
        if (num < STRIP) memset(strip, 0, bytes);
        const uint8_t* from = stored + (size_t)s * STRIP * row_bytes;
        for (int32_t k0 = 0; k0 < matrix.width; k0 += 64)  // so that reads and writes stay in the L1 cache
            for (int i = 0; i < num; ++i)
                for (int32_t k = k0; k < matrix.width && k < k0 + 64; ++k)
                    memcpy(strip + ((size_t)k * STRIP + i) * sizeof(T), from + i * row_bytes + k * sizeof(T),
                           sizeof(T));
        const size_t used = (size_t)matrix.width * STRIP * sizeof(T);
        memset(strip + used, 0, bytes - used);
    }
}

static void pack(const PackedMatrix& matrix, uint8_t* data, const uint8_t* stored, size_t row_bytes, int32_t first,
                 int32_t last) {
    auto* run = &pack_numbers<uint16_t>;
    switch (matrix.packing) {
        case Packing::F32: run = &pack_numbers<uint32_t>; break;
        case Packing::F16:
        case Packing::BF16: break;
        case Packing::Q4_0: run = &pack_quantized<Packing::Q4_0>; break;
        case Packing::Q4_1: run = &pack_quantized<Packing::Q4_1>; break;
        case Packing::Q5_0: run = &pack_quantized<Packing::Q5_0>; break;
        case Packing::Q5_1: run = &pack_quantized<Packing::Q5_1>; break;
        case Packing::Q8_0: run = &pack_quantized<Packing::Q8_0>; break;
        case Packing::Q4_K: run = &pack_quantized<Packing::Q4_K>; break;
        case Packing::Q5_K: run = &pack_quantized<Packing::Q5_K>; break;
        case Packing::Q6_K: run = &pack_quantized<Packing::Q6_K>; break;
    }
    run(matrix, data, stored, row_bytes, first, last);
}

// Lane i of sixteen f16.
HR_INLINE float half_at(const uint8_t* halves, int i) {
    uint16_t bits[LANES];
    float values[LANES];
    memcpy(bits, halves, sizeof bits);
    store(values, load_f16(bits));
    return values[i];
}

// Quant k of row i in a group.
HR_INLINE int quant_at(int bits, const uint8_t* quants, int i, int k) {
    const int k4 = k / 4, byte = 4 * i + k % 4;
    if (bits == 8) return quants[64 * k4 + byte];
    int q = (quants[64 * (k4 & 3) + byte] >> (k4 & 4)) & 15;
    if (bits == 5) q |= ((quants[256 + byte] >> k4) & 1) << 4;
    if (bits == 6) q |= ((quants[256 + 64 * (k4 >> 2) + byte] >> (2 * (k4 & 3))) & 3) << 4;
    return q;
}

static void unpack_row(const PackedMatrix& matrix, int32_t row, float* out) {
    const Layout layout = layout_of(matrix.packing);
    const uint8_t* strip = matrix.data + row / STRIP * strip_bytes(matrix.packing, matrix.width);
    const int i = row % STRIP;
    if (!layout.bits) {
        for (int32_t k = 0; k < matrix.width; ++k) {
            const uint8_t* at = strip + (size_t)k * STRIP * layout.file_bytes;
            if (matrix.packing == Packing::F32) memcpy(out + k, at + 4 * i, 4);
            if (matrix.packing == Packing::F16) out[k] = half_at(at, i);
            if (matrix.packing == Packing::BF16) {
                uint16_t upper;
                memcpy(&upper, at + 2 * i, 2);
                const uint32_t bits = (uint32_t)upper << 16;
                memcpy(out + k, &bits, 4);
            }
        }
        return;
    }
    const uint8_t* quants = strip + heads_bytes(layout, matrix.width);
    const int offset = layout.has_minimum ? 0 : 1 << (layout.bits - 1);
    for (int32_t g = 0; g < matrix.width / GROUP; ++g, quants += layout.quants_bytes) {
        const uint8_t* head = strip + (size_t)(g * GROUP / layout.block) * layout.head_bytes;
        const int in_block = g % (layout.block / GROUP);
        // All products below are exact in float32; only adding the minimum rounds.
        const float d = half_at(head, i);
        float scale[2] = {d, d}, minimum = layout.has_minimum ? half_at(head + 32, i) : 0.0f;
        if (matrix.packing == Packing::Q6_K) {
            for (int h = 0; h < 2; ++h) scale[h] = d * (float)(int8_t)head[32 + 16 * (2 * in_block + h) + i];
        } else if (layout.has_subscales) {
            scale[0] = scale[1] = d * (float)head[64 + 32 * in_block + i];
            minimum = -(minimum * (float)head[80 + 32 * in_block + i]);
        }
        for (int k = 0; k < GROUP; ++k) {
            const float product = scale[k / 16] * (float)(quant_at(layout.bits, quants, i, k) - offset);
            out[g * GROUP + k] = layout.has_minimum ? product + minimum : product;
        }
    }
}

}  // namespace headrace::HEADRACE_ISA
