// Four lanes: AArch64's Advanced SIMD. vec_scalar.h describes the interface.
#pragma once

#include <arm_neon.h>

#include <cstddef>
#include <cstdint>

namespace hetero {

struct VecNeon {
  static constexpr std::size_t lanes = 4;
  static constexpr std::size_t double_lanes = 2;
  using F = float32x4_t;
  using U = uint32x4_t;
  using D = float64x2_t;

  static F set(float x) { return vdupq_n_f32(x); }
  static F load(const char* p) { return vreinterpretq_f32_u8(vld1q_u8(bytes(p))); }
  static void store(char* p, F x) { vst1q_u8(bytes(p), vreinterpretq_u8_f32(x)); }
  static F add(F a, F b) { return vaddq_f32(a, b); }
  static F mul(F a, F b) { return vmulq_f32(a, b); }
  static F div(F a, F b) { return vdivq_f32(a, b); }
  static F sqrt(F x) { return vsqrtq_f32(x); }
  static F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }

  static U set_bits(std::uint32_t x) { return vdupq_n_u32(x); }
  static U iota() {
    static constexpr std::uint32_t numbers[lanes] = {0, 1, 2, 3};
    return vld1q_u32(numbers);
  }
  static U load_u16(const char* p) { return vmovl_u16(vreinterpret_u16_u8(vld1_u8(bytes(p)))); }
  static void store_u16(char* p, U x) { vst1_u8(bytes(p), vreinterpret_u8_u16(vmovn_u32(x))); }
  static U bits(F x) { return vreinterpretq_u32_f32(x); }
  static F from_bits(U x) { return vreinterpretq_f32_u32(x); }
  static U add(U a, U b) { return vaddq_u32(a, b); }
  static U sub(U a, U b) { return vsubq_u32(a, b); }
  static U mul(U a, U b) { return vmulq_u32(a, b); }
  static U bit_and(U a, U b) { return vandq_u32(a, b); }
  static U bit_or(U a, U b) { return vorrq_u32(a, b); }
  static U bit_xor(U a, U b) { return veorq_u32(a, b); }
  template <int count>
  static U shift_left(U x) {
    return vshlq_n_u32(x, count);
  }
  template <int count>
  static U shift_right(U x) {
    return vshrq_n_u32(x, count);
  }
  static U if_nan(F x, U then, U otherwise) { return vbslq_u32(vceqq_f32(x, x), otherwise, then); }
  static U if_zero(F x, U then, U otherwise) {
    return vbslq_u32(vceqq_f32(x, vdupq_n_f32(0.0F)), then, otherwise);
  }
  static U if_normal(F x, U then) {
    return vandq_u32(then, vtstq_u32(bits(x), vdupq_n_u32(0x7f800000)));
  }

  static F load_f16(const char* p) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(bytes(p)))); }
  static void store_f16(char* p, F x) { vst1_u8(bytes(p), vreinterpret_u8_f16(vcvt_f16_f32(x))); }

  static D zero_double() { return vdupq_n_f64(0.0); }
  static void store_double(double* p, D x) { vst1q_f64(p, x); }
  static void add_squares(D* sums, F x) {
    const D low = vcvt_f64_f32(vget_low_f32(x));
    const D high = vcvt_high_f64_f32(x);
    sums[0] = vfmaq_f64(sums[0], low, low);
    sums[1] = vfmaq_f64(sums[1], high, high);
  }

 private:
  static const std::uint8_t* bytes(const char* p) {
    return reinterpret_cast<const std::uint8_t*>(p);
  }
  static std::uint8_t* bytes(char* p) { return reinterpret_cast<std::uint8_t*>(p); }
};

}  // namespace hetero
