// What the headers take from the standard library, for NVRTC, which has none: given to it under the
// names cmath, cstddef, cstdint and cstring.
#ifndef HETERO_NVRTC_STD_H
#define HETERO_NVRTC_STD_H

namespace std {

using size_t = decltype(sizeof(0));
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
using int32_t = int;
using int64_t = long long;
using uintptr_t = unsigned long long;

inline float fma(float a, float b, float c) { return ::fmaf(a, b, c); }
inline float sqrt(float x) { return ::sqrtf(x); }
inline void* memcpy(void* to, const void* from, size_t nbytes) {
  return ::memcpy(to, from, nbytes);
}

}  // namespace std

#endif
