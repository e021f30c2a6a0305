// Eight lanes: AVX2, FMA and F16C.
#include <immintrin.h>

#include "update/isa/vec_wide.h"
#include "update/kernels/make_kernels.inl.h"

namespace hetero {

struct VecAvx2 : VecWide<8> {
  static F sqrt(F x) { return _mm256_sqrt_ps(x); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static U load_u16(const char* p) {
    return reinterpret_cast<U>(_mm256_cvtepu16_epi32(load_halves(p)));
  }
  static void store_u16(char* p, U x) {
    const auto low = reinterpret_cast<__m256i>(x & 0xffffU);
    // The pack works within 128-bit halves: lanes 0-3 end in quarter 0 and lanes 4-7 in quarter 2.
    const __m256i packed = _mm256_packus_epi32(low, low);
    store_halves(p, _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0b1000)));
  }
  static U load_u8(const char* p) {
    return reinterpret_cast<U>(
        _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }
  static void store_u8(char* p, U x) {
    const auto words = reinterpret_cast<__m256i>(x);
    const __m128i halves =
        _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(halves, halves));
  }
  static std::uint32_t largest(U x) {
    const auto words = reinterpret_cast<__m256i>(x);
    __m128i most = _mm_max_epu32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0b01001110));
    most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0b10110001));
    return static_cast<std::uint32_t>(_mm_cvtsi128_si32(most));
  }
  static F load_f16(const char* p) { return _mm256_cvtph_ps(load_halves(p)); }
  template <bool is_signed>
  static F load_f8(const char* p) {
    const __m128i codes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    if constexpr (!is_signed) {
      return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(codes), 6));
    }
    const __m128i halves = _mm_slli_epi16(_mm_cvtepi8_epi16(codes), 7);  // two signs
    return _mm256_cvtph_ps(_mm_and_si128(halves, _mm_set1_epi16(~0x4000)));
  }
  static void store_f16(char* p, F x) {
    store_halves(p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static void add_squares(D* sums, F x) {
    const D low = _mm256_cvtps_pd(_mm256_castps256_ps128(x));
    const D high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
    sums[0] = _mm256_fmadd_pd(low, low, sums[0]);
    sums[1] = _mm256_fmadd_pd(high, high, sums[1]);
  }

 private:
  static __m128i load_halves(const char* p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  }
  static void store_halves(char* p, __m128i x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), x);
  }
};

constinit const Kernels avx2_kernels = make_kernels<VecAvx2>();

}  // namespace hetero
