#include "make_kernels.inl.h"
#include "vec_scalar.h"

namespace hetero {

constinit const Kernels scalar_kernels = make_kernels<VecScalar>();

}  // namespace hetero
