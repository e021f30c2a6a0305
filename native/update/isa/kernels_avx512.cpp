// Sixteen lanes: AVX-512 F, BW, DQ and VL.
#if defined(__GNUC__) && !defined(__clang__)
// GCC 12's intrinsics take a value that is undefined on purpose, and GCC warns about its own
// header.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <immintrin.h>

#include "update/isa/vec_wide.h"
#include "update/kernels/make_kernels.inl.h"

namespace hetero {

// Rounding to bf16 is done on the bits as everywhere: vcvtneps2bf16 would flush subnormals.
struct VecAvx512 : VecWide<16> {
  static F sqrt(F x) { return _mm512_sqrt_ps(x); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static U load_u16(const char* p) {
    return reinterpret_cast<U>(_mm512_cvtepu16_epi32(load_halves(p)));
  }
  static void store_u16(char* p, U x) {
    store_halves(p, _mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(x)));
  }
  static U load_u8(const char* p) {
    return reinterpret_cast<U>(
        _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
  static void store_u8(char* p, U x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(x)));
  }
  static std::uint32_t largest(U x) {
    return _mm512_reduce_max_epu32(reinterpret_cast<__m512i>(x));
  }
  static U if_normal(F x, U then) {  // one instruction less than the operators
    const auto mask = _mm512_test_epi32_mask(_mm512_castps_si512(x), _mm512_set1_epi32(0x7f800000));
    return reinterpret_cast<U>(_mm512_maskz_mov_epi32(mask, reinterpret_cast<__m512i>(then)));
  }
  static F load_f16(const char* p) { return _mm512_cvtph_ps(load_halves(p)); }
  template <bool is_signed>
  static F load_f8(const char* p) {
    const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    if constexpr (!is_signed) {
      return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(codes), 6));
    }
    const __m256i halves = _mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7);  // two signs
    return _mm512_cvtph_ps(_mm256_and_si256(halves, _mm256_set1_epi16(~0x4000)));
  }
  static void store_f16(char* p, F x) {
    store_halves(p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static void add_squares(D* sums, F x) {
    const D low = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
    const D high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
    sums[0] = _mm512_fmadd_pd(low, low, sums[0]);
    sums[1] = _mm512_fmadd_pd(high, high, sums[1]);
  }

 private:
  static __m256i load_halves(const char* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static void store_halves(char* p, __m256i x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x);
  }
};

constinit const Kernels avx512_kernels = make_kernels<VecAvx512>();

}  // namespace hetero
