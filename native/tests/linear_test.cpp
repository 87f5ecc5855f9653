// The linear kernels: packing and unpacking against the file's formats decoded plainly, quantized activations, products
// against sums in double, and the instruction sets against each other bit for bit.
//
// `--time [isa] [format] [rows]` ("all" for any): GOPS and GB/s, beside the peaks of the same run.
#include <numeric>

#include "peaks.h"

using namespace headrace;

namespace {

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
        case Packing::F32: std::memcpy(w, b, 4); return;
        case Packing::F16: w[0] = half(b); return;
        case Packing::BF16: {
            const uint32_t bits = (uint32_t)(b[0] | b[1] << 8) << 16;
            std::memcpy(w, &bits, 4);
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
        std::memcpy(&bytes[i], &r, 4);
    }
    std::uniform_real_distribution<double> size(0.001, 0.1), number(-1, 1);
    for (size_t i = 0; i < blocks; ++i) {
        uint8_t* b = &bytes[i * format.block_bytes];
        if (format.packing == Packing::F32 || format.packing == Packing::BF16) {
            const float f = (float)number(random_bits);
            uint8_t raw[4];
            std::memcpy(raw, &f, 4);
            std::memcpy(b, format.block_bytes == 4 ? raw : raw + 2, format.block_bytes);
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
    Bytes bytes;
    Matrix(const Kernels& k, const FormatCase& format, const std::vector<uint8_t>& stored, int rows, int width)
        : packed{format.packing, rows, width, nullptr},
          bytes((size_t)packed.num_strips() * k.strip_bytes(format.packing, width)) {
        packed.data = bytes.data();
        const size_t row_bytes = stored.size() / rows;
        const int middle = packed.num_strips() / 2;
        k.pack(packed, bytes.data(), stored.data(), row_bytes, middle, packed.num_strips());
        k.pack(packed, bytes.data(), stored.data(), row_bytes, 0, middle);
    }
};

struct Rows {
    const Kernels& k;
    Numbers<int8_t> q;
    Floats scale, scaled_sum, outliers;
    Numbers<int32_t> sums, channels, slots, distinct, num_distinct, fixed;
    int width, planes, num_outliers;
    Rows(const Kernels& k, const Floats& x, int rows, int width, int planes = 1, int num_outliers = 0, bool is_fixed = false)
        : k(k), q((size_t)rows * planes * width), scale(q.size() / 32), scaled_sum(q.size() / 32),
          outliers(rows * num_outliers), sums(q.size() / 16), channels(outliers.size()), slots(outliers.size()),
          distinct(outliers.size()), num_distinct(rows / INDEXED_ROWS + 1), width(width), planes(planes),
          num_outliers(num_outliers) {
        for (int j = 0; is_fixed && j < num_outliers; ++j) fixed.push_back(j * width / num_outliers + j % 3);
        if (is_fixed)
            for (size_t i = 0; i < channels.size(); ++i) channels[i] = fixed[i % num_outliers];
        for (int r = 0; r < rows; ++r) k.quantize(&x[(size_t)r * width], r, view());
    }
    QuantizedRows view(int from = 0, int num = 0) {  // the rows from `from` on, `num` of them ready for products
        const size_t at = (size_t)from * planes * width;
        const QuantizedRows rows{width, planes, q.data() + at, scale.data() + at / 32, scaled_sum.data() + at / 32,
                                 sums.data() + at / 16, num_outliers, outliers.data() + from * num_outliers,
                                 fixed.empty() ? nullptr : fixed.data(), channels.data() + from * num_outliers, slots.data(), distinct.data(),
                                 num_distinct.data()};
        if (num_outliers && num) k.index_outliers(rows, num);
        return rows;
    }
};

Floats random_rows(int rows, int width) {
    std::normal_distribution<float> normal(0, 1);
    Floats x((size_t)rows * width);
    for (float& v : x) v = normal(random_bits) * (random_bits() % 97 == 0 ? 20.0f : 1.0f);
    for (int r = 0; r < rows; ++r)
        if (width >= 64 && r % 3 == 1) std::fill_n(&x[(size_t)r * width + 32], 32, 0.0f);  // a group of zeros
    return x;
}

// --- checks ----------------------------------------------------------------------------------------------------------

void check_quantize() {
    const int width = 4096;
    Floats x = random_rows(3, width);
    for (int j = 0; j < 32; ++j) x[j] = 1e-30f * (float)j;                        // too small: zeros
    for (int j = 0; j < 32; ++j) x[64 + j] = ((float)j - 16) * 0.5f;              // ties
    for (int j = 0; j < 32; ++j) x[128 + j] = j == 5 ? 127.0f : (float)j + 0.5f;  // exact ties to even
    for (const Kernels* k : all_kernels()) {
        const Rows rows(*k, x, 3, width);
        for (int g = 0; g < 3 * width / 32; ++g) {
            float largest = 0;
            for (int j = 0; j < 32; ++j) largest = std::max(largest, std::fabs(x[g * 32 + j]));
            const float scale = largest < 0x1p-80f ? 0 : largest / 127, inverse = scale > 0 ? 1 / scale : 0;
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
            EXPECT(same, "%s: quantize, group %d", k->name, g);
        }
        for (float value : {NAN, INFINITY, -INFINITY})
            for (int at : {0, 15, 16, 31}) {
                Floats y(64, 1.0f);
                y[at] = value;
                const Rows broken(*k, y, 1, 64);
                EXPECT(std::isnan(broken.scale[0]) && broken.scale[1] == 1.0f / 127, "%s: quantize, %g at %d", k->name,
                       value, at);
            }
    }
}

// Two planes: the first as it is alone, the second what is left, exactly, quantized alone; together 15 bits and more.
void check_planes() {
    const int num = 5, width = 544;
    const Floats x = random_rows(num, width);
    for (const Kernels* k : all_kernels()) {
        const Rows both(*k, x, num, width, 2), first(*k, x, num, width);
        Floats left(x.size());
        for (size_t i = 0; i < x.size(); ++i) left[i] = std::fma(-first.scale[i / 32], (float)first.q[i], x[i]);
        const Rows second(*k, left, num, width);
        for (int r = 0; r < num; ++r) {
            const auto same = [&](const auto& of_both, const auto& of_first, const auto& of_second, int size) {
                const auto at = of_both.begin() + 2 * r * size;
                return std::equal(at, at + size, of_first.begin() + r * size) &&
                       std::equal(at + size, at + 2 * size, of_second.begin() + r * size);
            };
            EXPECT(same(both.q, first.q, second.q, width) && same(both.scale, first.scale, second.scale, width / 32) &&
                       same(both.scaled_sum, first.scaled_sum, second.scaled_sum, width / 32) &&
                       same(both.sums, first.sums, second.sums, width / 16),
                   "%s: planes of row %d", k->name, r);
        }
        for (size_t i = 0; i < x.size(); ++i) {
            const float kept = (float)second.q[i] * second.scale[i / 32];
            EXPECT(std::fabs(left[i] - kept) <= first.scale[i / 32] / 500, "%s: 16 bits at %zu", k->name, i);
        }
    }
}

// The largest numbers of a row, the first of equals first, are kept; the rest is quantized as if they were zeros.
void check_outliers() {
    for (int width : {32, 64, 576, 1536}) {
        const int num = 12;
        Floats x = random_rows(num, width);
        const auto row = [&](int r) { return x.begin() + (size_t)r * width; };
        std::fill_n(row(1), width, -2.0f);                           // all the same
        std::fill_n(row(2), width, 0.0f), row(2)[width - 1] = 3.0f;  // too few
        std::fill_n(row(3), width, 1e-30f);                          // too small
        for (int i = 0; i < width; ++i) row(4)[i] = (float)(i % 7 - 3);
        row(5)[7] = NAN, row(6)[width - 1] = INFINITY, row(7)[0] = -INFINITY;
        for (int i = 0; i < width; ++i) row(8)[i] = (float)i;
        for (const Kernels* k : all_kernels())
            for (int count : {1, 3, 4, 8}) {
                const Rows rows(*k, x, num, width, 1, count);
                Floats rest = x;
                for (int r = 0; r < num; ++r) {
                    const bool is_finite = std::all_of(row(r), row(r) + width, [](float v) { return std::isfinite(v); });
                    std::vector<int> order(width);
                    std::iota(order.begin(), order.end(), 0);
                    std::stable_sort(order.begin(), order.end(),
                                     [&](int a, int b) { return std::fabs(row(r)[a]) > std::fabs(row(r)[b]); });
                    for (int j = 0; j < count; ++j) {
                        const bool is_one = is_finite && std::fabs(row(r)[order[j]]) >= 0x1p-80f;
                        const int channel = is_one ? order[j] : 0;
                        const float value = is_one ? row(r)[channel] : 0.0f;
                        EXPECT(rows.channels[r * count + j] == channel && rows.outliers[r * count + j] == value,
                               "%s: outlier %d of row %d of %d", k->name, j, r, width);
                        if (is_one) rest[(size_t)r * width + channel] = 0.0f;
                    }
                }
                const Rows expected(*k, rest, num, width);
                EXPECT(same_bits(rows.q, expected.q) && same_bits(rows.scale, expected.scale) &&
                           same_bits(rows.scaled_sum, expected.scaled_sum) && same_bits(rows.sums, expected.sums),
                       "%s: beside %d outliers of %d", k->name, count, width);
            }
    }
}

void check_fixed_outliers() {
    const int num = 5, width = 576, count = 24;
    Floats x = random_rows(num, width);
    for (const Kernels* k : all_kernels()) {
        const Numbers<int32_t> fixed = Rows(*k, x, 0, width, 1, count, true).fixed;
        x[2 * width + fixed[3]] = NAN, x[3 * width + fixed[4]] = -INFINITY;
        const Rows rows(*k, x, num, width, 1, count, true);
        Floats rest = x;
        for (int i = 0; i < num * count; ++i) {
            float& value = rest[i / count * width + fixed[i % count]];
            EXPECT(rows.outliers[i] == (std::isfinite(value) ? value : 0.0f), "%s: fixed outlier %d", k->name, i);
            if (std::isfinite(value)) value = 0.0f;
        }
        const Rows expected(*k, rest, num, width);
        EXPECT(same_bits(rows.q, expected.q) && same_bits(rows.scale, expected.scale) &&
                   same_bits(rows.scaled_sum, expected.scaled_sum) && same_bits(rows.sums, expected.sums),
               "%s: beside fixed outliers", k->name);
    }
}

// A column of groups at a time: the bits of whole rows, and nothing else written.
void check_quantize_column(int planes) {
    const int most = 40;
    for (int width : {32, 96, 1056}) {
        Floats x = random_rows(most, width);
        x[5] = NAN, x[(size_t)17 * width + width - 1] = INFINITY;
        for (const Kernels* k : all_kernels())
            for (int num : {1, 2, 3, 15, 16, 17, 33, 40}) {
                Rows expected(*k, Floats(x.size(), 1.0f), most, width, planes), rows = expected;
                for (int r = 0; r < num; ++r) k->quantize(&x[(size_t)r * width], r, expected.view());
                for (int group = width / 32 - 1; group >= 0; --group) {
                    Floats column((size_t)num * 32);
                    for (int r = 0; r < num; ++r)
                        std::copy_n(&x[(size_t)r * width + group * 32], 32, &column[(size_t)r * 32]);
                    k->quantize_column(column.data(), num, group, rows.view());
                }
                EXPECT(same_bits(rows.q, expected.q) && same_bits(rows.scale, expected.scale) &&
                           same_bits(rows.scaled_sum, expected.scaled_sum) && same_bits(rows.sums, expected.sums),
                       "%s: quantize_column, width %d, %d rows", k->name, width, num);
            }
    }
}

// Products against sums in double, and what lies behind the outputs of each row against what was there.
void check_product(const char* name, const Floats& w, int rows, int width, const std::vector<double>& activations, int num,
                   const Floats& out, const Floats& before) {
    const int stride = rows + 3;
    for (int r = 0; r < num; ++r) {
        for (int i = 0; i < rows; ++i) {
            double sum = 0, size = 0;
            for (int c = 0; c < width; ++c) {
                const double product = activations[(size_t)r * width + c] * w[(size_t)i * width + c];
                sum += product;
                size += std::fabs(product);
            }
            EXPECT(std::fabs(out[r * stride + i] - sum) <= 1e-5 * size + 1e-30, "%s: row %d, output %d: %g, not %g", name, r, i,
                   out[r * stride + i], sum);
        }
        for (int i = rows; i < stride; ++i)
            EXPECT(out[r * stride + i] == before[r * stride + i], "%s: written beyond row %d", name, r);
    }
}

// One matrix: `counts` are the rows of activations passed at once, the largest of them at hand.
void check_matrix(const FormatCase& format, int rows, int width, const std::vector<int>& counts, int planes = 1,
                  int num_outliers = 0, bool is_fixed = false) {
    const bool quantized = format.block > 1;
    const std::vector<uint8_t> stored = random_weights(format, rows, width);
    Floats w((size_t)rows * width);
    for (size_t b = 0; b < w.size() / format.block; ++b)
        decode(format, &stored[b * format.block_bytes], &w[b * format.block]);
    const int most = *std::max_element(counts.begin(), counts.end());
    const int stride = rows + 3, x_stride = width + 5;  // rows begin anywhere
    const Floats x = random_rows(most, width);
    Floats spread((size_t)most * x_stride, NAN), bias(rows), before((size_t)most * stride), expected;
    for (int r = 0; r < most; ++r) std::copy_n(&x[(size_t)r * width], width, &spread[(size_t)r * x_stride + 1]);
    for (float& v : bias) v = (float)(random_bits() % 100) / 10;
    for (float& v : before) v = (float)(random_bits() % 100) / 10;
    for (const Kernels* k : all_kernels()) {
        char name[120];
        std::snprintf(name, sizeof name, "%s: %s %d x %d, %d planes, %d %soutliers", k->name, format.name, rows, width,
                      planes, num_outliers, is_fixed ? "fixed " : "");
        const Matrix m(*k, format, stored, rows, width);
        Floats row(width);
        for (int r = 0; r < rows; ++r) {
            k->unpack_row(m.packed, r, row.data());
            EXPECT(!std::memcmp(row.data(), &w[(size_t)r * width], width * 4), "%s: unpack of row %d", name, r);
        }
        Rows quants(*k, x, quantized ? most : 0, width, planes, num_outliers, is_fixed);
        const int strips = m.packed.num_strips();
        const auto run = [&](int first, int last, int from, int num, Floats& out, Epilogue epilogue) {
            float* const to = out.data() + (size_t)from * stride;
            if (quantized)
                k->linear_quantized(m.packed, first, last, strips, quants.view(from, num), num, to, stride, epilogue);
            else
                k->linear_float(m.packed, first, last, strips, &spread[(size_t)from * x_stride + 1], x_stride, num, to,
                                stride, epilogue);
        };
        Floats whole = before;
        run(0, strips, 0, most, whole, {nullptr, false});
        if (expected.empty()) {
            expected = whole;
            std::vector<double> activations(x.begin(), x.end());
            if (quantized)
                for (size_t i = 0; i < x.size(); ++i) {
                    activations[i] = 0;
                    for (int plane = 0; plane < planes; ++plane) {
                        const size_t at = (i / width * planes + plane) * width + i % width;
                        activations[i] += (double)quants.q[at] * quants.scale[at / 32];
                    }
                }
            for (size_t i = 0; i < quants.outliers.size(); ++i)
                activations[i / num_outliers * width + quants.channels[i]] += quants.outliers[i];
            check_product(name, w, rows, width, activations, most, whole, before);
        }
        EXPECT(same_bits(whole, expected), "%s: other bits", name);
        for (int num : counts) {
            const int start = IS_SHORT ? most - num : 0;
            Floats out = expected;
            std::copy(before.begin() + start * stride, before.end(), out.begin() + start * stride);
            for (int from = start; from < most; from += num)
                run(0, strips, from, std::min(num, most - from), out, {nullptr, false});
            EXPECT(same_bits(out, expected), "%s: %d rows at once", name, num);
        }
        Floats out = before;
        for (int s = 0; s < strips;) {
            const int next = std::min(strips, s + 1 + (int)(random_bits() % 3));
            run(s, next, 0, most, out, {nullptr, false});
            s = next;
        }
        EXPECT(same_bits(out, expected), "%s: split of strips", name);
        for (int kind = 1; kind < 4; ++kind) {
            out = before;
            run(0, strips, 0, most, out, {kind & 1 ? bias.data() : nullptr, kind > 1});
            bool same = true;
            for (int r = 0; r < most; ++r)
                for (int i = 0; i < rows; ++i) {
                    float want = expected[r * stride + i];
                    if (kind & 1) want += bias[i];
                    if (kind > 1) want += before[r * stride + i];
                    same &= want == out[r * stride + i];
                }
            EXPECT(same, "%s: epilogue %d", name, kind);
        }
    }
}

void run_checks() {
    check_quantize();
    check_planes();
    check_outliers();
    check_fixed_outliers();
    for (int planes : {1, 2}) check_quantize_column(planes);
    using Ints = std::vector<int>;
    const Ints all_rows = IS_SHORT ? Ints{1, 47} : Ints{1, 15, 16, 17, 48, 100};
    const Ints widths = IS_SHORT ? Ints{32, 96, 256} : Ints{32, 64, 96, 256, 512, 768, 1024, 2048};
    // Every height of a tile; from 17 on a strip is staged; no more than 128 pass at once.
    const Ints counts = IS_SHORT ? Ints{1, 2, 3, 4, 5, 6, 7, 8, 17} : Ints{1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 33, 64};
    const Ints many = IS_SHORT ? Ints{131} : Ints{1, 100, 128, 129, 150};
    for (const FormatCase& format : FORMATS) {
        const int odd = format.block == 1 ? 77 : format.block == 32 ? 1056 : 1280;  // two panels when staged
        for (int rows : all_rows) {
            for (int width : widths)
                if (width % format.block == 0) check_matrix(format, rows, width, counts);
            check_matrix(format, rows, odd, counts);
        }
        check_matrix(format, 33, std::max(64, format.block), many);
        if (!IS_SHORT) check_matrix(format, 33, 1024, many);
        if (format.block > 1) {
            check_matrix(format, 47, odd, counts, 2);
            check_matrix(format, 33, std::max(64, format.block), {1, 63, 64, 65, 100}, 2);
            check_matrix(format, 47, odd, counts, 1, 8);
            check_matrix(format, 17, std::max(96, format.block), counts, 1, 3);
            check_matrix(format, 33, 768, many, 1, 4);
            check_matrix(format, 47, odd, counts, 1, 24, true);
            check_matrix(format, 33, 768, many, 1, 7, true);
        }
        if (format.block == 1) check_matrix(format, 145, 77, {1, 2, 3, 5, 7, 8});  // eight strips side by side, and more
    }
}

// --- timing ----------------------------------------------------------------------------------------------------------

// A kernel beside its peak: each short run of one follows a run of the other, because neighbours on the machine change
// the speed of a core by a factor of two. Medians of the kernel's seconds and of its share of the peak.
struct Timing {
    double s, share;
};
template <typename F>
Timing timed(F&& work, double ops, double (*loop)(long)) {
    work();
    const int repeat = std::max(1, (int)(0.002 / (run_s(work) + 1e-9)));
    std::vector<double> runs, shares;
    for (int i = 0; i < 21; ++i) {
        double peak_ops = 0;
        const double before = run_s([&] { peak_ops = loop(20000); }), s = run_s(work, repeat),
                     after = run_s([&] { loop(20000); });
        runs.push_back(s);
        shares.push_back(ops / s / (2 * peak_ops / (before + after)));
    }
    return {median(runs), median(shares)};
}

void time_format(const Kernels& k, const FormatCase& format, int only_rows) {
    struct Shape {
        int rows, width;
    };
    std::vector<Shape> shapes{{576, 1536}, {1536, 576}, {2048, 640}};
    if (format.block == 256) shapes = {{640, 2048}, {640, 1024}};
    if (format.packing == Packing::Q8_0 || format.packing == Packing::F16) shapes.push_back({49152, 576});
    if (format.packing == Packing::Q4_1) shapes.push_back({49152, 1536});  // larger than the caches
    const PeakLoops loops = peak_loops(k);
    for (const Shape& shape : shapes) {
        const int rows = shape.rows, width = shape.width;
        const Matrix m(k, format, random_weights(format, rows, width), rows, width);
        const int strips = m.packed.num_strips();
        std::printf("%-6s %-5s %5d x %4d, GOPS (of peak)", k.name, format.name, rows, width);
        for (int num : {1, 2, 4, 8, 16, 64, 256}) {
            if ((only_rows && num != only_rows) || (double)rows * width * num > 3e9) continue;
            const Floats x = random_rows(num, width);
            Rows quants(k, x, format.block > 1 ? num : 0, width);
            Floats out((size_t)num * rows);
            const auto product = [&] {
                if (format.block > 1)
                    k.linear_quantized(m.packed, 0, strips, strips, quants.view(), num, out.data(), rows, {});
                else
                    k.linear_float(m.packed, 0, strips, strips, x.data(), width, num, out.data(), rows, {});
            };
            const double ops = 2.0 * rows * width * num;
            const Timing t = timed(product, ops,
                                   format.block == 1                 ? loops.floats
                                   : format.packing == Packing::Q8_0 ? loops.eight_bits
                                                                     : loops.four_bits);
            std::printf(" | %d: %.0f (%.0f%%)", num, ops / t.s / 1e9, 100 * t.share);
            if (num == 1) std::printf(" %.1f GB/s", (double)m.bytes.size() / t.s / 1e9);
            std::fflush(stdout);
        }
        std::printf("\n");
    }
}

void run_times(const std::string& only_isa, const std::string& only_format, int only_rows) {
    for (const Kernels* k : fast_kernels()) {
        if (only_isa != "all" && only_isa != k->name) continue;
        measure_peaks(*k);
        for (const FormatCase& format : FORMATS)
            if (only_format == "all" || only_format == format.name) time_format(*k, format, only_rows);
        const int rows = 64, width = 1536, groups = rows * width / 32;
        const Floats x = random_rows(rows, width);
        Rows quants(*k, x, rows, width);
        const double by_rows = median_s([&] {
            for (int r = 0; r < rows; ++r) k->quantize(&x[(size_t)r * width], r, quants.view());
        });
        const double by_columns = median_s([&] {
            for (int g = 0; g < width / 32; ++g) k->quantize_column(&x[(size_t)g * rows * 32], rows, g, quants.view());
        });
        std::printf("%-6s quantize: %.2f ns per group of 32 by rows, %.2f by columns; reads %.1f and %.1f GB/s\n", k->name,
                    by_rows / groups * 1e9, by_columns / groups * 1e9, 128e-9 * groups / by_rows, 128e-9 * groups / by_columns);
    }
}

}  // namespace

int main(int argc, char** argv) {
    const auto argument = [&](int i) { return argc > i ? argv[i] : "all"; };
    if (std::strcmp(argument(1), "--time") == 0) {
        run_times(argument(2), argument(3), std::atoi(argument(4)));
        return 0;
    }
    run_checks();
    return report("linear");
}
