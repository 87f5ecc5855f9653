#define HEADRACE_ISA avx512
#define HEADRACE_AVX512
#include "kernels.inl"

namespace headrace {
// Asked only after the processor has been (cpu.cpp): nothing here runs on one that lacks the instructions.
const Kernels& avx512_table() {
    static const Kernels table = avx512::make_kernels("avx512");
    return table;
}
}  // namespace headrace
