// headrace._native: what Python sees of the native backend.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

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
using StoredRows = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

template <class T>
std::unique_ptr<T> made(T op) {
    return std::make_unique<T>(std::move(op));
}

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
         OutInts tokens, OutDoubles logprobs, OutInts ranks, OutInts top_ids, OutDoubles top_logprobs, int32_t max_top,
         int32_t vocab_size, Buffer last) {
    Step step = step_of(token_ids, positions, parents, spans, tables, table_starts);
    const Readouts readouts{(int32_t)rows.shape(0), std::min(vocab_size, last.width), rows.data(), targets.data(),
                            num_top.data(), numbers.data(), ids.data(), values.data(), starts.data(), tokens.data(),
                            logprobs.data(), ranks.data(), max_top, top_ids.data(), top_logprobs.data()};
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
        .def("__init__", [](Buffer* self, int32_t offset, int32_t width, bool is_quantized) {
            new (self) Buffer{offset, width, is_quantized};
        }, "offset"_a, "width"_a, "is_quantized"_a);
    nb::class_<AttentionShape>(m, "AttentionShape")
        .def("__init__", [](AttentionShape* self, int32_t heads, int32_t kv_heads, int32_t key_width, int32_t value_width,
                            float scale, int32_t window, float softcap) {
            new (self) AttentionShape{heads, kv_heads, key_width, value_width, scale, window, softcap};
        }, "heads"_a, "kv_heads"_a, "key_width"_a, "value_width"_a, "scale"_a, "window"_a, "softcap"_a);
    nb::class_<Linear::Part>(m, "LinearPart")
        .def("__init__", [](Linear::Part* self, int matrix, int bias, Buffer out, bool accumulate) {
            new (self) Linear::Part{matrix, bias, out, accumulate};
        }, "matrix"_a, "bias"_a, "out"_a, "accumulate"_a);

    m.def("isas", [] {
        std::vector<std::string> names;
        if (avx512_kernels()) names.push_back("avx512");
        if (avx2_kernels()) names.push_back("avx2");
        names.push_back("scalar");
        return names;
    }, "Instruction sets this processor can run, best first.");

    nb::class_<Model>(m, "Model")
        .def(nb::init<int, int, const std::string&>(), "num_threads"_a, "max_tokens"_a, "isa"_a)
        .def("add_matrix", [](Model& model, Packing packing, int32_t width, StoredRows stored) {
            nb::gil_scoped_release released;
            return model.add_matrix(packing, (int32_t)stored.shape(0), width, stored.data(), stored.shape(1));
        }, "packing"_a, "width"_a, "stored"_a)
        .def("add_vector", [](Model& model, Floats values) { return model.add_vector(values.data(), values.shape(0)); })
        .def("add_cache", &Model::add_cache, "group"_a, "block_size"_a, "num_blocks"_a, "is_f16"_a, "kv_heads"_a,
             "key_width"_a, "value_width"_a)
        .def("add_state", &Model::add_state, "group"_a, "num_blocks"_a, "size"_a)
        .def("begin_head", &Model::begin_head)
        .def("finish", &Model::finish, "trunk_width"_a, "head_width"_a, "rows_per_tile"_a)
        .def("copy_block", &Model::copy_block, "group"_a, "source"_a, "target"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("run_trunk", &run_trunk, "token_ids"_a, "positions"_a, "parents"_a.none(), "spans"_a, "tables"_a,
             "table_starts"_a)
        .def("run", &run, "token_ids"_a, "positions"_a, "parents"_a.none(), "spans"_a, "tables"_a, "table_starts"_a, "rows"_a,
             "targets"_a, "num_top"_a, "numbers"_a, "ids"_a, "values"_a, "starts"_a, "tokens"_a, "logprobs"_a, "ranks"_a,
             "top_ids"_a, "top_logprobs"_a, "max_top"_a, "vocab_size"_a, "last"_a)
        .def("run_head", [](nb::handle self, Ints rows, Buffer last) { return run_head(self, rows, last); }, "rows"_a,
             "last"_a)
        .def("touch_cache", &Model::touch_cache, "most_bytes"_a, nb::call_guard<nb::gil_scoped_release>())
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
        .def_prop_ro("packed_bytes", &Model::packed_bytes)

        .def("embed", [](Model& model, int matrix, Buffer out) {
            Embed op;
            op.matrix = matrix, op.out = out;
            model.add_op(made(std::move(op)));
        }, "matrix"_a, "out"_a)
        .def("select_rows", [](Model& model, Buffer in, Buffer out) {
            SelectRows op;
            op.in = in, op.out = out;
            model.add_op(made(std::move(op)));
        }, "in_"_a, "out"_a)
        .def("norm", [](Model& model, Buffer in, Buffer out, int weight, int32_t heads, float eps, float offset) {
            Norm op;
            op.in = in, op.out = out, op.weight = weight, op.heads = heads, op.eps = eps, op.offset = offset;
            model.add_op(made(std::move(op)));
        }, "in_"_a, "out"_a, "weight"_a, "heads"_a, "eps"_a, "offset"_a)
        .def("quantize", [](Model& model, Buffer in, Buffer out) {
            Quantize op;
            op.in = in, op.out = out;
            model.add_op(made(std::move(op)));
        }, "in_"_a, "out"_a)
        .def("element", [](Model& model, Elementwise verb, int32_t kind, float number, Buffer a, Buffer b, Buffer out) {
            Element op;
            op.verb = verb, op.kind = kind, op.number = number, op.a = a, op.b = b, op.out = out;
            model.add_op(made(std::move(op)));
        }, "verb"_a, "kind"_a, "number"_a, "a"_a, "b"_a, "out"_a)
        .def("copy_heads", [](Model& model, Buffer in, Buffer out, int32_t heads, int32_t start, int32_t to_start,
                              int32_t width) {
            CopyHeads op;
            op.in = in, op.out = out, op.heads = heads, op.start = start, op.to_start = to_start, op.width = width;
            model.add_op(made(std::move(op)));
        }, "in_"_a, "out"_a, "heads"_a, "start"_a, "to_start"_a, "width"_a)
        .def("rope", [](Model& model, Buffer in, Buffer out, int table, int32_t heads, int32_t start, int32_t pairs,
                        bool interleaved) {
            Rope op;
            op.in = in, op.out = out, op.table = table, op.heads = heads, op.start = start, op.pairs = pairs;
            op.interleaved = interleaved;
            model.add_op(made(std::move(op)));
        }, "in_"_a, "out"_a, "table"_a, "heads"_a, "start"_a, "pairs"_a, "interleaved"_a)
        .def("linear", [](Model& model, Buffer in, std::vector<Linear::Part> parts) {
            Linear op;
            op.in = in, op.parts = std::move(parts);
            op.prepare(model);
            model.add_op(made(std::move(op)));
        }, "in_"_a, "parts"_a)
        .def("gated_linear", [](Model& model, Buffer in, Buffer out, int gate, int up, int32_t kind) {
            GatedLinear op;
            op.in = in, op.out = out, op.gate = gate, op.up = up, op.kind = kind;
            model.add_op(made(std::move(op)));
        }, "in_"_a, "out"_a, "gate"_a, "up"_a, "kind"_a)
        .def("head_linear", [](Model& model, Buffer in, Buffer out, std::vector<int> matrices) {
            HeadLinear op;
            op.in = in, op.out = out, op.matrices = std::move(matrices);
            model.add_op(made(std::move(op)));
        }, "in_"_a, "out"_a, "matrices"_a)
        .def("store_kv", [](Model& model, Buffer k, Buffer v, int group, int cache, bool is_latent) {
            StoreKV op;
            op.k = k, op.v = v, op.group = group, op.cache = cache, op.is_latent = is_latent;
            model.add_op(made(std::move(op)));
        }, "k"_a, "v"_a, "group"_a, "cache"_a, "is_latent"_a)
        .def("attend", [](Model& model, Buffer q, Buffer out, int group, int cache, AttentionShape shape) {
            Attend op;
            op.q = q, op.out = out, op.group = group, op.cache = cache, op.shape = shape;
            AttendMerge merge;
            merge.attend.q = q, merge.attend.out = out, merge.attend.group = group, merge.attend.cache = cache;
            merge.attend.shape = shape;
            model.add_op(made(std::move(op)));
            model.add_op(made(std::move(merge)));
        }, "q"_a, "out"_a, "group"_a, "cache"_a, "shape"_a)
        .def("conv", [](Model& model, Buffer in, Buffer out, int weight, int bias, int32_t kernel, int group, int state) {
            Conv op;
            op.in = in, op.out = out, op.weight = weight, op.bias = bias, op.kernel = kernel;
            op.group = group, op.state = state, op.width = in.width;
            model.add_op(made(std::move(op)));
        }, "in_"_a, "out"_a, "weight"_a, "bias"_a, "kernel"_a, "group"_a, "state"_a)
        .def("ssm_scan", [](Model& model, Buffer x, Buffer dt, Buffer b, Buffer c, Buffer out, int a, int d,
                            int32_t state_size, int group, int state) {
            SsmScan op;
            op.x = x, op.dt = dt, op.b = b, op.c = c, op.out = out, op.a = a, op.d = d, op.state_size = state_size;
            op.group = group, op.state = state, op.width = x.width;
            model.add_op(made(std::move(op)));
        }, "x"_a, "dt"_a, "b"_a, "c"_a, "out"_a, "a"_a, "d"_a, "state_size"_a, "group"_a, "state"_a)
        .def("route", [](Model& model, Buffer in, Buffer out, int bias, int32_t num_experts, int32_t top_k, bool is_sigmoid,
                         int32_t num_groups, int32_t top_groups, bool renormalize, float scaling) {
            Route op;
            op.in = in, op.out = out, op.bias = bias;
            op.shape = {num_experts, top_k, is_sigmoid, nullptr, num_groups, top_groups, renormalize, scaling};
            model.add_op(made(std::move(op)));
        }, "in_"_a, "out"_a, "bias"_a, "num_experts"_a, "top_k"_a, "is_sigmoid"_a, "num_groups"_a, "top_groups"_a,
           "renormalize"_a, "scaling"_a)
        .def("experts_gated", [](Model& model, Buffer gate_in, Buffer up_in, Buffer routing, Buffer out, std::vector<int> gate,
                                 std::vector<int> up, int32_t top_k, int32_t kind) {
            ExpertsGated op;
            op.gate_in = gate_in, op.up_in = up_in, op.routing = routing, op.out = out, op.kind = kind, op.top_k = top_k;
            op.num_experts = (int32_t)gate.size(), op.outputs = out.width / top_k;
            op.gate = std::move(gate), op.up = std::move(up);
            model.add_op(made(std::move(op)));
        }, "gate_in"_a, "up_in"_a, "routing"_a, "out"_a, "gate"_a, "up"_a, "top_k"_a, "kind"_a)
        .def("experts_down", [](Model& model, Buffer in, Buffer routing, Buffer out, std::vector<int> down, int32_t top_k) {
            ExpertsDown op;
            op.in = in, op.routing = routing, op.out = out, op.top_k = top_k;
            op.num_experts = (int32_t)down.size(), op.outputs = out.width / top_k;
            op.down = std::move(down);
            model.add_op(made(std::move(op)));
        }, "in_"_a, "routing"_a, "out"_a, "down"_a, "top_k"_a)
        .def("experts_sum", [](Model& model, Buffer in, Buffer routing, Buffer out, int32_t top_k) {
            ExpertsSum op;
            op.in = in, op.routing = routing, op.out = out, op.top_k = top_k;
            model.add_op(made(std::move(op)));
        }, "in_"_a, "routing"_a, "out"_a, "top_k"_a);
}
