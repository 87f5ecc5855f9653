// Argmax, log-sum-exp, ranks and the sampler against plain sorts in double, and against each other bit for bit.
// `--time`: microseconds a row and GB/s.
#include "peaks.h"

#include <numeric>

using namespace headrace;

namespace {

// Line by line what headrace/executor/sampler.py does.
int32_t reference_sample(const std::vector<float>& logits, const SampleParams& p) {
    const int32_t vocab = (int32_t)logits.size();
    std::vector<double> x(logits.begin(), logits.end());
    for (int i = 0; i < p.num_seen; ++i) {
        double& v = x[p.seen[i]];
        v = v > 0 ? v / p.repetition_penalty : v * p.repetition_penalty;
    }
    for (int i = 0; i < p.num_generated; ++i)
        x[p.generated[i]] -= p.presence_penalty + p.frequency_penalty * p.generated_counts[i];
    for (int i = 0; i < p.num_biases; ++i) x[p.bias_ids[i]] += p.biases[i];
    for (int i = 0; i < p.num_banned; ++i) x[p.banned[i]] = -INFINITY;
    for (int i = 0; i < vocab; ++i)
        if (p.allowed && !(p.allowed[i / 32] >> (i % 32) & 1)) x[i] = -INFINITY;
    if (p.temperature == 0) return (int32_t)(std::max_element(x.begin(), x.end()) - x.begin());
    const double peak = *std::max_element(x.begin(), x.end());
    for (double& v : x) v = (v - peak) / p.temperature;
    std::vector<int32_t> kept(vocab);
    std::iota(kept.begin(), kept.end(), 0);
    const auto falling = [](const std::vector<double>& by) {
        std::vector<int32_t> order(by.size());
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return by[a] > by[b]; });
        return order;
    };
    if (0 < p.top_k && p.top_k < vocab) {
        kept = falling(x);
        kept.resize(p.top_k);
        std::sort(kept.begin(), kept.end());
    }
    std::vector<double> w;
    for (int32_t id : kept) w.push_back(std::exp(x[id]));
    const auto choose = [&](std::vector<int32_t> places) {
        std::sort(places.begin(), places.end());
        std::vector<int32_t> ids;
        std::vector<double> weights;
        for (int32_t place : places) ids.push_back(kept[place]), weights.push_back(w[place]);
        kept = ids, w = weights;
    };
    if (0 < p.typical_p && p.typical_p < 1) {
        double total = 0, entropy = 0;
        for (double v : w) total += v;
        for (double v : w) entropy -= v > 0 ? v / total * std::log(v / total) : 0;
        std::vector<int32_t> order(w.size());
        std::iota(order.begin(), order.end(), 0);
        std::vector<double> distance;
        for (double v : w) distance.push_back(std::fabs(-std::log(v / total) - entropy));
        std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return distance[a] < distance[b]; });
        size_t count = 0;
        for (double sum = 0; count < order.size() && sum < p.typical_p * total;) sum += w[order[count++]];
        order.resize(count);
        choose(order);
    }
    if (p.top_p < 1) {
        std::vector<int32_t> order = falling(w);
        std::vector<double> sums;
        double sum = 0;
        for (int32_t place : order) sums.push_back(sum += w[place]);
        order.resize(std::min<size_t>(std::lower_bound(sums.begin(), sums.end(), p.top_p * sums.back()) - sums.begin() + 1, order.size()));
        choose(order);
    }
    if (p.min_p > 0) {
        std::vector<int32_t> places;
        for (size_t i = 0; i < w.size(); ++i)
            if (w[i] >= p.min_p * *std::max_element(w.begin(), w.end())) places.push_back((int32_t)i);
        choose(places);
    }
    if (p.xtc_threshold > 0) {
        double total = 0;
        for (double v : w) total += v;
        std::vector<int32_t> top, places;
        for (int32_t place : falling(w))
            if (w[place] >= p.xtc_threshold * total) top.push_back(place);
        for (size_t i = 0; i < w.size(); ++i)
            if (top.empty() || (int32_t)i == top.back() || std::find(top.begin(), top.end(), (int32_t)i) == top.end())
                places.push_back((int32_t)i);
        choose(places);
    }
    std::vector<double> cumulative;
    double sum = 0;
    for (double v : w) cumulative.push_back(sum += v);
    const size_t index = std::upper_bound(cumulative.begin(), cumulative.end(), p.uniform * sum) - cumulative.begin();
    return kept[std::min(index, kept.size() - 1)];
}

struct Row {
    std::vector<float> logits;
    std::vector<int32_t> seen, generated, counts, bias_ids, banned;
    std::vector<double> biases;
    std::vector<uint32_t> allowed;
    SampleParams params{};

    Row(int vocab, std::mt19937& random) {
        std::normal_distribution<float> normal;
        std::uniform_real_distribution<double> uniform;
        const auto pick = [&](int n) { return (int)(random() % n); };
        const auto ids = [&](int most) {
            std::vector<int32_t> some(vocab);
            std::iota(some.begin(), some.end(), 0);
            std::shuffle(some.begin(), some.end(), random);
            some.resize(std::min(most, vocab) * uniform(random));
            return some;
        };
        logits.resize(vocab);
        const float spread = pick(3) == 0 ? 0.01f : pick(2) ? 3.0f : 8.0f;
        const bool coarse = pick(3) == 0;  // many equal logits
        for (float& x : logits) x = coarse ? std::round(2 * normal(random)) : spread * normal(random);
        params.temperature = pick(8) == 0 ? 0.0 : 0.1 + 1.5 * uniform(random);
        params.top_k = pick(2) ? 0 : 1 + pick(std::min(vocab + 3, pick(2) ? 60 : 100000));
        params.top_p = pick(2) ? 1.0 : 0.02 + 0.98 * uniform(random);
        params.min_p = pick(3) ? 0.0 : uniform(random) * (pick(2) ? 1.0 : 0.05);
        params.typical_p = pick(3) ? pick(2) : 0.02 + 0.98 * uniform(random);
        params.xtc_threshold = pick(3) ? 0.0 : uniform(random) * (pick(2) ? 0.5 : 0.05);
        params.uniform = pick(10) == 0 ? 0.0 : uniform(random);
        params.repetition_penalty = params.frequency_penalty = 1;
        if (pick(2)) {
            seen = ids(200), generated = ids(100);
            for (size_t i = 0; i < generated.size(); ++i) counts.push_back(1 + pick(5));
            params.repetition_penalty = 0.5 + uniform(random);
            params.presence_penalty = 2 * uniform(random) - 1, params.frequency_penalty = 2 * uniform(random) - 1;
        }
        if (pick(3) == 0) {
            bias_ids = ids(20);
            for (size_t i = 0; i < bias_ids.size(); ++i) biases.push_back(10 * uniform(random) - 5);
        }
        if (pick(3) == 0) banned = ids(vocab - 1);
        if (pick(4) == 0) {
            allowed.resize((vocab + 31) / 32);
            const int density = 1 + pick(30);
            for (uint32_t& word : allowed)
                for (int bit = 0; bit < 32; ++bit) word |= (uint32_t)(pick(density) == 0) << bit;
            const int32_t sure = pick(vocab);
            allowed[sure / 32] |= 1u << (sure % 32);
            banned.erase(std::remove(banned.begin(), banned.end(), sure), banned.end());
        }
        point();
    }
    Row(const Row&) = delete;

    void point() {
        params.seen = seen.data(), params.num_seen = (int32_t)seen.size();
        params.generated = generated.data(), params.generated_counts = counts.data(), params.num_generated = (int32_t)generated.size();
        params.bias_ids = bias_ids.data(), params.biases = biases.data(), params.num_biases = (int32_t)bias_ids.size();
        params.banned = banned.data(), params.num_banned = (int32_t)banned.size();
        params.allowed = allowed.empty() ? nullptr : allowed.data();
    }
};

void check_sampler() {
    std::mt19937 random(11);
    const int vocabs[] = {1, 2, 5, 33, 100, 511, 512, 513, 1500, 5000};
    int drawn = 0, first = 0;
    const int num_rows = IS_SHORT ? 400 : 4000;
    for (int i = 0; i < num_rows; ++i) {
        const int vocab = i % 400 == 399 ? 49152 : vocabs[i % 10];
        Row row(vocab, random);
        const int32_t right = reference_sample(row.logits, row.params);
        drawn += row.params.temperature > 0, first += row.params.temperature > 0 && right == 0;
        for (const Kernels* kernels : all_kernels()) {
            std::vector<double> scratch(kernels->sample_scratch(vocab), NAN);
            const int32_t got = kernels->sample_row(row.logits.data(), vocab, row.params, scratch.data());
            EXPECT(got == right, "%s: row %d of %d: token %d, not %d (T %g, top-k %d, typical-p %g, top-p %g, min-p %g, XTC %g, u %g)",
                   kernels->name, i, vocab, got, right, row.params.temperature, row.params.top_k, row.params.typical_p, row.params.top_p,
                   row.params.min_p, row.params.xtc_threshold, row.params.uniform);
        }
    }
    // Nothing allowed, and a number that sits at the end of the cumulative sum.
    for (const Kernels* kernels : all_kernels()) {
        std::vector<float> logits(1000, 1.0f);
        std::vector<uint32_t> none(32, 0);
        std::vector<double> scratch(kernels->sample_scratch(1000));
        SampleParams params{};
        params.temperature = 1, params.top_p = 1, params.repetition_penalty = 1, params.allowed = none.data();
        EXPECT(kernels->sample_row(logits.data(), 1000, params, scratch.data()) == -1, "nothing allowed");
        params.allowed = nullptr, params.uniform = std::nextafter(1.0, 0.0);
        EXPECT(kernels->sample_row(logits.data(), 1000, params, scratch.data()) == 999, "the last of equals");
        logits.assign(1000, -2000.0f), logits[3] = 0.0f;
        EXPECT(kernels->sample_row(logits.data(), 1000, params, scratch.data()) == 3, "zero weights at the end");
    }
    EXPECT(drawn > num_rows * 3 / 4 && first < drawn / 2, "%d drawn, %d of them token 0", drawn, first);
}

// Frequencies: a thousand evenly spaced numbers give each token its share.
void check_distribution() {
    const std::vector<float> logits{0.0f, 1.0f, -1.0f, 0.5f, 2.0f};
    SampleParams params{};
    params.temperature = 0.7, params.top_p = 1, params.repetition_penalty = 1;
    std::vector<double> scratch(scalar_kernels().sample_scratch(5)), counts(5), p;
    for (int i = 0; i < 10000; ++i) {
        params.uniform = (i + 0.5) / 10000;
        counts[scalar_kernels().sample_row(logits.data(), 5, params, scratch.data())] += 1e-4;
    }
    double total = 0;
    for (float x : logits) p.push_back(std::exp(x / 0.7)), total += p.back();
    for (int i = 0; i < 5; ++i) EXPECT(std::fabs(counts[i] - p[i] / total) < 2e-4, "token %d: %g of %g", i, counts[i], p[i] / total);
}

void check_rows() {
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    double worst = 0;
    for (int count : {1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 1000, 2048, 2049, 49152, 262144}) {
        if (IS_SHORT && count > 49152) continue;
        for (int kind = 0; kind < 5; ++kind) {
            std::vector<float> x(count);
            for (float& v : x) v = kind == 0 ? 0.0f : kind == 1 ? std::round(normal(random)) : 6 * normal(random);
            if (kind == 3) for (int i = 0; i < count; i += 3) x[i] = -INFINITY;
            if (kind == 4) x[count - 1] = 100;
            const int32_t right = (int32_t)(std::max_element(x.begin(), x.end()) - x.begin());
            double sum = 0;
            for (float v : x) sum += std::exp((double)v - x[right]);
            const double log_sum = x[right] + std::log(sum);
            const double expected = scalar_kernels().log_sum_exp(x.data(), count);
            if (std::isfinite(log_sum)) worst = std::max(worst, std::fabs(expected - log_sum));
            std::vector<int32_t> order(count);
            std::iota(order.begin(), order.end(), 0);
            std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return x[a] > x[b]; });
            const int32_t at = (int32_t)(random() % count);
            const int32_t rank = (int32_t)std::count_if(x.begin(), x.end(), [&](float v) { return v > x[at]; });
            for (const Kernels* kernels : all_kernels()) {
                EXPECT(kernels->argmax(x.data(), count) == right, "%s: argmax of %d, kind %d", kernels->name, count, kind);
                const double got = kernels->log_sum_exp(x.data(), count);
                EXPECT(std::memcmp(&got, &expected, 8) == 0, "%s: log_sum_exp of %d, kind %d: other bits", kernels->name, count, kind);
                EXPECT(kernels->rank_of(x.data(), count, at) == rank, "%s: rank_of %d", kernels->name, count);
                for (int k : {1, 5, 20, count}) {
                    k = std::min(k, count);
                    if (k > 3000) continue;
                    std::vector<int32_t> ids(k);
                    std::vector<float> values(k);
                    std::vector<double> scratch(2 * k);
                    kernels->top_k(x.data(), count, k, ids.data(), values.data(), scratch.data());
                    for (int i = 0; i < k; ++i)
                        EXPECT(ids[i] == order[i] && values[i] == x[order[i]], "%s: top %d of %d, kind %d", kernels->name, k, count, kind);
                }
            }
        }
    }
    EXPECT(worst < 2.4e-6, "log_sum_exp: error %g", worst);
    for (const Kernels* kernels : all_kernels()) {
        const std::vector<float> none(70, -INFINITY);
        EXPECT(kernels->argmax(none.data(), 70) == 0, "argmax of nothing");
    }
}

template <typename F>
double median_us(F&& work) {
    return 1e6 * median_s(work, 15);
}

void run_times() {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    volatile double sink = 0;
    for (const Kernels* kernels : fast_kernels()) {
        measure_peaks(*kernels);
        for (int vocab : {49152, 262144}) {
            std::vector<float> x(vocab);
            for (float& v : x) v = 2.5f * normal(random);
            for (int i = 0; i < 40; ++i) x[random() % vocab] = 17.0f - 0.2f * i;  // a few likely tokens, as in text
            std::vector<double> scratch(kernels->sample_scratch(vocab));
            const auto sampling = [&](int top_k, double top_p, double min_p, double temperature, double typical_p = 1, double xtc = 0) {
                SampleParams p{};
                p.temperature = temperature, p.top_k = top_k, p.top_p = top_p, p.min_p = min_p, p.uniform = 0.37, p.repetition_penalty = 1, p.typical_p = typical_p, p.xtc_threshold = xtc;
                return median_us([&] { sink = kernels->sample_row(x.data(), vocab, p, scratch.data()); });
            };
            std::vector<int32_t> ids(20);
            std::vector<float> values(20);
            const double argmax = median_us([&] { sink = kernels->argmax(x.data(), vocab); });
            std::printf("%-7s %6d logits: argmax %5.1f us (%.0f GB/s, %.0f %% of reading as much again and again), log_sum_exp %5.1f us, "
                        "rank %5.1f us, top 20 %5.1f us; sample: greedy %5.1f, plain %5.1f, top-k 50 %5.1f, top-k 50 + top-p %5.1f, top-p 0.9 %5.1f, min-p %5.1f, typical-p 0.9 %5.1f, XTC %5.1f us\n",
                        kernels->name, vocab, argmax, 4e-3 * vocab / argmax, 0.4 * vocab / argmax / read_gbs((size_t)4 * vocab),
                        median_us([&] { sink = kernels->log_sum_exp(x.data(), vocab); }),
                        median_us([&] { sink = kernels->rank_of(x.data(), vocab, 7); }),
                        median_us([&] { kernels->top_k(x.data(), vocab, 20, ids.data(), values.data(), scratch.data()); }),
                        sampling(0, 1, 0, 0), sampling(0, 1, 0, 1), sampling(50, 1, 0, 1), sampling(50, 0.9, 0, 1), sampling(0, 0.9, 0, 1),
                        sampling(0, 1, 0.05, 1), sampling(0, 1, 0, 1, 0.9), sampling(0, 1, 0, 1, 1, 0.1));
        }
    }
}

}  // namespace

int main(int argc, char** argv) {
    if (argc > 1 && !std::strcmp(argv[1], "--time")) {
        run_times();
        return 0;
    }
    check_rows();
    check_distribution();
    check_sampler();
    return report("readout");
}
