// Runs every kernel of every instruction set that this machine has on the same numbers and prints
// "<instruction set> <kernel> <digest of the results>", a line each.
//
// The numbers are pseudo-random and include NaNs, infinities, zeros and subnormals; the lengths
// leave every kind of rest behind the last whole vector. What the kernels leave open, the sign and
// payload of a NaN, is not in a digest. So two lines of one kernel differ only if its bits do, on
// one machine or on two.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <string>
#include <vector>

#include "base/float_state.h"
#include "checksum/crc32c.h"
#include "update/isa/isa.h"
#include "update/kernels/kernels.h"
#include "update/update.h"

namespace hetero {
namespace {

constexpr std::size_t kLengths[] = {0, 1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 4099};

enum class Format { fp32, bf16, fp16, bits, fp64, byte };

Format format_of(Dtype dtype) {
  return dtype == Dtype::fp32 ? Format::fp32 : dtype == Dtype::bf16 ? Format::bf16 : Format::fp16;
}

// Of states; in 8 bits the bytes of state blocks.
Format format_of(StateDtype dtype) {
  return dtype == StateDtype::fp32   ? Format::fp32
         : dtype == StateDtype::bf16 ? Format::bf16
                                     : Format::byte;
}

std::size_t bytes_of(Format format) {
  return format == Format::fp64 ? 8 : format == Format::fp32 ? 4 : format == Format::byte ? 1 : 2;
}

// splitmix64 (Steele, Lea, Flood, 2014).
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t next() {
    std::uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }

 private:
  std::uint64_t state_;
};

// The bits of an fp32 value: mostly of ordinary size, now and then anything, now and then special.
std::uint32_t fp32_bits(Random& random, bool finite) {
  static constexpr std::uint32_t kSpecial[] = {
      0x00000000, 0x80000000, 0x7f800000, 0xff800000, 0x7fc00000, 0x00000001, 0x80000001,
      0x007fffff, 0x807fffff, 0x00800000, 0x7f7fffff, 0xff7fffff, 0x3f800000, 0xbf800000};
  const std::uint64_t r = random.next();
  const auto low = static_cast<std::uint32_t>(r);
  const std::uint64_t choice = (r >> 32) % 16;
  if (choice == 0 && !finite) return kSpecial[(r >> 40) % std::size(kSpecial)];
  if (choice == 1 && !finite) return low;
  const auto exponent = static_cast<std::uint32_t>(95 + (r >> 40) % 36);  // 2^-32 to 2^3
  return (low & 0x807fffff) | (exponent << 23);
}

// An array that begins at an odd address: the kernels ask for no alignment.
class Array {
 public:
  Array(Format format, std::size_t numel)
      : format_(format), memory_(numel * bytes_of(format) + 1) {}

  char* at() { return memory_.data() + 1; }
  std::size_t numel() const { return (memory_.size() - 1) / bytes_of(format_); }

  Array& fill(Random& random, bool finite = false) {
    for (std::size_t i = 0; i < numel(); ++i) {
      const std::uint32_t wide = fp32_bits(random, finite);
      std::uint32_t bits = format_ == Format::fp32 ? wide : wide >> 16;
      // Sixteen random bits are a good mixture of halves; 0x7bff is their largest finite value.
      if (format_ == Format::fp16) bits = random.next() & (finite ? 0xbbff : 0xffff);
      if (format_ == Format::bits) bits = random.next() & 0xffff;
      if (format_ == Format::byte) bits = random.next() & 0xff;
      put(i, bits);
    }
    return *this;
  }

  void clear_signs() {
    const std::uint32_t sign = format_ == Format::fp32 ? 0x80000000 : 0x8000;
    for (std::size_t i = 0; i < numel(); ++i) {
      put(i, static_cast<std::uint32_t>(get(i)) & ~sign);
    }
  }

  // The bits of element i; one and the same for every NaN.
  std::uint64_t canonical(std::size_t i) {
    struct Nan {
      std::uint64_t magnitude, infinity;
    };
    const Nan nan = format_ == Format::fp64   ? Nan{~0ULL >> 1, 0x7ff0000000000000}
                    : format_ == Format::fp32 ? Nan{0x7fffffff, 0x7f800000}
                    : format_ == Format::bf16 ? Nan{0x7fff, 0x7f80}
                    : format_ == Format::fp16 ? Nan{0x7fff, 0x7c00}
                                              : Nan{0, 0};
    const std::uint64_t bits = get(i);
    return (bits & nan.magnitude) > nan.infinity ? nan.magnitude : bits;
  }

 private:
  std::uint64_t get(std::size_t i) {
    std::uint64_t bits = 0;  // both machines are little-endian
    std::memcpy(&bits, at() + i * bytes_of(format_), bytes_of(format_));
    return bits;
  }
  void put(std::size_t i, std::uint64_t bits) {
    std::memcpy(at() + i * bytes_of(format_), &bits, bytes_of(format_));
  }

  Format format_;
  std::vector<char> memory_;
};

// FNV-1a over canonical elements.
class Digest {
 public:
  void add(Array& array) {
    for (std::size_t i = 0; i < array.numel(); ++i) {
      for (std::uint64_t bits = array.canonical(i), byte = 0; byte < 8; ++byte, bits >>= 8) {
        value_ = (value_ ^ (bits & 0xff)) * 0x100000001b3;
      }
    }
  }

  void print(const std::string& isa, const std::string& kernel) const {
    std::printf("%s %s %016llx\n", isa.c_str(), kernel.c_str(),
                static_cast<unsigned long long>(value_));
  }

 private:
  std::uint64_t value_ = 0xcbf29ce484222325;
};

std::vector<Hyper> hypers_of(Rule rule) {
  Hyper plain{.lr = 0.01, .lr_decay = 0.1, .step = 3, .grad_scale = 0.37};
  const bool coupled = rule == Rule::adagrad || rule == Rule::sgd;
  Hyper decayed{.lr = 0.02,
                .weight_decay = 0.1,
                .decoupled = !coupled,
                .momentum = 0.9,
                .dampening = 0.3,
                .step = 1000};
  std::vector<Hyper> hypers = {plain, decayed};
  if (rule == Rule::adam) {
    decayed.decoupled = false;
    decayed.bias_correction = false;
    hypers.push_back(decayed);
  }
  if (rule == Rule::sgd || rule == Rule::muon_momentum) {
    hypers.push_back({.lr = 0.03, .momentum = 0.8, .nesterov = true});
  }
  return hypers;
}

Digest update_digest(const UpdateKind& kind) {
  Digest digest;
  Random random(number_of(kind));
  const bool is_momentum = kind.rule == Rule::muon_momentum;  // which writes bf16 directions
  for (const Hyper& hyper : hypers_of(kind.rule)) {
    const UpdateConstants constants = make_constants(kind, hyper);
    for (const std::size_t numel : kLengths) {
      Array param(format_of(is_momentum ? Dtype::bf16 : kind.dtype), numel),
          grad(format_of(kind.grad_dtype), numel);
      Array master(kind.dtype == Dtype::fp16 ? Format::fp32 : Format::bits,
                   kind.dtype == Dtype::fp32 ? 0 : numel);
      const Format state_format = format_of(kind.state_dtype);
      const std::size_t state_numel = state_bytes(kind.state_dtype, numel) / bytes_of(state_format);
      std::vector<Array> states(kind.states(), Array(state_format, state_numel));
      UpdateArrays at{.param = param.fill(random).at(),
                      .grad = grad.fill(random).at(),
                      .master = master.fill(random).at()};
      for (std::size_t i = 0; i < states.size(); ++i) at.states[i] = states[i].fill(random).at();
      // With bf16 parameters that sign is the carry, otherwise there is none.
      const bool is_signed = kind.rule != Rule::adam && kind.rule != Rule::adagrad;
      if (!is_signed && kind.dtype != Dtype::bf16 && kind.state_dtype != StateDtype::eight_bit) {
        states.back().clear_signs();
      }
      // An index whose low half wraps around within the array.
      kernels().update[number_of(kind)](at, numel, constants, 0x4fffffff0);
      digest.add(param);
      digest.add(master);
      for (Array& state : states) digest.add(state);
    }
  }
  return digest;
}

Digest split_digest(const Kernels::Splits& splits, StateDtype state_dtype) {
  Digest digest;
  Random random(1);
  for (const std::size_t numel : kLengths) {
    Array source(Format::fp32, numel), joined(Format::fp32, numel);
    Array param(Format::bf16, numel), remainder(Format::bits, numel);
    Array carrier(format_of(state_dtype), numel);
    const SplitArrays at{param.at(), remainder.at(), carrier.fill(random).at()};
    splits.split(source.fill(random).at(), at, numel);
    splits.join(at, joined.at(), numel);
    for (Array* array : {&param, &remainder, &carrier, &joined}) digest.add(*array);
  }
  return digest;
}

Digest blocks_digest(const Kernels::StateBlocks& blocks) {
  Digest digest;
  Random random(5);
  for (const std::size_t numel : kLengths) {
    Array source(Format::fp32, numel), decoded(Format::fp32, numel);
    Array encoded(Format::byte, state_bytes(StateDtype::eight_bit, numel));
    blocks.encode(source.fill(random).at(), encoded.at(), numel);
    blocks.decode(encoded.at(), decoded.at(), numel);
    for (Array* array : {&encoded, &decoded}) digest.add(*array);
  }
  return digest;
}

Digest norm_digest(Dtype dtype, bool finite) {
  Digest digest;
  Random random(2);
  for (const std::size_t numel : kLengths) {
    Array values(format_of(dtype), numel), sum(Format::fp64, 1);
    const double result = kernels().sum_of_squares[static_cast<std::size_t>(dtype)](
        values.fill(random, finite).at(), numel);
    std::memcpy(sum.at(), &result, sizeof result);
    digest.add(sum);
  }
  return digest;
}

Digest stream_digest() {
  Digest digest;
  Random random(3);
  for (const std::size_t numel : kLengths) {
    std::vector<Array> arrays(4, Array(Format::fp32, numel));
    for (Array& array : arrays) array.fill(random);
    kernels().stream({arrays[0].at(), arrays[1].at(), nullptr, {arrays[2].at(), arrays[3].at()}},
                     numel);
    for (Array& array : arrays) digest.add(array);
  }
  return digest;
}

Digest mean_digest(Dtype dtype) {
  Digest digest;
  Random random(4);
  for (const std::size_t numel : kLengths) {
    std::vector<Array> arrays(3, Array(format_of(dtype), numel));
    for (Array& array : arrays) array.fill(random);
    const char* const sources[] = {arrays[0].at(), arrays[1].at(), arrays[2].at()};
    kernels().mean[static_cast<std::size_t>(dtype)](sources, 3, 0, numel, arrays[1].at());
    digest.add(arrays[1]);
  }
  return digest;
}

Digest summed_write_digest(const Kernels::SummedWrite& write, Dtype source_dtype, Dtype dtype) {
  Digest digest;
  Random random(5);
  for (const std::size_t numel : kLengths) {
    Array source(format_of(source_dtype), numel), target(format_of(dtype), numel);
    Array sum(Format::fp64, 1);
    source.fill(random);
    const double result = write(source.at(), target.fill(random).at(), numel);
    std::memcpy(sum.at(), &result, sizeof result);
    digest.add(target);
    digest.add(sum);
  }
  return digest;
}

// By the CPU's own instruction where it has one, and for "scalar" by the tables.
Digest checksum_digest() {
  Digest digest;
  Random random(7);
  for (const std::size_t nbytes : kLengths) {
    Array data(Format::byte, nbytes), crc(Format::byte, sizeof(std::uint32_t));
    data.fill(random);
    const std::uint32_t found = crc32c(data.at(), nbytes, 0x12345678);
    std::memcpy(crc.at(), &found, sizeof found);
    digest.add(crc);
  }
  return digest;
}

void print_digests(const std::string& isa) {
  static constexpr const char* kRuleNames[] = {"adam", "lion", "adagrad",
                                               "sgd",  "muon", "muon_momentum"};
  set_isa(isa);
  const FloatState ieee;
  for (std::size_t number = 0; number < kUpdateKinds; ++number) {
    const UpdateKind kind = kind_of(number);
    update_digest(kind).print(isa, std::string("update-") +
                                       kRuleNames[static_cast<std::size_t>(kind.rule)] + "-" +
                                       name_of(kind.dtype) + "-" + name_of(kind.grad_dtype) + "-" +
                                       name_of(kind.state_dtype));
  }
  for (std::size_t i = 0; i < kCarrierDtypes; ++i) {
    const auto dtype = static_cast<StateDtype>(i);
    split_digest(kernels().sign_carrier[i], dtype)
        .print(isa, "split-sign-" + std::string(name_of(dtype)));
    split_digest(kernels().lowest_carrier[i], dtype)
        .print(isa, "split-lowest-" + std::string(name_of(dtype)));
  }
  split_digest(kernels().remainder_carrier, StateDtype::eight_bit).print(isa, "split-remainder");
  blocks_digest(kernels().signed_blocks).print(isa, "signed-blocks");
  blocks_digest(kernels().root_blocks).print(isa, "root-blocks");
  for (std::size_t i = 0; i < kDtypes; ++i) {
    const auto dtype = static_cast<Dtype>(i);
    norm_digest(dtype, false).print(isa, "sum-of-squares-" + std::string(name_of(dtype)));
    norm_digest(dtype, true).print(isa, "sum-of-squares-finite-" + std::string(name_of(dtype)));
    mean_digest(dtype).print(isa, "mean-" + std::string(name_of(dtype)));
    for (std::size_t k = 0; k < kDtypes; ++k) {
      const auto source = static_cast<Dtype>(k);
      const std::string of = std::string(name_of(source)) + "-" + name_of(dtype);
      summed_write_digest(kernels().copy_and_sum[i][k], source, dtype)
          .print(isa, "copy-and-sum-" + of);
      summed_write_digest(kernels().add_and_sum[i][k], source, dtype)
          .print(isa, "add-and-sum-" + of);
    }
  }
  stream_digest().print(isa, "stream");
  checksum_digest().print(isa, "crc32c");
}

}  // namespace
}  // namespace hetero

int main() {
  try {
    for (const std::string& isa : hetero::isa_available()) hetero::print_digests(isa);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "digest: %s\n", error.what());
    return 1;
  }
}
