// Which instruction sets this processor has, and hence which kernels run.
#include "kernels.h"

#include <cstdlib>
#include <cstring>

namespace headrace {

const Kernels& avx2_table();
const Kernels& avx512_table();

const Kernels* avx2_kernels() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    return has ? &avx2_table() : nullptr;
#else
    return nullptr;
#endif
}

const Kernels* avx512_kernels() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                     __builtin_cpu_supports("avx512vnni");
    return has ? &avx512_table() : nullptr;
#else
    return nullptr;
#endif
}

const Kernels& best_kernels() {
    if (const Kernels* kernels = avx512_kernels()) return *kernels;
    if (const Kernels* kernels = avx2_kernels()) return *kernels;
    return scalar_kernels();
}

}  // namespace headrace
