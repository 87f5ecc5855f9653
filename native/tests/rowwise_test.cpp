// The kernels that treat a row by itself against double-precision formulas, and against each other bit for bit.
// `--time`: GB/s of what each reads and writes.
#include "common.h"

using namespace headrace;

namespace {

enum { SILU, GELU_TANH, RELU, SIGMOID, SOFTPLUS, NUM_ACTIVATIONS };  // as in rowwise.h

double activated(int kind, double x) {
    switch (kind) {
        case SILU: return x / (1 + std::exp(-x));
        case GELU_TANH: return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
        case RELU: return std::max(x, 0.0);
        case SIGMOID: return 1 / (1 + std::exp(-x));
        default: return std::max(x, 0.0) + std::log1p(std::exp(-std::fabs(x)));
    }
}

// `run(kernels, out)` writes `width` numbers; right(i) is number i. One more number behind them must stay.
template <class Run, class Right>
void check(const char* what, int width, double tolerance, Run run, Right right) {
    Floats expected;
    for (const Kernels* k : all_kernels()) {
        Floats out(width + 1, 7.0f);
        run(*k, out.data());
        EXPECT(out[width] == 7.0f, "%s: %s of %d wrote beyond", k->name, what, width);
        if (expected.empty()) {
            expected = out;
            for (int i = 0; i < width; ++i) {
                const double wanted = right(i);
                EXPECT(std::fabs(out[i] - wanted) <= tolerance * (1 + std::fabs(wanted)), "%s of %d, number %d: %g, not %g",
                       what, width, i, out[i], wanted);
            }
        }
        EXPECT(same_bits(out, expected), "%s: %s of %d has other bits", k->name, what, width);
    }
}

void check_width(int width) {
    const Floats x = normals(width, 1, 3), y = normals(width, 2, 2), weight = normals(width, 3);
    double squares = 0;
    for (float v : x) squares += (double)v * v;
    for (float offset : {0.0f, 1.0f})
        check(
            "rms_norm", width, 2e-6,
            [&](const Kernels& k, float* out) { k.rms_norm(x.data(), weight.data(), width, 1e-5f, offset, out); },
            [&](int i) { return x[i] / std::sqrt(squares / width + 1e-5) * (offset + weight[i]); });
    for (int kind = 0; kind < NUM_ACTIVATIONS; ++kind) {
        check(
            "act", width, 2e-6, [&](const Kernels& k, float* out) { k.act(kind, x.data(), width, out); },
            [&](int i) { return activated(kind, x[i]); });
        check(
            "gate", width, 4e-6, [&](const Kernels& k, float* out) { k.gate(kind, x.data(), y.data(), width, out); },
            [&](int i) { return activated(kind, x[i]) * y[i]; });
    }
    check(
        "add", width, 1e-7, [&](const Kernels& k, float* out) { k.add(x.data(), y.data(), width, out); },
        [&](int i) { return (double)x[i] + y[i]; });
    check(
        "scale", width, 1e-7, [&](const Kernels& k, float* out) { k.scale(x.data(), 0.7f, width, out); },
        [&](int i) { return (double)x[i] * 0.7f; });
    check(
        "softcap", width, 2e-6, [&](const Kernels& k, float* out) { k.softcap(x.data(), 5.0f, width, out); },
        [&](int i) { return 5 * std::tanh(x[i] / 5.0); });
}

void check_rope(int heads, int head_dim, int offset, int pairs, bool interleaved) {
    const int width = heads * head_dim;
    const Floats x = normals(width, 4);
    Floats turns(2 * pairs);
    for (int j = 0; j < pairs; ++j) turns[j] = std::cos(0.3f * j + 1), turns[pairs + j] = std::sin(0.3f * j + 1);
    check(
        "rope", width, 1e-6,
        [&](const Kernels& k, float* out) {
            k.rope(x.data(), turns.data(), heads, head_dim, offset, pairs, interleaved, out);
            Floats in_place = x;
            k.rope(in_place.data(), turns.data(), heads, head_dim, offset, pairs, interleaved, in_place.data());
            EXPECT(std::equal(in_place.begin(), in_place.end(), out), "%s: rope in place", k.name);
        },
        [&](int i) -> double {
            const int at = i % head_dim - offset, base = i / head_dim * head_dim + offset;
            if (at < 0 || at >= 2 * pairs) return x[i];
            const int j = interleaved ? at / 2 : at % pairs;
            const double a = x[base + (interleaved ? 2 * j : j)], b = x[base + (interleaved ? 2 * j + 1 : j + pairs)];
            const bool is_first = interleaved ? at % 2 == 0 : at < pairs;
            return is_first ? a * turns[j] - b * turns[pairs + j] : b * turns[j] + a * turns[pairs + j];
        });
}

void time_all() {
    const int width = 1536;
    const Floats x = normals(width, 1), y = normals(width, 2);
    Floats out(width);
    for (const Kernels* k : fast_kernels()) {
        const auto line = [&](const char* what, int arrays, auto&& call) {
            const double s = median_s(call);
            std::printf("%-6s %-8s of %d: %6.0f ns, %5.1f GB/s\n", k->name, what, width, 1e9 * s, 4e-9 * arrays * width / s);
        };
        line("rms_norm", 3, [&] { k->rms_norm(x.data(), y.data(), width, 1e-5f, 0.0f, out.data()); });
        line("silu", 3, [&] { k->gate(SILU, x.data(), y.data(), width, out.data()); });
        line("gelu", 3, [&] { k->gate(GELU_TANH, x.data(), y.data(), width, out.data()); });
        line("add", 3, [&] { k->add(x.data(), y.data(), width, out.data()); });
        line("rope", 2, [&] { k->rope(x.data(), y.data(), width / 64, 64, 0, 32, false, out.data()); });
    }
}

}  // namespace

int main(int argc, char** argv) {
    if (argc > 1 && !std::strcmp(argv[1], "--time")) return time_all(), 0;
    for (int width : {1, 15, 16, 17, 31, 32, 33, 64, 100, 576, 1023}) check_width(width);
    for (bool interleaved : {false, true})
        for (int pairs : {1, 7, 16, 20, 32})
            for (int offset : {0, 3})
                for (int heads : {1, 5}) check_rope(heads, 2 * pairs + offset + 2, offset, pairs, interleaved);
    return report("rowwise");
}
