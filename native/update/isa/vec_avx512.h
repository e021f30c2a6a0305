// Sixteen lanes: AVX-512 F, BW, DQ and VL. vec_scalar.h describes the interface.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace hetero {

// Rounding to bf16 is done on the bits as everywhere: vcvtneps2bf16 would flush subnormals.
struct VecAvx512 {
  static constexpr std::size_t lanes = 16;
  static constexpr std::size_t double_lanes = 8;
  using F = __m512;
  using U = __m512i;
  using D = __m512d;

  static F set(float x) { return _mm512_set1_ps(x); }
  static F load(const char* p) { return _mm512_loadu_ps(p); }
  static void store(char* p, F x) { _mm512_storeu_ps(p, x); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F sqrt(F x) { return _mm512_sqrt_ps(x); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }

  static U set_bits(std::uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
  static U iota() {
    return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  }
  static U load_u16(const char* p) { return _mm512_cvtepu16_epi32(load_halves(p)); }
  static void store_u16(char* p, U x) { store_halves(p, _mm512_cvtepi32_epi16(x)); }
  static U bits(F x) { return _mm512_castps_si512(x); }
  static F from_bits(U x) { return _mm512_castsi512_ps(x); }
  static U add(U a, U b) { return _mm512_add_epi32(a, b); }
  static U sub(U a, U b) { return _mm512_sub_epi32(a, b); }
  static U mul(U a, U b) { return _mm512_mullo_epi32(a, b); }
  static U bit_and(U a, U b) { return _mm512_and_si512(a, b); }
  static U bit_or(U a, U b) { return _mm512_or_si512(a, b); }
  static U bit_xor(U a, U b) { return _mm512_xor_si512(a, b); }
  template <int count>
  static U shift_left(U x) {
    return _mm512_slli_epi32(x, count);
  }
  template <int count>
  static U shift_right(U x) {
    return _mm512_srli_epi32(x, count);
  }
  static U if_nan(F x, U then, U otherwise) {
    return _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), otherwise, then);
  }
  static U if_zero(F x, U then, U otherwise) {
    const __mmask16 zero = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_EQ_OQ);
    return _mm512_mask_blend_epi32(zero, otherwise, then);
  }
  static U if_normal(F x, U then) {
    const __mmask16 normal = _mm512_test_epi32_mask(bits(x), _mm512_set1_epi32(0x7f800000));
    return _mm512_maskz_mov_epi32(normal, then);
  }

  static F load_f16(const char* p) { return _mm512_cvtph_ps(load_halves(p)); }
  static void store_f16(char* p, F x) {
    store_halves(p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }

  static D zero_double() { return _mm512_setzero_pd(); }
  static void store_double(double* p, D x) { _mm512_storeu_pd(p, x); }
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

}  // namespace hetero
