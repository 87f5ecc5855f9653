// Convolution, selective scan and routing against brute force in double, and against each other bit for bit.
// `--time`: nanoseconds a token and GFLOPS.
#include "peaks.h"

#include <numeric>

using namespace headrace;

namespace {

// Tokens [0, count) in spans of `piece`, channels in ranges of `channels` (a multiple of 16 except the last).
Floats run_conv(const Kernels& k, const ConvShape& shape, const Floats& x, int count, Floats* state, int piece, int channels,
                bool in_place) {
    const size_t stride = shape.width + 3;
    Floats y(stride * count, 7.0f), other(state->size());
    const float* from = state->empty() ? nullptr : state->data();
    Floats* into = in_place ? state : &other;
    for (int begin = 0; begin < count; begin += piece) {
        for (int first = 0; first < shape.width; first += channels)
            k.conv(shape, x.data() + (size_t)begin * shape.width, shape.width, std::min(piece, count - begin), from, into->data(),
                   y.data() + begin * stride, stride, first, std::min(first + channels, shape.width));
        from = into->data();
        if (!in_place && begin + piece < count) into = into == state ? &other : state;
    }
    if (into != state) *state = *into;
    return y;
}

void check_conv(int width, int kernel, int count, bool has_bias) {
    const Floats weight = normals((size_t)kernel * width, 1), bias = normals(width, 2), x = normals((size_t)count * width, 3);
    const Floats state = normals((size_t)(kernel - 1) * width, 4);
    const ConvShape shape{width, kernel, weight.data(), has_bias ? bias.data() : nullptr};
    Floats expected, expected_state;
    for (const Kernels* k : all_kernels())
        for (int piece : {count, 1, 2, 5})
            for (int channels : {(width + 15) / 16 * 16, 16, 48})
                for (bool in_place : {false, true}) {
                    Floats s = state;
                    const Floats y = run_conv(*k, shape, x, count, &s, piece, channels, in_place);
                    if (expected.empty()) {
                        expected = y, expected_state = s;
                        for (int t = 0; t < count; ++t)
                            for (int c = 0; c < width; ++c) {
                                double right = has_bias ? bias[c] : 0.0;
                                for (int j = 0; j < kernel; ++j) {
                                    const int at = t - (kernel - 1) + j;
                                    right += (double)weight[j * width + c] *
                                             (at >= 0 ? x[at * width + c] : state[(at + kernel - 1) * width + c]);
                                }
                                EXPECT(std::fabs(y[t * (width + 3) + c] - right) < 1e-5, "conv %d %d %d: %g, not %g", width, kernel, count,
                                       y[t * (width + 3) + c], right);
                            }
                        for (int j = 0; j < kernel - 1; ++j)
                            for (int c = 0; c < width; ++c) {
                                const int at = count - (kernel - 1) + j;
                                EXPECT(s[j * width + c] == (at >= 0 ? x[at * width + c] : state[(at + kernel - 1) * width + c]), "state of conv");
                            }
                    }
                    EXPECT(y == expected && s == expected_state, "%s: conv %d %d %d in pieces of %d", k->name, width, kernel, count, piece);
                }
}

void check_scan(int width, int states, int count) {
    Floats a = normals((size_t)states * width, 1), dt = normals((size_t)count * width, 2), x = normals((size_t)count * width, 3);
    for (float& v : a) v = -std::fabs(v) * 4;
    for (float& v : dt) v = std::fabs(v) * 0.5f;
    dt[0] = 40;  // a decay of nothing
    const Floats b = normals((size_t)count * states, 4), c = normals((size_t)count * states, 5), d = normals(width, 6);
    const Floats state = normals((size_t)states * width, 7);
    const SsmShape shape{width, states, a.data(), d.data()};
    Floats expected, expected_state;
    for (const Kernels* k : all_kernels())
        for (int piece : {count, 1, 3})
            for (int channels : {(width + 15) / 16 * 16, 16})
                for (bool in_place : {false, true}) {
                    Floats from = state, into(state.size()), y((size_t)count * width);
                    for (int begin = 0; begin < count; begin += piece) {
                        const SsmInputs in{x.data() + begin * width, dt.data() + begin * width, b.data() + begin * states, c.data() + begin * states,
                                           (size_t)width, (size_t)width, (size_t)states, (size_t)states};
                        for (int first = 0; first < width; first += channels)
                            k->ssm_scan(shape, in, std::min(piece, count - begin), from.data(), in_place ? from.data() : into.data(),
                                        y.data() + begin * width, width, first, std::min(first + channels, width));
                        if (!in_place) from = into;
                    }
                    if (expected.empty()) {
                        expected = y, expected_state = from;
                        for (int ch = 0; ch < width; ++ch) {
                            std::vector<double> h(states);
                            for (int s = 0; s < states; ++s) h[s] = state[s * width + ch];
                            for (int t = 0; t < count; ++t) {
                                double right = (double)d[ch] * x[t * width + ch];
                                for (int s = 0; s < states; ++s) {
                                    h[s] = std::exp((double)dt[t * width + ch] * a[s * width + ch]) * h[s] +
                                           (double)dt[t * width + ch] * x[t * width + ch] * b[t * states + s];
                                    right += h[s] * c[t * states + s];
                                }
                                EXPECT(std::fabs(y[t * width + ch] - right) < 2e-5 * (1 + std::fabs(right)), "scan %d %d: %g, not %g", width, states,
                                       y[t * width + ch], right);
                            }
                        }
                    }
                    EXPECT(y == expected && from == expected_state, "%s: scan %d %d %d in pieces of %d", k->name, width, states, count, piece);
                }
    Floats y(width), zero(state.size(), 0.0f), s1(state.size()), s2(state.size()), y2(width);
    const SsmInputs in{x.data(), dt.data(), b.data(), c.data(), 0, 0, 0, 0};
    scalar_kernels().ssm_scan(shape, in, 1, nullptr, s1.data(), y.data(), width, 0, width);
    scalar_kernels().ssm_scan(shape, in, 1, zero.data(), s2.data(), y2.data(), width, 0, width);
    EXPECT(y == y2 && s1 == s2, "no state is the zero state");
}

void check_route(int experts, int top_k, bool sigmoid, bool has_bias, int groups, int top_groups, bool renormalize, unsigned seed) {
    Floats logits = normals(experts, seed, 2), bias = normals(experts, seed + 1, 0.2f);
    if (seed % 3 == 0)
        for (float& v : logits) v = std::round(v);  // equal scores
    if (seed % 3 == 0)
        for (float& v : bias) v = 0;
    const RouteShape shape{experts, top_k, sigmoid, has_bias ? bias.data() : nullptr, groups, top_groups, renormalize, 2.5f};
    Floats expected;
    for (const Kernels* k : all_kernels()) {
        Floats out(2 * top_k, NAN), scratch(k->route_scratch(shape), NAN);
        k->route(shape, logits.data(), out.data(), scratch.data());
        if (!expected.empty()) {
            EXPECT(std::memcmp(out.data(), expected.data(), out.size() * 4) == 0, "%s: route, other bits", k->name);
            continue;
        }
        expected = out;
        // Scores as this kernel has them where they tie, exact ones otherwise: ties come from equal logits.
        std::vector<double> scores(experts), choice;
        double total = 0;
        for (int i = 0; i < experts; ++i) total += scores[i] = sigmoid ? 1 / (1 + std::exp(-(double)logits[i])) : std::exp((double)logits[i]);
        if (!sigmoid)
            for (double& v : scores) v /= total;
        choice = scores;
        if (has_bias)
            for (int i = 0; i < experts; ++i) choice[i] += bias[i];
        const auto falling = [](const std::vector<double>& by) {
            std::vector<int> order(by.size());
            std::iota(order.begin(), order.end(), 0);
            std::stable_sort(order.begin(), order.end(), [&](int p, int q) { return by[p] > by[q]; });
            return order;
        };
        if (groups > 1) {
            std::vector<double> best(groups);
            const int size = experts / groups;
            for (int g = 0; g < groups; ++g) {
                std::vector<double> members(choice.begin() + g * size, choice.begin() + (g + 1) * size);
                std::sort(members.rbegin(), members.rend());
                best[g] = members[0] + (size > 1 ? members[1] : 0);
            }
            const std::vector<int> order = falling(best);
            for (int g = top_groups; g < groups; ++g)
                for (int i = order[g] * size; i < (order[g] + 1) * size; ++i) choice[i] = -INFINITY;
        }
        const std::vector<int> order = falling(choice);
        double sum = 0;
        for (int i = 0; i < top_k; ++i) sum += scores[order[i]];
        for (int i = 0; i < top_k; ++i) {
            EXPECT(out[i] == order[i], "route: place %d of %d has expert %g, not %d", i, top_k, out[i], order[i]);
            const double right = scores[order[i]] / (renormalize ? sum : 1) * 2.5;
            EXPECT(std::fabs(out[top_k + i] - right) < 2e-6, "route: weight %g, not %g", out[top_k + i], right);
        }
    }
}

void run_times() {
    const int width = 1536, states = 16, kernel = 4, count = 256;
    const Floats x = normals((size_t)count * width, 1), weight = normals((size_t)kernel * width, 2), bias = normals(width, 3);
    Floats dt = normals((size_t)count * width, 4, 0.1f), a = normals((size_t)states * width, 5), y((size_t)count * width), state(states * width);
    for (float& v : a) v = -std::fabs(v);
    for (float& v : dt) v = std::fabs(v);
    const Floats b = normals((size_t)count * states, 6), c = normals((size_t)count * states, 7), logits = normals(256, 8);
    const ConvShape conv{width, kernel, weight.data(), bias.data()};
    const SsmShape scan{width, states, a.data(), bias.data()};
    const SsmInputs in{x.data(), dt.data(), b.data(), c.data(), (size_t)width, (size_t)width, (size_t)states, (size_t)states};
    const RouteShape route{256, 8, true, bias.data(), 8, 4, true, 2.5f};
    for (const Kernels* k : fast_kernels()) {
        const Peaks peaks = measure_peaks(*k);
        const double conv_s = median_s([&] { k->conv(conv, x.data(), width, count, nullptr, state.data(), y.data(), width, 0, width); });
        const double scan_s = median_s([&] { k->ssm_scan(scan, in, count, nullptr, state.data(), y.data(), width, 0, width); });
        Floats out(16), scratch(k->route_scratch(route));
        const double route_s = median_s([&] { for (int i = 0; i < count; ++i) k->route(route, logits.data(), out.data(), scratch.data()); });
        std::printf("%-7s conv 4 of 1536: %5.0f ns a token, %5.1f GFLOPS, %5.1f GB/s; scan 1536 x 16: %6.0f ns, %5.1f GFLOPS counting exp as 20 "
                    "(%.0f %% of peak); route 8 of 256: %5.0f ns\n",
                    k->name, conv_s / count * 1e9, 2e-9 * width * kernel * count / conv_s, 8e-9 * width * count / conv_s, scan_s / count * 1e9,
                    27e-9 * width * states * count / scan_s, 2700e-9 * width * states * count / scan_s / peaks.floats, route_s / count * 1e9);
    }
}

}  // namespace

int main(int argc, char** argv) {
    if (argc > 1 && !std::strcmp(argv[1], "--time")) {
        run_times();
        return 0;
    }
    for (int width : {1, 15, 16, 48, 100})
        for (int kernel : {1, 2, 4, 5})
            for (int count : {1, 3, 11}) check_conv(width, kernel, count, width % 2 == 0);
    for (int width : {5, 16, 50})
        for (int states : {1, 8, 16})
            for (int count : {1, 9}) check_scan(width, states, count);
    for (unsigned seed = 0; seed < 120; ++seed) {
        const bool grouped = seed % 4 == 1;
        const int experts = grouped ? (seed % 8 == 1 ? 64 : 40) : (const int[]){8, 3, 60, 128, 17}[seed % 5];
        check_route(experts, std::min(experts, 1 + (int)seed % 8), seed % 2, seed % 5 < 2, grouped ? 8 : 1, grouped ? 3 : 1, seed % 3 != 1, seed);
    }
    return report("recurrent");
}
