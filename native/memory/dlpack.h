// The part of the DLPack C ABI that an exported tensor needs, declared from the public
// specification (unversioned structures, capsule name "dltensor").
#pragma once

#include <cstdint>

namespace hetero::dlpack {

inline constexpr std::int32_t kCpu = 1;          // kDLCPU
inline constexpr std::uint8_t kUnsignedInt = 1;  // kDLUInt

inline constexpr const char* kCapsuleName = "dltensor";  // renamed by the consumer that takes it

struct Device {
  std::int32_t device_type;
  std::int32_t device_id;
};

struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements
  std::uint64_t byte_offset;
};

// Ownership is passed by pointer: whoever holds it calls `deleter` exactly once.
struct ManagedTensor {
  Tensor tensor;
  void* manager_context;
  void (*deleter)(ManagedTensor* self);
};

}  // namespace hetero::dlpack
