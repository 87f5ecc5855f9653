#define HEADRACE_ISA scalar
#include "kernels.inl"

namespace headrace {
const Kernels& scalar_kernels() {
    static const Kernels table = scalar::make_kernels("scalar");
    return table;
}
}  // namespace headrace
