// Invariants of our own, checked in debug and sanitizer builds (HETERO_CHECKS) and free elsewhere.
//
// For what a bug of this library would break, never for what a caller or the system may do wrong.
#pragma once

#if !defined(NDEBUG) && !defined(HETERO_CHECKS)
#define HETERO_CHECKS
#endif

#ifdef HETERO_CHECKS

#include <cstdio>
#include <cstdlib>

namespace hetero {

[[noreturn]] inline void check_failed(const char* condition, const char* file, int line) noexcept {
  std::fprintf(stderr, "%s:%d: this does not hold: %s\n", file, line, condition);
  std::abort();
}

}  // namespace hetero

#define HETERO_CHECK(condition) \
  ((condition) ? static_cast<void>(0) : ::hetero::check_failed(#condition, __FILE__, __LINE__))

#else

// The condition is compiled, so that it stays valid, and not evaluated.
#define HETERO_CHECK(condition) static_cast<void>(sizeof((condition) ? 1 : 0))

#endif
