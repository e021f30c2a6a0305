#include "make_kernels.inl.h"
#include "vec_neon.h"

namespace hetero {

constinit const Kernels neon_kernels = make_kernels<VecNeon>();

}  // namespace hetero
