// headrace._native: what Python sees of the native backend.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <type_traits>

#include "ops.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace headrace;

namespace {

using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Doubles = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using OutInts = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using OutDoubles = nb::ndarray<double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Words = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using StoredRows = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Methods of Model that add an op made of their arguments. The names of those that go row by row are kept: the places of
// buffers depend on it.
struct OpMethods {
    nb::class_<Model>& model;
    nb::list row_by_row;

    template <class T, class... Arguments, class... Names>
    void add(const char* name, Names... names) {
        model.def(name, [](Model& self, Arguments... arguments) {
            self.add_op(std::make_unique<T>(std::move(arguments)...));
        }, names...);
        if constexpr (std::is_base_of_v<RowOp, T>) row_by_row.append(name);
    }
};

// Spans [n, 3] (start, count, first row); tables of all spans of group 0, then group 1, ..., and where each begins.
Step step_of(const Ints& token_ids, const Ints& positions, const std::optional<Ints>& parents, const Ints& spans,
             const Ints& tables, const Ints& table_starts) {
    Step step;
    step.num_tokens = (int32_t)token_ids.shape(0);
    step.token_ids = token_ids.data();
    step.positions = positions.data();
    step.parents = parents ? parents->data() : nullptr;
    const size_t num_spans = spans.shape(0) / 3;
    for (size_t i = 0; i < num_spans; ++i) {
        Span span{};
        span.start = spans.data()[3 * i];
        span.count = spans.data()[3 * i + 1];
        span.first_row = spans.data()[3 * i + 2];
        step.spans.push_back(span);
    }
    for (size_t i = 0; i < table_starts.shape(0); ++i) step.tables.push_back(tables.data() + table_starts.data()[i]);
    return step;
}

void run_trunk(Model& model, Ints token_ids, Ints positions, std::optional<Ints> parents, Ints spans, Ints tables,
               Ints table_starts) {
    Step step = step_of(token_ids, positions, parents, spans, tables, table_starts);
    nb::gil_scoped_release released;
    model.run_trunk(std::move(step));
}

// Each step as for `run_trunk`, without parents.
void load(Model& model, const std::vector<std::tuple<Ints, Ints, Ints, Ints, Ints>>& steps, Buffer last) {
    std::vector<Step> taken;
    for (const auto& [token_ids, positions, spans, tables, table_starts] : steps)
        taken.push_back(step_of(token_ids, positions, std::nullopt, spans, tables, table_starts));
    nb::gil_scoped_release released;
    model.load(std::move(taken), last);
}

// Logits [rows, vocab] of readout rows: a view that holds until the next call.
nb::ndarray<nb::numpy, const float, nb::ndim<2>> run_head(nb::handle self, Ints rows, Buffer last) {
    Model& model = nb::cast<Model&>(self);
    const float* logits;
    {
        nb::gil_scoped_release released;
        logits = model.run_head(rows.data(), (int32_t)rows.shape(0), last);
    }
    return {logits, {rows.shape(0), (size_t)last.width}, self};
}

// The whole step. Arrays of readouts as in `Readouts`; the outputs are written in place.
void run(Model& model, Ints token_ids, Ints positions, std::optional<Ints> parents, Ints spans, Ints tables,
         Ints table_starts, Ints rows, Ints targets, Ints num_top, Doubles numbers, Ints ids, Doubles values, Ints starts,
         Ints mask_rows, Words masks, OutInts tokens, OutDoubles logprobs, OutInts ranks, OutInts top_ids, OutDoubles top_logprobs, int32_t max_top,
         int32_t vocab_size, Buffer last) {
    Step step = step_of(token_ids, positions, parents, spans, tables, table_starts);
    const Readouts readouts{(int32_t)rows.shape(0), std::min(vocab_size, last.width), rows.data(), targets.data(),
                            num_top.data(), numbers.data(), ids.data(), values.data(), starts.data(),
                            mask_rows.data(), masks.data(), tokens.data(), logprobs.data(), ranks.data(), max_top,
                            top_ids.data(), top_logprobs.data()};
    nb::gil_scoped_release released;
    model.run(std::move(step), readouts, last);
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "The native CPU backend of Headrace.";
    nb::set_leak_warnings(false);  // a server freezes its objects (gc.freeze): they live until the process ends

    nb::enum_<Packing>(m, "Packing")
        .value("F32", Packing::F32)
        .value("F16", Packing::F16)
        .value("BF16", Packing::BF16)
        .value("Q4_0", Packing::Q4_0)
        .value("Q4_1", Packing::Q4_1)
        .value("Q5_0", Packing::Q5_0)
        .value("Q5_1", Packing::Q5_1)
        .value("Q8_0", Packing::Q8_0)
        .value("Q4_K", Packing::Q4_K)
        .value("Q5_K", Packing::Q5_K)
        .value("Q6_K", Packing::Q6_K);
    nb::enum_<Elementwise>(m, "Elementwise")
        .value("GATE", Elementwise::GATE)
        .value("ACT", Elementwise::ACT)
        .value("ADD", Elementwise::ADD)
        .value("SCALE", Elementwise::SCALE)
        .value("SOFTCAP", Elementwise::SOFTCAP);
    nb::class_<Buffer>(m, "Buffer")
        .def("__init__", [](Buffer* self, int32_t offset, int32_t width, bool is_quantized, int32_t num_outliers, int32_t list) {
            const int32_t most = width > MOST_WIDTH_WITH_OUTLIERS ? 0 : list < 0 ? MOST_OUTLIERS : MOST_FIXED;
            if (num_outliers > most) throw std::invalid_argument("a row has no room for so many outliers");
            new (self) Buffer{offset, width, is_quantized, num_outliers, list};
        }, "offset"_a, "width"_a, "is_quantized"_a, "num_outliers"_a, "list"_a);
    nb::class_<RouteShape>(m, "RouteShape")
        .def("__init__", [](RouteShape* self, int32_t num_experts, int32_t top_k, bool is_sigmoid, int32_t num_groups,
                            int32_t top_groups, bool renormalize, float scaling) {
            new (self) RouteShape{num_experts, top_k, is_sigmoid, nullptr, num_groups, top_groups, renormalize, scaling};
        }, "num_experts"_a, "top_k"_a, "is_sigmoid"_a, "num_groups"_a, "top_groups"_a, "renormalize"_a, "scaling"_a);
    nb::class_<AttentionShape>(m, "AttentionShape")
        .def("__init__", [](AttentionShape* self, int32_t heads, int32_t kv_heads, int32_t key_width, int32_t value_width,
                            float scale, int32_t window, float softcap) {
            new (self) AttentionShape{heads, kv_heads, key_width, value_width, scale, window, softcap};
        }, "heads"_a, "kv_heads"_a, "key_width"_a, "value_width"_a, "scale"_a, "window"_a, "softcap"_a);
    nb::class_<Linear::Part>(m, "LinearPart")
        .def("__init__", [](Linear::Part* self, int matrix, int bias, Buffer out, bool accumulate) {
            new (self) Linear::Part{matrix, bias, out, accumulate};
        }, "matrix"_a, "bias"_a, "out"_a, "accumulate"_a);

    m.attr("OUTLIER_FLOATS") = OUTLIER_FLOATS;
    m.attr("MOST_WIDTH_WITH_OUTLIERS") = MOST_WIDTH_WITH_OUTLIERS;
    m.def("isas", [] {
        std::vector<std::string> names;
        if (avx512_kernels()) names.push_back("avx512");
        if (avx2_kernels()) names.push_back("avx2");
        names.push_back("scalar");
        return names;
    }, "Instruction sets this processor can run, best first.");

    nb::class_<Model> model_class(m, "Model");
    model_class
        .def(nb::init<int, int, int, const std::string&>(), "num_threads"_a, "max_tokens"_a, "planes"_a, "isa"_a)
        .def("add_matrix", [](Model& model, Packing packing, int32_t width, StoredRows stored) {
            return model.add_matrix(packing, (int32_t)stored.shape(0), width, stored.data(), stored.shape(1));
        }, "packing"_a, "width"_a, "stored"_a.noconvert())
        .def("pack", &Model::pack, nb::call_guard<nb::gil_scoped_release>())
        .def("add_vector", [](Model& model, Floats values) { return model.add_vector(values.data(), values.shape(0)); })
        .def("add_cache", &Model::add_cache, "group"_a, "block_size"_a, "num_blocks"_a, "is_f16"_a, "kv_heads"_a,
             "key_width"_a, "value_width"_a)
        .def("add_state", &Model::add_state, "group"_a, "num_blocks"_a, "size"_a)
        .def("add_list", &Model::add_list, "width"_a, "num_outliers"_a)
        .def("begin_head", &Model::begin_head)
        .def("finish", &Model::finish, "trunk_width"_a, "head_width"_a, "rows_per_tile"_a)
        .def("load", &load, "steps"_a, "last"_a)
        .def("copy_block", &Model::copy_block, "group"_a, "source"_a, "target"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("run_trunk", &run_trunk, "token_ids"_a, "positions"_a, "parents"_a.none(), "spans"_a, "tables"_a,
             "table_starts"_a)
        .def("run", &run, "token_ids"_a, "positions"_a, "parents"_a.none(), "spans"_a, "tables"_a, "table_starts"_a, "rows"_a,
             "targets"_a, "num_top"_a, "numbers"_a, "ids"_a, "values"_a, "starts"_a, "mask_rows"_a, "masks"_a,
             "tokens"_a, "logprobs"_a, "ranks"_a, "top_ids"_a, "top_logprobs"_a, "max_top"_a, "vocab_size"_a, "last"_a)
        .def("run_head", [](nb::handle self, Ints rows, Buffer last) { return run_head(self, rows, last); }, "rows"_a,
             "last"_a)
        .def("trunk_rows", [](nb::handle self, Buffer buffer) -> nb::ndarray<nb::numpy, const float, nb::ndim<2>> {
            const Model& model = nb::cast<const Model&>(self);
            return {model.trunk_floats(buffer), {(size_t)model.step().num_tokens, (size_t)buffer.width}, self};
        }, "buffer"_a, "A buffer of the trunk's, of all tokens of the last step: a view that holds until the next step.")
        .def("touch_cache", nb::overload_cast<size_t>(&Model::touch_cache, nb::const_), "most_bytes"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("touch_cache_meanwhile", &Model::touch_cache_meanwhile, "most_bytes"_a)
        .def("set_profiling", &Model::set_profiling, "on"_a)
        .def("op_times", [](const Model& model) {
            nb::list all;
            for (const auto& time : model.op_times())
                all.append(nb::make_tuple(time.name, time.weight_bytes, time.runs, time.nanoseconds));
            return all;
        }, "Per op (name, bytes of weights, runs, nanoseconds) since profiling was switched on.")
        .def_prop_ro("isa", [](const Model& model) { return model.kernels().name; })
        .def_prop_ro("num_threads", &Model::num_threads)
        .def_prop_ro("num_attending", &Model::num_attending)
        .def_prop_ro("packed_bytes", &Model::packed_bytes);

    OpMethods ops{model_class, nb::list()};
    ops.add<Embed, int, Buffer>("embed", "matrix"_a, "out"_a);
    ops.add<SelectRows, Buffer, Buffer>("select_rows", "in_"_a, "out"_a);
    ops.add<Norm, Buffer, Buffer, int, int32_t, float, float>("norm", "in_"_a, "out"_a, "weight"_a, "heads"_a, "eps"_a,
                                                              "offset"_a);
    ops.add<Quantize, Buffer, Buffer>("quantize", "in_"_a, "out"_a);
    ops.add<IndexOutliers, Buffer>("index_outliers", "rows"_a);
    ops.add<Element, Elementwise, int32_t, float, Buffer, Buffer, Buffer>("element", "verb"_a, "kind"_a, "number"_a, "a"_a,
                                                                          "b"_a, "out"_a);
    ops.add<CopyHeads, Buffer, Buffer, int32_t, int32_t, int32_t, int32_t>("copy_heads", "in_"_a, "out"_a, "heads"_a,
                                                                           "start"_a, "to_start"_a, "width"_a);
    ops.add<Rope, Buffer, Buffer, int, int32_t, int32_t, int32_t, bool>("rope", "in_"_a, "out"_a, "table"_a, "heads"_a,
                                                                        "start"_a, "pairs"_a, "interleaved"_a);
    ops.add<GatedLinear, Buffer, Buffer, int, int, int32_t>("gated_linear", "in_"_a, "out"_a, "gate"_a, "up"_a, "kind"_a);
    ops.add<HeadLinear, Buffer, Buffer, std::vector<int>>("head_linear", "in_"_a, "out"_a, "matrices"_a);
    ops.add<StoreKV, Buffer, Buffer, int, int, bool>("store_kv", "k"_a, "v"_a, "group"_a, "cache"_a, "is_latent"_a);
    ops.add<Conv, Buffer, Buffer, int, int, int32_t, int, int>("conv", "in_"_a, "out"_a, "weight"_a, "bias"_a, "kernel"_a,
                                                               "group"_a, "state"_a);
    ops.add<SsmScan, Buffer, Buffer, Buffer, Buffer, Buffer, int, int, int32_t, int, int>(
        "ssm_scan", "x"_a, "dt"_a, "b"_a, "c"_a, "out"_a, "a"_a, "d"_a, "state_size"_a, "group"_a, "state"_a);
    ops.add<Route, Buffer, Buffer, int, RouteShape>("route", "in_"_a, "out"_a, "bias"_a, "shape"_a);
    ops.add<ExpertsGated, Buffer, Buffer, Buffer, Buffer, std::vector<int>, std::vector<int>, int32_t, int32_t>(
        "experts_gated", "gate_in"_a, "up_in"_a, "routing"_a, "out"_a, "gate"_a, "up"_a, "top_k"_a, "kind"_a);
    ops.add<ExpertsDown, Buffer, Buffer, Buffer, std::vector<int>, int32_t>("experts_down", "in_"_a, "routing"_a, "out"_a,
                                                                            "down"_a, "top_k"_a);
    ops.add<ExpertsSum, Buffer, Buffer, Buffer, int32_t>("experts_sum", "in_"_a, "routing"_a, "out"_a, "top_k"_a);
    model_class
        .def("linear", [](Model& model, Buffer in, std::vector<Linear::Part> parts) {
            model.add_op(std::make_unique<Linear>(model, in, std::move(parts)));
        }, "in_"_a, "parts"_a)
        .def("attend", [](Model& model, Buffer q, Buffer out, int group, int cache, AttentionShape shape) {
            const Attend attend(q, out, group, cache, shape);
            model.add_op(std::make_unique<Attend>(attend));
            model.add_op(std::make_unique<AttendMerge>(attend));
        }, "q"_a, "out"_a, "group"_a, "cache"_a, "shape"_a);
    m.attr("ROW_BY_ROW") = ops.row_by_row;
}
