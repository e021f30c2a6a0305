// Four lanes: AArch64's Advanced SIMD.
#include <arm_neon.h>

#include "update/isa/vec_wide.h"
#include "update/kernels/make_kernels.inl.h"

namespace hetero {

struct VecNeon : VecWide<4> {
  static F sqrt(F x) { return vsqrtq_f32(x); }
  static F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
  static U load_u16(const char* p) { return vmovl_u16(vreinterpret_u16_u8(load_halves(p))); }
  static void store_u16(char* p, U x) { store_halves(p, vreinterpret_u8_u16(vmovn_u32(x))); }
  static U load_u8(const char* p) { return vmovl_u16(load_bytes(p)); }
  static void store_u8(char* p, U x) {
    const uint16x4_t halves = vmovn_u32(x);
    const uint8x8_t narrow = vmovn_u16(vcombine_u16(halves, halves));
    const std::uint32_t bytes = vget_lane_u32(vreinterpret_u32_u8(narrow), 0);
    __builtin_memcpy(p, &bytes, sizeof bytes);
  }
  static std::uint32_t largest(U x) { return vmaxvq_u32(x); }
  static F load_f16(const char* p) { return vcvt_f32_f16(vreinterpret_f16_u8(load_halves(p))); }
  template <bool is_signed>
  static F load_f8(const char* p) {
    const uint16x4_t codes = load_bytes(p);
    if constexpr (!is_signed) return vcvt_f32_f16(vreinterpret_f16_u16(vshl_n_u16(codes, 6)));
    const uint16x4_t sign = vshl_n_u16(vand_u16(codes, vdup_n_u16(0x80)), 8);
    const uint16x4_t others = vshl_n_u16(vand_u16(codes, vdup_n_u16(0x7f)), 7);
    return vcvt_f32_f16(vreinterpret_f16_u16(vorr_u16(sign, others)));
  }
  static void store_f16(char* p, F x) { store_halves(p, vreinterpret_u8_f16(vcvt_f16_f32(x))); }
  static void add_squares(D* sums, F x) {
    const D low = vcvt_f64_f32(vget_low_f32(x));
    const D high = vcvt_high_f64_f32(x);
    sums[0] = vfmaq_f64(sums[0], low, low);
    sums[1] = vfmaq_f64(sums[1], high, high);
  }

 private:
  static uint16x4_t load_bytes(const char* p) {
    std::uint32_t bytes;
    __builtin_memcpy(&bytes, p, sizeof bytes);
    return vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(bytes))));
  }
  static uint8x8_t load_halves(const char* p) {
    return vld1_u8(reinterpret_cast<const std::uint8_t*>(p));
  }
  static void store_halves(char* p, uint8x8_t x) { vst1_u8(reinterpret_cast<std::uint8_t*>(p), x); }
};

constinit const Kernels neon_kernels = make_kernels<VecNeon>();

}  // namespace hetero
