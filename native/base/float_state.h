// The thread's floating-point mode (rounding, flush-to-zero), pinned to IEEE's default for a scope.
//
// torch.set_flush_denormal(True) changes it for the calling thread; without this guard the numbers
// would depend on which thread happens to compute a block.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace hetero {

class FloatState {
 public:
  FloatState() : saved_(get()) { set(kIeee); }
  ~FloatState() { set(saved_); }
  FloatState(const FloatState&) = delete;
  FloatState& operator=(const FloatState&) = delete;

 private:
#if defined(__x86_64__)
  using Word = unsigned int;
  static constexpr Word kIeee = 0x1f80;  // all exceptions masked, round to nearest, no flushing
  static Word get() { return _mm_getcsr(); }
  static void set(Word word) { _mm_setcsr(word); }
#elif defined(__aarch64__)
  using Word = std::uint64_t;
  static constexpr Word kIeee = 0;
  static Word get() {
    Word word;
    asm volatile("mrs %0, fpcr" : "=r"(word));
    return word;
  }
  static void set(Word word) { asm volatile("msr fpcr, %0" : : "r"(word)); }
#else
  using Word = int;
  static constexpr Word kIeee = 0;
  static Word get() { return 0; }
  static void set(Word) {}
#endif
  Word saved_;
};

}  // namespace hetero
