#include "make_kernels.inl.h"
#include "vec_avx2.h"

namespace hetero {

constinit const Kernels avx2_kernels = make_kernels<VecAvx2>();

}  // namespace hetero
