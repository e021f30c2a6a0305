#if defined(__GNUC__) && !defined(__clang__)
// GCC 12's intrinsics take a value that is undefined on purpose, and GCC warns about its own
// header.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include "update/isa/vec_avx512.h"
#include "update/kernels/make_kernels.inl.h"

namespace hetero {

constinit const Kernels avx512_kernels = make_kernels<VecAvx512>();

}  // namespace hetero
