#include "update/isa/vec_scalar.h"
#include "update/kernels/make_kernels.inl.h"

namespace hetero {

constinit const Kernels scalar_kernels = make_kernels<VecScalar>();

}  // namespace hetero
