#include "ops.h"

namespace headrace {

namespace {

// Strips of a matrix, and those that the thread goes on with.
struct Strips {
    int32_t first, last, fetch_last;
};

void multiply(const Model& model, const PackedMatrix& matrix, Strips strips, const Buffer& in, int32_t rows, float* out,
              size_t out_stride, Epilogue epilogue) {
    const auto [first, last, fetch_last] = strips;
    const Kernels& k = model.kernels();
    if (in.is_quantized)
        k.linear_quantized(matrix, first, last, fetch_last, model.quantized(in, rows), rows, out, out_stride, epilogue);
    else
        k.linear_float(matrix, first, last, fetch_last, model.floats(in, rows), in.width, rows, out, out_stride, epilogue);
}

int64_t bytes_of(const Model& model, int id) {
    const PackedMatrix& matrix = model.matrix(id);
    return (int64_t)model.kernels().strip_bytes(matrix.packing, matrix.width) * matrix.num_strips();
}

Upcoming::Stretch weights_of(const Model& model, int id, int32_t first, int32_t last) {
    const PackedMatrix& matrix = model.matrix(id);
    const size_t bytes = model.kernels().strip_bytes(matrix.packing, matrix.width);
    return {matrix.data + bytes * first, matrix.data + bytes * last};
}

}  // namespace

int64_t Linear::weight_bytes(const Model& model) const {
    int64_t total = 0;
    for (const Part& part : parts) total += bytes_of(model, part.matrix);
    return total;
}

// What lies behind the part of the first tile counts if it is that of the next.
Upcoming Linear::upcoming(const Model& model, Turn turn) const {
    size_t p = part_of(turn.index);
    Upcoming::Stretch all = weights_of(model, parts[p].matrix, strip_of(model, p, turn.index), strip_of(model, p, turn.end));
    while (first_tile[++p] < turn.end) {
        const Upcoming::Stretch next = weights_of(model, parts[p].matrix, 0, strip_of(model, p, turn.end));
        if (next.at != all.end) break;
        all.end = next.end;
    }
    return {all, {}};
}

int64_t GatedLinear::weight_bytes(const Model& model) const { return bytes_of(model, gate) + bytes_of(model, up); }

int32_t GatedLinear::strip_of(const Model& model, int64_t tile) const {
    return std::min((int32_t)tile * (GROUP / STRIP), model.matrix(gate).num_strips());
}

Upcoming GatedLinear::upcoming(const Model& model, Turn turn) const {
    const int32_t first = strip_of(model, turn.index), last = strip_of(model, turn.end);
    return {weights_of(model, gate, first, last), weights_of(model, up, first, last)};
}

Linear::Linear(const Model& model, Buffer in, std::vector<Part> all) : in(in), parts(std::move(all)) {
    int32_t strips = 0;
    for (const Part& part : parts) strips += model.matrix(part.matrix).num_strips();
    // Some eight tiles a thread: enough for a busy core to fall behind without holding up the others.
    strips_per_tile = std::clamp(strips / (8 * model.num_threads()), 1, 64);
    first_tile.assign(1, 0);
    for (const Part& part : parts) {
        const int32_t num_strips = model.matrix(part.matrix).num_strips();
        first_tile.push_back(first_tile.back() + (num_strips + strips_per_tile - 1) / strips_per_tile);
    }
}

size_t Linear::part_of(int64_t tile) const {
    size_t p = 0;
    while (tile >= first_tile[p + 1]) ++p;
    return p;
}

int32_t Linear::strip_of(const Model& model, size_t part, int64_t tile) const {
    return (int32_t)std::min<int64_t>((tile - first_tile[part]) * strips_per_tile, model.matrix(parts[part].matrix).num_strips());
}

void Linear::tile(const Model& model, int32_t rows, Turn turn, Scratch&) const {
    const size_t p = part_of(turn.index);
    const Part& part = parts[p];
    const Strips strips{strip_of(model, p, turn.index), strip_of(model, p, turn.index + 1), strip_of(model, p, turn.end)};
    multiply(model, model.matrix(part.matrix), strips, in, rows, model.floats(part.out, rows), part.out.width,
             {model.vector(part.bias), part.accumulate});
    if (turn.index + 1 == first_tile[p + 1] && turn.index + 1 < turn.end)
        upcoming(model, {turn.index + 1, turn.end}).fetch(FETCH_AHEAD / 64);  // which the kernel's own asking leaves out
}

void GatedLinear::tile(const Model& model, int32_t rows, Turn turn, Scratch& scratch) const {
    const PackedMatrix& matrix = model.matrix(gate);
    const Strips strips{strip_of(model, turn.index), strip_of(model, turn.index + 1), strip_of(model, turn.end)};
    const int32_t column = (int32_t)turn.index * GROUP, width = std::min(GROUP, matrix.rows - column);
    float* gates = scratch.get((size_t)2 * rows * GROUP);
    float* ups = gates + (size_t)rows * GROUP;
    // The kernels write to out + strip * 16: the group's own 32 columns begin at `gates`.
    const ptrdiff_t shift = (ptrdiff_t)strips.first * STRIP;
    multiply(model, matrix, strips, in, rows, gates - shift, GROUP, {nullptr, false});
    multiply(model, model.matrix(up), strips, in, rows, ups - shift, GROUP, {nullptr, false});
    const Kernels& k = model.kernels();
    if (!out.is_quantized) {
        float* to = model.floats(out, rows) + column;
        for (int32_t row = 0; row < rows; ++row)
            k.gate(kind, gates + row * GROUP, ups + row * GROUP, width, to + (size_t)row * out.width);
        return;
    }
    k.gate(kind, gates, ups, rows * GROUP, gates);
    k.quantize_column(gates, rows, (int32_t)turn.index, model.quantized(out, rows));
}

void HeadLinear::tile(const Model& model, int32_t rows, Turn turn, Scratch&) const {
    const int64_t index = turn.index;
    const PackedMatrix& matrix = model.matrix(matrices[index]);
    model.kernels().linear_float(matrix, 0, matrix.num_strips(), matrix.num_strips(), model.floats(in, rows) + index * matrix.width, in.width,
                                 rows, model.floats(out, rows) + index * matrix.rows, out.width, {nullptr, false});
}

void StoreKV::one(const Model& model, int32_t rows, int32_t row, Scratch&) const {
    const int32_t index = model.step().span_of[row];
    const Span& span = model.step().spans[index];
    const float* values = is_latent ? nullptr : model.floats(v, rows) + (size_t)row * v.width;
    model.kernels().store_kv(model.cache(cache), model.table(group, index), span.start + row - span.first_row,
                             model.floats(k, rows) + (size_t)row * k.width, values);
}

size_t Attend::part_floats(const Model& model) const {
    int32_t longest = 1;
    for (const auto& block : model.step().blocks) longest = std::max(longest, block.num);
    return model.kernels().attend_part_size(shape, longest);
}

void Attend::prepare_step(Model& model) const {
    if (is_split(model, shape))
        model.need_parts(part_floats(model) * model.step().blocks.size() * shape.kv_heads * model.step().num_chunks);
}

void Attend::tile(const Model& model, int32_t rows, Turn turn, Scratch& scratch) const {
    const int64_t index = turn.index;
    const Step& step = model.step();
    const Kernels& k = model.kernels();
    const bool split = is_split(model, shape);
    const int64_t pair = split ? index / step.num_chunks : index;
    const Step::QueryBlock& block = step.blocks[pair / shape.kv_heads];
    const int32_t kv_head = (int32_t)(pair % shape.kv_heads);
    Span span = step.spans[block.span];
    span.table = model.table(group, block.span);
    const int32_t* parents = step.parents ? step.parents + span.first_row : nullptr;
    float* room = scratch.get(k.attend_scratch(shape, block.num));
    if (!split)
        return k.attend(shape, model.cache(cache), span, parents, kv_head, block.first, block.num, model.floats(q, rows),
                        q.width, model.floats(out, rows), out.width, room);
    const int32_t chunk = (int32_t)(index % step.num_chunks);
    // The parts of a pair lie together, each as large as its own block of queries needs.
    float* part = model.parts() + part_floats(model) * step.num_chunks * pair + k.attend_part_size(shape, block.num) * chunk;
    k.attend_part(shape, model.cache(cache), span, parents, kv_head, block.first, block.num, chunk, chunk + 1,
                  model.floats(q, rows), q.width, part, room);
}

void AttendMerge::tile(const Model& model, int32_t rows, Turn turn, Scratch& scratch) const {
    const int64_t index = turn.index;
    const Step& step = model.step();
    const AttentionShape& shape = attend.shape;
    const Step::QueryBlock& block = step.blocks[index / shape.kv_heads];
    const float* parts = model.parts() + attend.part_floats(model) * step.num_chunks * index;
    model.kernels().attend_merge(shape, step.spans[block.span], (int32_t)(index % shape.kv_heads), block.first, block.num,
                                 parts, step.num_chunks, model.floats(attend.out, rows), attend.out.width,
                                 scratch.get(model.kernels().attend_scratch(shape, block.num)));
}

void Conv::tile(const Model& model, int32_t rows, Turn turn, Scratch&) const {
    const int32_t span_index = (int32_t)(turn.index / tiles_per_span());
    const int32_t first = (int32_t)(turn.index % tiles_per_span()) * CHANNELS;
    const Span& span = model.step().spans[span_index];
    const int32_t* blocks = model.table(group, span_index);  // (to read, to write)
    const ConvShape shape{width, kernel, model.vector(weight), model.vector(bias)};
    model.kernels().conv(shape, model.floats(in, rows) + (size_t)span.first_row * in.width, in.width, span.count,
                         blocks[0] < 0 ? nullptr : model.state(state, blocks[0]), model.state(state, blocks[1]),
                         model.floats(out, rows) + (size_t)span.first_row * out.width, out.width, first,
                         std::min(first + CHANNELS, width));
}

void SsmScan::tile(const Model& model, int32_t rows, Turn turn, Scratch&) const {
    const int32_t span_index = (int32_t)(turn.index / tiles_per_span());
    const int32_t first = (int32_t)(turn.index % tiles_per_span()) * CHANNELS;
    const Span& span = model.step().spans[span_index];
    const int32_t* blocks = model.table(group, span_index);
    const SsmShape shape{width, state_size, model.vector(a), model.vector(d)};
    const auto rows_of = [&](const Buffer& buffer) { return model.floats(buffer, rows) + (size_t)span.first_row * buffer.width; };
    const SsmInputs inputs{rows_of(x), rows_of(dt), rows_of(b), rows_of(c),
                           (size_t)x.width, (size_t)dt.width, (size_t)b.width, (size_t)c.width};
    model.kernels().ssm_scan(shape, inputs, span.count, blocks[0] < 0 ? nullptr : model.state(state, blocks[0]),
                             model.state(state, blocks[1]), rows_of(out), out.width, first, std::min(first + CHANNELS, width));
}

void Route::one(const Model& model, int32_t rows, int32_t row, Scratch& scratch) const {
    RouteShape with_bias = shape;
    with_bias.bias = model.vector(bias);
    model.kernels().route(with_bias, model.floats(in, rows) + (size_t)row * in.width,
                          model.floats(out, rows) + (size_t)row * out.width,
                          scratch.get(model.kernels().route_scratch(with_bias)));
}

int32_t ExpertOp::find_pairs(const Model& model, int32_t rows, int32_t expert, int32_t* pairs) const {
    const float* chosen = model.floats(routing, rows);
    int32_t count = 0;
    for (int32_t row = 0; row < rows; ++row, chosen += routing.width)
        for (int32_t place = 0; place < top_k; ++place)
            if ((int32_t)chosen[place] == expert) pairs[count++] = row * top_k + place;
    return count;
}

namespace {

// Pairs' inputs, one after the other, in the form their product wants. `buffer` holds a pair's input in row pair / per_row,
// with its outliers.
class Gathered {
public:
    static size_t floats(const Buffer& buffer, size_t count) { return count * (buffer.width + OUTLIER_FLOATS); }

    Gathered(const Model& model, const Buffer& buffer, int32_t rows, int32_t width, int32_t per_row, const int32_t* pairs,
             int32_t count, float* room)
        : is_quantized_(buffer.is_quantized), count_(count), width_(width), x_(room) {
        if (!is_quantized_) {
            const float* from = model.floats(buffer, rows);
            for (int32_t i = 0; i < count; ++i)
                std::copy_n(from + (size_t)(pairs[i] / per_row) * width, width, room + (size_t)i * width);
            return;
        }
        const QuantizedRows from = model.quantized(buffer, rows);
        const size_t planes = from.planes, groups = planes * (width / GROUP);  // of a row
        const size_t outliers = from.num_outliers;
        quantized_ = quantized_at(room, width, from.planes, count, from.num_outliers, from.fixed);
        for (int32_t i = 0; i < count; ++i) {
            const size_t row = pairs[i] / per_row, at = row * groups, to = i * groups;
            std::copy_n(from.q + at * GROUP, planes * width, quantized_.q + to * GROUP);
            std::copy_n(from.scale + at, groups, quantized_.scale + to);
            std::copy_n(from.scaled_sum + at, groups, quantized_.scaled_sum + to);
            std::copy_n(from.sums + 2 * at, 2 * groups, quantized_.sums + 2 * to);
            std::copy_n(from.outliers + row * outliers, outliers, quantized_.outliers + i * outliers);
            if (!from.fixed) std::copy_n(from.channels + row * outliers, outliers, quantized_.channels + i * outliers);
        }
        if (outliers) model.kernels().index_outliers(quantized_, count);
    }

    // Outputs of strips [first, last): out[i * stride ...] from column first * 16 on.
    void multiply(const Model& model, int matrix_id, int32_t first, int32_t last, float* out, size_t stride) const {
        const PackedMatrix& matrix = model.matrix(matrix_id);
        const ptrdiff_t shift = (ptrdiff_t)first * STRIP;
        if (is_quantized_)
            model.kernels().linear_quantized(matrix, first, last, last, quantized_, count_, out - shift, stride, {nullptr, false});
        else
            model.kernels().linear_float(matrix, first, last, last, x_, width_, count_, out - shift, stride, {nullptr, false});
    }

private:
    bool is_quantized_;
    int32_t count_, width_;
    const float* x_;
    QuantizedRows quantized_{};
};

int64_t bytes_of_all(const Model& model, const std::vector<int>& matrices) {
    int64_t total = 0;
    for (int id : matrices) total += bytes_of(model, id);
    return total;
}

}  // namespace

int64_t ExpertsGated::weight_bytes(const Model& model) const { return bytes_of_all(model, gate) + bytes_of_all(model, up); }
int64_t ExpertsDown::weight_bytes(const Model& model) const { return bytes_of_all(model, down); }

void ExpertsGated::tile(const Model& model, int32_t rows, Turn turn, Scratch& scratch) const {
    const int32_t expert = (int32_t)(turn.index / tiles_per_expert()), num_strips = model.matrix(gate[expert]).num_strips();
    const size_t most = (size_t)rows * top_k;
    float* const gates = scratch.get(most * (2 * GROUP + 1) + Gathered::floats(gate_in, most) + Gathered::floats(up_in, most));
    float* const ups = gates + most * GROUP;
    int32_t* const pairs = reinterpret_cast<int32_t*>(ups + most * GROUP);
    const int32_t count = find_pairs(model, rows, expert, pairs);
    if (count == 0) return;
    float* const room = ups + most * (GROUP + 1);
    const Gathered gate_x(model, gate_in, rows, gate_in.width, top_k, pairs, count, room);
    const Gathered up_x(model, up_in, rows, up_in.width, top_k, pairs, count, room + Gathered::floats(gate_in, count));
    const Kernels& k = model.kernels();
    const int32_t begin = (int32_t)(turn.index % tiles_per_expert()) * COLUMNS, end = std::min(begin + COLUMNS, outputs);
    for (int32_t column = begin; column < end; column += GROUP) {
        const int32_t width = std::min(GROUP, outputs - column), strip = column / STRIP;
        const int32_t last = std::min(strip + GROUP / STRIP, num_strips);
        gate_x.multiply(model, gate[expert], strip, last, gates, GROUP);
        up_x.multiply(model, up[expert], strip, last, ups, GROUP);
        k.gate(kind, gates, ups, count * GROUP, gates);
        for (int32_t i = 0; i < count; ++i) {
            const float* from = gates + (size_t)i * GROUP;
            if (out.is_quantized) {  // a pair's numbers are a row of `outputs`
                const size_t cell = (size_t)pairs[i] * outputs;
                QuantizedRows to = model.quantized(out, rows);
                to.width = outputs;
                to.q += cell * to.planes;
                to.scale += cell * to.planes / GROUP;
                to.scaled_sum += cell * to.planes / GROUP;
                to.sums += cell * to.planes / STRIP;
                k.quantize_column(from, 1, column / GROUP, to);
            } else {
                std::copy_n(from, width, model.floats(out, rows) + (size_t)pairs[i] * outputs + column);
            }
        }
    }
}

void ExpertsDown::tile(const Model& model, int32_t rows, Turn turn, Scratch& scratch) const {
    const int32_t expert = (int32_t)(turn.index / tiles_per_expert()), inner = in.width / top_k;
    const PackedMatrix& matrix = model.matrix(down[expert]);
    const size_t most = (size_t)rows * top_k;
    float* const results = scratch.get(most * (COLUMNS + 1 + inner));
    int32_t* const pairs = reinterpret_cast<int32_t*>(results + most * COLUMNS);
    const int32_t count = find_pairs(model, rows, expert, pairs);
    if (count == 0) return;
    const Gathered x(model, in, rows, inner, 1, pairs, count, results + most * (COLUMNS + 1));
    const int32_t column = (int32_t)(turn.index % tiles_per_expert()) * COLUMNS, width = std::min(COLUMNS, outputs - column);
    x.multiply(model, down[expert], column / STRIP, std::min((column + COLUMNS) / STRIP, matrix.num_strips()), results, COLUMNS);
    for (int32_t i = 0; i < count; ++i)
        std::copy_n(results + (size_t)i * COLUMNS, width, model.floats(out, rows) + (size_t)pairs[i] * outputs + column);
}

void ExpertsSum::one(const Model& model, int32_t rows, int32_t row, Scratch& scratch) const {
    const Kernels& k = model.kernels();
    const float* weights = model.floats(routing, rows) + (size_t)row * routing.width + top_k;
    const float* from = model.floats(in, rows) + (size_t)row * in.width;
    float *to = model.floats(out, rows) + (size_t)row * out.width, *weighted = scratch.get(out.width);
    std::fill(to, to + out.width, 0.0f);
    for (int32_t place = 0; place < top_k; ++place, from += out.width) {
        k.scale(from, weights[place], out.width, weighted);
        k.add(to, weighted, out.width, to);
    }
}

}  // namespace headrace
