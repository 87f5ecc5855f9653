#define HEADRACE_ISA avx2
#define HEADRACE_AVX2
#include "kernels.inl"

namespace headrace {
// Asked only after the processor has been (cpu.cpp): nothing here runs on one that lacks the instructions.
const Kernels& avx2_table() {
    static const Kernels table = avx2::make_kernels("avx2");
    return table;
}
}  // namespace headrace
