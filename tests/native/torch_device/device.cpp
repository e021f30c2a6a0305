// A device of torch's PrivateUse1 kind, whose memory is RAM and whose kernels are the CPU's.
//
// Whoever reads or writes at an address of its memory without it gets a SIGSEGV, as with a GPU's.
// An operator gets CPU tensors over another mapping of it, so its bits are the CPU's, and a view
// that it returns becomes one of the device's tensor. What it returns anew is copied to memory of
// the device, which holds NaNs until it is written. As on a GPU, tensors of an operator are on one
// device, but for the CPU's numbers and indices. All work is done when a call returns; streams and
// events have numbers and no effect. Random numbers are drawn from the device's own generator.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/native_dropout_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/library.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <new>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
const c10::Device kHere(kType, 0);
constexpr std::size_t kAlignment = 64;

struct Counts {
  std::atomic<std::int64_t> allocated{0}, peak{0};  // bytes of the device
  std::atomic<std::int64_t> pinned{0};              // how often RAM was allocated pinned
  std::atomic<std::int64_t> recorded{0};            // tensors for streams, by record_stream()
  std::atomic<std::int64_t> random{0};              // draws from generators of the device
  std::atomic<std::int64_t> crossed{0};  // bytes that tensors were copied to it and from it
} counts;

std::size_t rounded(std::size_t nbytes) {
  return (nbytes + kAlignment - 1) / kAlignment * kAlignment;
}

// The device's memory: pages that are mapped twice, for the host without access, and as real().
class Pages {
 public:
  Pages() : at_(static_cast<char*>(map(nullptr, 2 * kBytes, MAP_PRIVATE | MAP_ANONYMOUS, -1))) {
    const int file = memfd_create("hetero_test", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, kBytes) != 0) throw std::bad_alloc();
    map(at_, kBytes, MAP_SHARED | MAP_FIXED, file);
    map(at_ + kBytes, kBytes, MAP_SHARED | MAP_FIXED, file);
    protect(at_ + kBytes, PROT_READ | PROT_WRITE);
    free_[0] = kBytes;
  }

  void* take(std::size_t nbytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = std::find_if(free_.begin(), free_.end(),
                                    [&](const auto& range) { return range.second >= nbytes; });
    if (found == free_.end()) throw std::bad_alloc();
    const auto [begin, length] = *found;
    free_.erase(found);
    if (length > nbytes) free_[begin + nbytes] = length - nbytes;
    taken_[begin] = nbytes;
    return at_ + begin;
  }

  std::size_t give(void* at) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = taken_.find(static_cast<std::size_t>(static_cast<char*>(at) - at_));
    auto [begin, nbytes] = *found;
    const std::size_t freed = nbytes;
    taken_.erase(found);
    auto next = free_.upper_bound(begin);
    if (next != free_.end() && next->first == begin + nbytes) {
      nbytes += next->second;
      next = free_.erase(next);
    }
    if (next != free_.begin() && std::prev(next)->first + std::prev(next)->second == begin) {
      std::prev(next)->second += nbytes;
    } else {
      free_[begin] = nbytes;
    }
    return freed;
  }

  // Where kernels find what has this address; other addresses are as they are.
  char* real(const void* address) const {
    char* const found = const_cast<char*>(static_cast<const char*>(address));
    return at_ <= found && found < at_ + kBytes ? found + kBytes : found;
  }

  // While a kernel runs that has addresses in its tables.
  void expose(bool exposed) {
    const std::lock_guard<std::mutex> lock(mutex_);
    exposed_ += exposed ? 1 : -1;
    protect(at_, exposed_ > 0 ? PROT_READ | PROT_WRITE : PROT_NONE);
  }

 private:
  static constexpr std::size_t kBytes = std::size_t{1} << 30;

  static void* map(void* at, std::size_t nbytes, int flags, int file) {
    void* const mapped = mmap(at, nbytes, PROT_NONE, flags | MAP_NORESERVE, file, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    return mapped;
  }
  static void protect(void* at, int how) {
    if (mprotect(at, kBytes, how) != 0) throw std::bad_alloc();
  }

  char* const at_;
  std::mutex mutex_;
  std::map<std::size_t, std::size_t> free_, taken_;  // bytes, by where they begin
  int exposed_ = 0;
};

Pages& pages() {
  static Pages* const made = new Pages();  // for good: tensors may be freed at the process's end
  return *made;
}

char* real(const void* address) { return pages().real(address); }

void free_on_device(void* at) {
  if (at != nullptr) counts.allocated -= static_cast<std::int64_t>(pages().give(at));
}

class DeviceMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t nbytes) override {
    if (nbytes == 0) return {nullptr, kHere};
    void* const at = pages().take(rounded(nbytes));
    std::memset(real(at), 0xFF, nbytes);
    const std::int64_t now = counts.allocated += static_cast<std::int64_t>(rounded(nbytes));
    std::int64_t peak = counts.peak;
    while (peak < now && !counts.peak.compare_exchange_weak(peak, now)) {
    }
    return {at, at, &free_on_device, kHere};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_on_device; }
  void copy_data(void* to, const void* from, std::size_t nbytes) const override {
    default_copy_data(real(to), real(from), nbytes);
  }
};

DeviceMemory device_memory;
REGISTER_ALLOCATOR(kType, &device_memory)

// RAM that tensor.is_pinned() finds.
class PinnedMemory final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(std::size_t nbytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, std::size_t nbytes) const override {
    default_copy_data(to, from, nbytes);
  }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

  bool has(const void* at) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto next = ranges_.upper_bound(static_cast<const char*>(at));
    if (next == ranges_.begin()) return false;
    --next;
    return static_cast<const char*>(at) < next->first + next->second;
  }
  void forget(const void* at) {
    const std::lock_guard<std::mutex> lock(mutex_);
    ranges_.erase(static_cast<const char*>(at));
  }

 private:
  std::mutex mutex_;
  std::map<const char*, std::size_t> ranges_;
};

PinnedMemory pinned_memory;

void free_pinned(void* at) {
  pinned_memory.forget(at);
  std::free(at);
}

c10::DataPtr PinnedMemory::allocate(std::size_t nbytes) {
  void* const at = nbytes == 0 ? nullptr : std::aligned_alloc(kAlignment, rounded(nbytes));
  if (at != nullptr) {
    std::memset(at, 0xFF, nbytes);
    const std::lock_guard<std::mutex> lock(mutex_);
    ranges_[static_cast<const char*>(at)] = nbytes;
    ++counts.pinned;
  }
  return {at, at, &free_pinned, c10::Device(c10::DeviceType::CPU)};
}

c10::DeleterFnPtr PinnedMemory::raw_deleter() const { return &free_pinned; }

REGISTER_HOST_ALLOCATOR(kType, &pinned_memory)

thread_local c10::StreamId current_stream = 0;
std::atomic<c10::StreamId> last_stream{0};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return kHere; }
  c10::Device getDevice() const override { return kHere; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return numbered(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return numbered(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return numbered(++last_stream);
  }
  c10::Stream getNewStream(c10::Device, int) const override { return numbered(++last_stream); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return numbered(std::exchange(current_stream, stream.id()));
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}

  void record(void** event, const c10::Stream&, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    static char recorded;
    *event = &recorded;
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {
    ++counts.recorded;
  }

 private:
  static c10::Stream numbered(c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, kHere, id);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// A generator of the CPU's under the device's name, whose numbers are not those of the same seed.
struct DeviceGenerator final : c10::GeneratorImpl {
  DeviceGenerator() : DeviceGenerator(at::detail::createCPUGenerator(~c10::default_rng_seed_val)) {}
  explicit DeviceGenerator(at::Generator numbers)
      : GeneratorImpl(kHere, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        numbers(std::move(numbers)) {}

  void set_current_seed(std::uint64_t seed) override { numbers.set_current_seed(~seed); }
  void set_offset(std::uint64_t offset) override { numbers.set_offset(offset); }
  std::uint64_t get_offset() const override { return numbers.get_offset(); }
  std::uint64_t current_seed() const override { return ~numbers.current_seed(); }
  std::uint64_t seed() override { return ~numbers.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    numbers.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return numbers.unsafeGetGeneratorImpl()->get_state();
  }
  DeviceGenerator* clone_impl() const override { return new DeviceGenerator(numbers.clone()); }

  at::Generator numbers;
};

const at::Generator& default_generator() {
  static const at::Generator made = at::make_generator<DeviceGenerator>();
  return made;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return default_generator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<DeviceGenerator>();
  }
  c10::Device getDeviceFromPtr(void*) const override { return kHere; }
  bool isPinnedPtr(const void* at) const override { return pinned_memory.has(at); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
};

[[maybe_unused]] const bool has_hooks = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

bool is_here(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

at::Tensor over(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(key), like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides());
  impl->set_storage_offset(like.storage_offset());
  return made;
}

// The tensors of one operator's call, and the CPU's over the same memory.
class Call {
 public:
  at::Tensor to_cpu(const at::Tensor& tensor) {
    if (!is_here(tensor)) return tensor;
    const c10::Storage& storage = tensor.storage();
    auto found = storages_.find(storage.unsafeGetStorageImpl());
    if (found == storages_.end()) {
      c10::DataPtr data(
          real(storage.mutable_data()), new c10::Storage(storage),
          [](void* kept) { delete static_cast<c10::Storage*>(kept); },
          c10::Device(c10::DeviceType::CPU));
      c10::Storage made(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data),
                        c10::GetCPUAllocator(), /*resizable=*/true);
      found = storages_.emplace(storage.unsafeGetStorageImpl(), made).first;
      originals_.emplace(made.unsafeGetStorageImpl(), storage);
    }
    at::Tensor made = over(found->second, c10::DispatchKey::CPU, tensor);
    if (tensor.is_neg()) made._set_neg(true);
    if (tensor.is_conj()) made._set_conj(true);
    given_.emplace_back(tensor, made);
    return made;
  }

  // What was resized by the call is so on the device, too.
  void write_back() {
    for (auto& [tensor, made] : given_) {
      const c10::Storage& now = made.storage();
      c10::Storage storage = tensor.storage();
      if (now.data() != real(storage.data())) {
        c10::DataPtr data = device_memory.allocate(now.nbytes());
        std::memcpy(real(data.get()), now.data(), now.nbytes());
        storage.set_data_ptr_noswap(std::move(data));
        storage.set_nbytes(now.nbytes());
        // (Another tensor of the call may have the same storage.)
        c10::DataPtr same(
            real(storage.mutable_data()), new c10::Storage(storage),
            [](void* kept) { delete static_cast<c10::Storage*>(kept); },
            c10::Device(c10::DeviceType::CPU));
        now.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(same));
      }
      if (made.sizes() != tensor.sizes() || made.strides() != tensor.strides()) {
        tensor.unsafeGetTensorImpl()->set_sizes_and_strides(made.sizes(), made.strides());
      }
    }
  }

  at::Tensor from_cpu(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.device().type() != c10::DeviceType::CPU) return tensor;
    for (const auto& [mine, made] : given_) {
      if (made.is_same(tensor)) return mine;
    }
    const c10::Storage& storage = tensor.storage();
    const auto viewed = originals_.find(storage.unsafeGetStorageImpl());
    if (viewed != originals_.end()) {
      return over(viewed->second, c10::DispatchKey::PrivateUse1, tensor);
    }
    c10::Storage made(c10::Storage::use_byte_size_t(), storage.nbytes(),
                      device_memory.allocate(storage.nbytes()), &device_memory, /*resizable=*/true);
    if (storage.nbytes() != 0) {
      std::memcpy(real(made.mutable_data()), storage.data(), storage.nbytes());
    }
    at::Tensor copy = over(made, c10::DispatchKey::PrivateUse1, tensor);
    if (tensor.is_neg()) copy._set_neg(true);
    return copy;
  }

  bool has_any() const { return !given_.empty(); }

 private:
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_;   // of the device: the CPU's
  std::unordered_map<c10::StorageImpl*, c10::Storage> originals_;  // the other way round
  std::vector<std::pair<at::Tensor, at::Tensor>> given_;
};

template <class Convert>
void convert_tensors(c10::IValue& value, Convert convert) {
  if (value.isTensor()) {
    value = convert(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const at::Tensor& each : value.toTensorVector()) made.push_back(convert(each));
    value = made;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> made;
    for (const std::optional<at::Tensor>& each : value.toOptionalTensorVector()) {
      made.push_back(each.has_value() ? std::optional(convert(*each)) : std::nullopt);
    }
    value = made;
  }
}

// The CPU's generator that stands for what the operator was given.
c10::IValue numbers_of(const c10::IValue& given) {
  const at::Generator generator = given.isNone() ? default_generator() : given.toGenerator();
  if (generator.device().type() != kType) return given;
  ++counts.random;
  return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->numbers;
}

// (Of indices, a list that may have gaps, a GPU takes the CPU's, too.)
void require_one_device(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> arguments) {
  bool here = false, elsewhere = false;
  const auto look_at = [&](const at::Tensor& tensor) {
    here = here || is_here(tensor);
    elsewhere = elsewhere || (tensor.defined() && tensor.is_cpu() && tensor.dim() > 0);
  };
  for (const c10::IValue& value : arguments) {
    if (value.isTensor()) {
      look_at(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& each : value.toTensorVector()) look_at(each);
    }
  }
  TORCH_CHECK(!(here && elsewhere), schema.operator_name(),
              ": expected all tensors to be on the same device, and some are on the CPU");
}

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const std::size_t arguments = schema.arguments().size();
  require_one_device(schema, torch::jit::last(*stack, arguments));
  Call call;
  const std::size_t first = stack->size() - arguments;
  for (std::size_t i = 0; i < arguments; ++i) {
    c10::IValue& value = (*stack)[first + i];
    if (value.isDevice() && value.toDevice().type() == kType) {
      value = c10::Device(c10::DeviceType::CPU);
    } else {
      convert_tensors(value, [&](const at::Tensor& tensor) { return call.to_cpu(tensor); });
    }
  }
  for (std::size_t i = 0; i < arguments; ++i) {
    c10::IValue& value = (*stack)[first + i];
    const bool draws = schema.arguments()[i].name() == "generator";
    if (draws && (value.isGenerator() || call.has_any())) value = numbers_of(value);
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.write_back();
  for (std::size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    convert_tensors((*stack)[i], [&](const at::Tensor& tensor) { return call.from_cpu(tensor); });
  }
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &device_memory,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &device_memory,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool) {
  Call call;
  call.to_cpu(to).copy_(call.to_cpu(self));
  if (is_here(to) != is_here(self)) counts.crossed += static_cast<std::int64_t>(self.nbytes());
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Tensor& set_part(at::Tensor& self, at::Storage source, std::int64_t offset,
                     at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.data() != nullptr && stride.size() == size.size()) {
    impl->set_sizes_and_strides(size, stride);
  } else {
    impl->set_sizes_contiguous(size);
  }
  return self;
}

at::Tensor& set_whole(at::Tensor& self, at::Storage source) {
  const auto numel = static_cast<std::int64_t>(source.nbytes() / self.itemsize());
  return set_part(self, std::move(source), 0, {numel}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_part(self, source.storage(), source.storage_offset(), source.sizes(),
                  source.strides());
}

// A tensor of the CPU's may become one of the device's, by tensor.data = other.
bool may_become(const at::Tensor&, const at::Tensor&) { return true; }

void record_stream(at::Tensor&, at::Stream) { ++counts.recorded; }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("set_.source_Storage_storage_offset", set_part);
  m.impl("set_.source_Storage", set_whole);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("_has_compatible_shallow_copy_type", may_become);
  m.impl("record_stream", record_stream);
  m.impl("native_dropout", at::native::native_dropout_cpu);  // which draws by bernoulli_()
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m){
    KERNEL_PRIVATEUSEONE(linear, lower_precision_fp) KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
        KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
            KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
                KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
                    KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
                        KERNEL_PRIVATEUSEONE(layer_norm, fp32)
                            KERNEL_PRIVATEUSEONE(cross_entropy_loss, fp32)}

TORCH_LIBRARY(hetero_test, m) {
  m.def("default_generator() -> Generator?", [] { return default_generator(); });
  m.def("reset_peak() -> ()", [] { counts.peak = counts.allocated.load(); });
  m.def("real(int address) -> int", [](std::int64_t address) {
    return reinterpret_cast<std::int64_t>(real(reinterpret_cast<void*>(address)));
  });
  m.def("expose(bool exposed) -> ()", [](bool exposed) { pages().expose(exposed); });
  // As Counts has them.
  m.def("counts() -> int[]", [] {
    return std::vector<std::int64_t>{counts.allocated, counts.peak,   counts.pinned,
                                     counts.recorded,  counts.random, counts.crossed};
  });
}

}  // namespace
