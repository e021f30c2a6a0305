// Names that Python gives for the values of an enum, of dtypes above all.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

#include "update/update_kind.h"

namespace hetero {

inline constexpr const char* kDtypeNames[] = {"fp32", "bf16", "fp16"};

// The value of the enum whose name stands at its number in `names`. Throws std::invalid_argument,
// with `parameter` and the names.
template <typename Enum, std::size_t count>
Enum value_of(const char* const (&names)[count], const std::string& name, const char* parameter) {
  std::string all;
  for (std::size_t i = 0; i < count; ++i) {
    if (name == names[i]) return static_cast<Enum>(i);
    all += std::string(i == 0 ? "" : i + 1 == count ? " or " : ", ") + "'" + names[i] + "'";
  }
  throw std::invalid_argument(std::string(parameter) + " is '" + name + "', must be " + all);
}

inline Dtype parse_dtype(const std::string& name, const char* parameter = "dtype") {
  return value_of<Dtype>(kDtypeNames, name, parameter);
}

}  // namespace hetero
