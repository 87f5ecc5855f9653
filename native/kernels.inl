// Compiled once per instruction set (isa_*.cpp); fills that set's table.
#include "kernels.h"
#include "simd.h"

#include "attention.h"
#include "linear_float.h"
#include "linear_quantized.h"
#include "mixture.h"
#include "readout.h"
#include "recurrent.h"
#include "rowwise.h"
#include "sampler.h"

namespace headrace::HEADRACE_ISA {

inline Kernels make_kernels(const char* name) {
    Kernels k{};
    k.name = name;
    k.strip_bytes = strip_bytes;
    k.pack = pack;
    k.unpack_row = unpack_row;
    k.quantize = quantize;
    k.index_outliers = index_outliers;
    k.quantize_column = quantize_column;
    k.linear_quantized = linear_quantized;
    k.linear_float = linear_float;
    k.rms_norm = rms_norm;
    k.gate = gate;
    k.act = act;
    k.add = add_rows;
    k.scale = scale_row;
    k.softcap = softcap;
    k.rope = rope;
    k.store_kv = store_kv;
    k.attend = attend;
    k.attend_scratch = attend_scratch;
    k.attend_part = attend_part;
    k.attend_part_size = attend_part_size;
    k.attend_merge = attend_merge;
    k.argmax = argmax;
    k.log_sum_exp = log_sum_exp;
    k.rank_of = rank_of;
    k.top_k = top_k;
    k.sample_row = sample_row;
    k.sample_scratch = sample_scratch;
    k.conv = conv;
    k.ssm_scan = ssm_scan;
    k.route = route;
    k.route_scratch = route_scratch;
    return k;
}

}  // namespace headrace::HEADRACE_ISA
