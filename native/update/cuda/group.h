// The elements of arrays that one thread of a GPU works on.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hetero::cuda {

inline constexpr unsigned kThreads = 256;  // of a block of threads
inline constexpr unsigned kGroup = 4;      // elements that a thread reads at once

template <std::size_t size>
struct Wide;
template <>
struct Wide<1> {
  using Element = std::uint8_t;
};
template <>
struct Wide<2> {
  using Element = std::uint16_t;
};
template <>
struct Wide<4> {
  using Element = std::uint32_t;
};

// kGroup elements of `size` bytes. `whole`: all of them, from an aligned address; else the first
// `count`, and zeros.
template <std::size_t size>
struct alignas(kGroup* size) Group {
  using Element = typename Wide<size>::Element;
  Element elements[kGroup];

  char* at(unsigned i) { return reinterpret_cast<char*>(elements + i); }

  void load(const char* from, bool whole, unsigned count) {
    if (whole) {
      *this = *reinterpret_cast<const Group*>(from);
      return;
    }
#pragma unroll
    for (unsigned i = 0; i < kGroup; ++i) {
      elements[i] = i < count ? reinterpret_cast<const Element*>(from)[i] : Element{0};
    }
  }

  void store(char* to, bool whole, unsigned count) const {
    if (whole) {
      *reinterpret_cast<Group*>(to) = *this;
      return;
    }
#pragma unroll
    for (unsigned i = 0; i < kGroup; ++i) {
      if (i < count) reinterpret_cast<Element*>(to)[i] = elements[i];
    }
  }
};
template <>
struct Group<0> {  // of what a kind does not have
  char* at(unsigned) { return nullptr; }
  void load(const char*, bool, unsigned) {}
  void store(char*, bool, unsigned) const {}
};

// The elements of an array of `numel` that a thread has: `count` from number `first` on, if any.
struct Share {
  std::uint64_t first;
  unsigned count;

  Share(std::uint64_t numel, unsigned block, unsigned thread)
      : first((static_cast<std::uint64_t>(block) * kThreads + thread) * kGroup),
        count(first >= numel           ? 0
              : numel - first < kGroup ? static_cast<unsigned>(numel - first)
                                       : kGroup) {}
};

}  // namespace hetero::cuda
