// Checksums of memory.
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "bindings/python.h"
#include "checksum/crc32c.h"

namespace hetero {
namespace {

std::uint32_t bound_crc32c(std::uintptr_t address, std::size_t nbytes, std::uint32_t crc,
                           const std::string& implementation) {
  if (address == 0 && nbytes != 0) {
    throw std::invalid_argument("address is 0, must be the address of " + std::to_string(nbytes) +
                                " bytes");
  }
  const void* data = reinterpret_cast<const void*>(address);
  return implementation.empty() ? crc32c(data, nbytes, crc)
                                : crc32c_by(implementation, data, nbytes, crc);
}

}  // namespace

void bind_checksum(py::module_& module) {
  module.def("crc32c", &bound_crc32c, "address"_a, "nbytes"_a, "crc"_a = 0, "implementation"_a = "",
             ReleaseGil());
  module.def("crc32c_joined", &crc32c_joined, "first"_a, "second"_a, "second_nbytes"_a);
  module.def("crc32c_implementations", &crc32c_implementations);
}

}  // namespace hetero
