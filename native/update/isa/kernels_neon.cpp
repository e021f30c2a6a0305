#include "update/isa/vec_neon.h"
#include "update/kernels/make_kernels.inl.h"

namespace hetero {

constinit const Kernels neon_kernels = make_kernels<VecNeon>();

}  // namespace hetero
