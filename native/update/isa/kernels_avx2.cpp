#include "update/isa/vec_avx2.h"
#include "update/kernels/make_kernels.inl.h"

namespace hetero {

constinit const Kernels avx2_kernels = make_kernels<VecAvx2>();

}  // namespace hetero
