// Eight lanes: AVX2, FMA and F16C. vec_scalar.h describes the interface.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace hetero {

struct VecAvx2 {
  static constexpr std::size_t lanes = 8;
  static constexpr std::size_t double_lanes = 4;
  using F = __m256;
  using U = __m256i;
  using D = __m256d;

  static F set(float x) { return _mm256_set1_ps(x); }
  static F load(const char* p) { return _mm256_loadu_ps(reinterpret_cast<const float*>(p)); }
  static void store(char* p, F x) { _mm256_storeu_ps(reinterpret_cast<float*>(p), x); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F sqrt(F x) { return _mm256_sqrt_ps(x); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }

  static U set_bits(std::uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
  static U iota() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
  static U load_u16(const char* p) { return _mm256_cvtepu16_epi32(load_halves(p)); }
  static void store_u16(char* p, U x) {
    const __m256i low = _mm256_and_si256(x, _mm256_set1_epi32(0xffff));
    // The pack works within 128-bit halves: lanes 0-3 end in quarter 0 and lanes 4-7 in quarter 2.
    const __m256i packed = _mm256_packus_epi32(low, low);
    store_halves(p, _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0b1000)));
  }
  static U bits(F x) { return _mm256_castps_si256(x); }
  static F from_bits(U x) { return _mm256_castsi256_ps(x); }
  static U add(U a, U b) { return _mm256_add_epi32(a, b); }
  static U sub(U a, U b) { return _mm256_sub_epi32(a, b); }
  static U mul(U a, U b) { return _mm256_mullo_epi32(a, b); }
  static U bit_and(U a, U b) { return _mm256_and_si256(a, b); }
  static U bit_or(U a, U b) { return _mm256_or_si256(a, b); }
  static U bit_xor(U a, U b) { return _mm256_xor_si256(a, b); }
  template <int count>
  static U shift_left(U x) {
    return _mm256_slli_epi32(x, count);
  }
  template <int count>
  static U shift_right(U x) {
    return _mm256_srli_epi32(x, count);
  }
  static U if_nan(F x, U then, U otherwise) {
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(otherwise, then, nan);
  }
  static U if_zero(F x, U then, U otherwise) {
    const __m256 zero = _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_EQ_OQ);
    return _mm256_blendv_epi8(otherwise, then, _mm256_castps_si256(zero));
  }
  static U if_normal(F x, U then) {
    const __m256i exponent = _mm256_and_si256(bits(x), _mm256_set1_epi32(0x7f800000));
    return _mm256_andnot_si256(_mm256_cmpeq_epi32(exponent, _mm256_setzero_si256()), then);
  }

  static F load_f16(const char* p) { return _mm256_cvtph_ps(load_halves(p)); }
  static void store_f16(char* p, F x) {
    store_halves(p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }

  static D zero_double() { return _mm256_setzero_pd(); }
  static void store_double(double* p, D x) { _mm256_storeu_pd(p, x); }
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

}  // namespace hetero
