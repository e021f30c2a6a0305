// Memory (Arena, Pins, peers', copies, checksums), IoEngine and IoOp as Python sees them, and the
// exceptions of failed transfers.
#include <pybind11/stl.h>
#include <sys/prctl.h>
#include <sys/uio.h>

#include <cerrno>
#include <cstring>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "bindings/python.h"
#include "checksum/crc32c.h"
#include "io/io_engine.h"
#include "io/stripe_map.h"
#include "memory/arena.h"
#include "memory/stream_copy.h"

namespace hetero {

namespace {

py::object export_capsule(const Arena& arena, std::size_t offset, std::size_t nbytes,
                          std::shared_ptr<Pins> pins, std::size_t slot) {
  dlpack::ManagedTensor* managed = arena.export_tensor(offset, nbytes, std::move(pins), slot);
  managed->deleter = [](dlpack::ManagedTensor* self) {
    // Unmapping takes long; letting go of the GIL whenever any tensor dies would, too.
    std::shared_ptr<const void> memory = Arena::end_export(self);
    if (memory.use_count() == 1) without_gil([&] { memory.reset(); });
  };
  PyObject* capsule = PyCapsule_New(managed, dlpack::kCapsuleName, [](PyObject* self) {
    // A consumer renames the capsule; one that still has its name was never consumed.
    if (!PyCapsule_IsValid(self, dlpack::kCapsuleName)) return;
    auto* owned =
        static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(self, dlpack::kCapsuleName));
    owned->deleter(owned);
  });
  if (capsule == nullptr) {
    managed->deleter(managed);
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(capsule);
}

// Lets go of a Python object on whichever thread the last tensor over its memory dies.
class Owner {
 public:
  explicit Owner(py::object object) : object_(object.release().ptr()) {}

  void release() const {
    // When Python ends or has ended, the memory goes with the process.
    if (Py_IsInitialized() == 0) return;
    const py::gil_scoped_acquire held;
    Py_DECREF(object_);
  }

 private:
  PyObject* object_;
};

std::shared_ptr<Arena> arena_over(std::uintptr_t address, std::size_t nbytes, int device_type,
                                  int device_id, py::object owner, std::size_t slot_bytes) {
  if (address == 0) throw std::invalid_argument("an arena cannot be over address 0");
  const Owner held(std::move(owner));
  try {
    return released_without_gil(std::make_shared<Arena>(
        reinterpret_cast<std::byte*>(address), nbytes, dlpack::Device{device_type, device_id},
        [held] { held.release(); }, slot_bytes));
  } catch (...) {
    held.release();
    throw;
  }
}

void permit_peers_to_read([[maybe_unused]] bool permit) {
#ifdef PR_SET_PTRACER
  prctl(PR_SET_PTRACER, permit ? PR_SET_PTRACER_ANY : 0, 0, 0, 0);
#endif
}

void read_peer_memory(pid_t process, std::uintptr_t from, std::uintptr_t into, std::size_t nbytes) {
  // One call copies 2 GiB at most, and fewer than it was asked for if a page is missing.
  while (nbytes > 0) {
    const iovec local{reinterpret_cast<void*>(into), nbytes};
    const iovec remote{reinterpret_cast<void*>(from), nbytes};
    const ssize_t copied = process_vm_readv(process, &local, 1, &remote, 1, 0);
    if (copied < 0) {
      throw std::system_error(
          errno, std::generic_category(),
          "cannot read " + std::to_string(nbytes) + " bytes of process " + std::to_string(process));
    }
    if (copied == 0) {
      throw std::system_error(EFAULT, std::generic_category(),
                              "process " + std::to_string(process) + " has no memory there");
    }
    into += static_cast<std::uintptr_t>(copied);
    from += static_cast<std::uintptr_t>(copied);
    nbytes -= static_cast<std::size_t>(copied);
  }
}

std::uint32_t checksum(std::uintptr_t address, std::size_t nbytes, std::uint32_t crc) {
  if (address == 0 && nbytes != 0) {
    throw std::invalid_argument("address is 0, must be the address of " + std::to_string(nbytes) +
                                " bytes");
  }
  return crc32c(reinterpret_cast<const void*>(address), nbytes, crc);
}

void bind_memory(py::module_& module) {
  module.def("crc32c", &checksum, "address"_a, "nbytes"_a, "crc"_a = 0, ReleaseGil());
  module.def(
      "stream_copy",
      [](std::uintptr_t to, std::uintptr_t from, std::size_t nbytes) {
        stream_copy(reinterpret_cast<std::byte*>(to), reinterpret_cast<const std::byte*>(from),
                    nbytes);
      },
      "to"_a, "source"_a, "nbytes"_a, ReleaseGil());
  module.def("permit_peers_to_read", &permit_peers_to_read, "permit"_a);
  module.def("read_peer_memory", &read_peer_memory, "process"_a, "source"_a, "into"_a, "nbytes"_a,
             ReleaseGil());

  py::class_<Pins, std::shared_ptr<Pins>>(module, "Pins")
      .def(py::init<std::size_t>(), "slots"_a)
      .def("__len__", &Pins::size)
      .def("__getitem__", &Pins::count, "slot"_a)
      .def("in_use", &Pins::in_use);

  py::class_<Arena, std::shared_ptr<Arena>>(module, "Arena")
      .def(py::init([](std::size_t nbytes, std::size_t slot_bytes) {
             return released_without_gil(std::make_shared<Arena>(nbytes, slot_bytes));
           }),
           "nbytes"_a, "slot_bytes"_a = 0)
      .def_static("over", &arena_over, "address"_a, "nbytes"_a, "device_type"_a, "device_id"_a,
                  "owner"_a, "slot_bytes"_a = 0)
      .def_property_readonly("nbytes", &Arena::nbytes)
      .def_property_readonly(
          "address",
          [](const Arena& self) { return reinterpret_cast<std::uintptr_t>(self.address()); })
      .def("export", &export_capsule, "offset"_a, "nbytes"_a, "pins"_a = nullptr, "slot"_a = 0)
      .def_property_readonly("transfers", &Arena::transfers)
      .def("wipe_on_fork", &Arena::wipe_on_fork, "offset"_a, "nbytes"_a, ReleaseGil())
      .def("discard", &Arena::discard, "offset"_a, "nbytes"_a, ReleaseGil());
}

constexpr const char* kKinds[] = {"read", "write"};

// offload._native.NativeIoError, whose text is its attribute `message`. Borrowed and never
// released: exceptions may be translated until the interpreter is gone.
PyObject* io_error_type = nullptr;

void raise_io_error(const IoError& failure) {
  const std::string reason = failure.error == 0 ? "unexpected end of file"
                                                : std::generic_category().message(failure.error);
  const py::object filename = py::reinterpret_steal<py::object>(
      PyUnicode_DecodeFSDefaultAndSize(failure.path->data(), std::ssize(*failure.path)));
  const py::object type = py::reinterpret_borrow<py::object>(io_error_type);
  const py::object error = type(failure.error, reason, filename);
  error.attr("message") =
      py::reinterpret_steal<py::object>(PyUnicode_DecodeFSDefault(failure.what()));
  error.attr("op") = kKinds[static_cast<int>(failure.kind)];
  error.attr("offset") = failure.offset;
  error.attr("wanted_bytes") = failure.wanted_bytes;
  error.attr("got_bytes") = failure.got_bytes;
  error.attr("free_bytes") = failure.free_bytes;
  PyErr_SetObject(io_error_type, error.ptr());
}

// For every function of this module, the step pipeline's included.
void translate(std::exception_ptr caught) {
  try {
    std::rethrow_exception(std::move(caught));
  } catch (const IoError& failure) {
    raise_io_error(failure);
  } catch (const std::system_error& failure) {
    const py::tuple arguments = py::make_tuple(failure.code().value(), failure.what());
    PyErr_SetObject(PyExc_OSError, arguments.ptr());
  }
}

std::shared_ptr<IoEngine> make_engine(const std::string& kind, unsigned queue_depth,
                                      std::size_t block_bytes, unsigned threads,
                                      double patience_s) {
  const IoOptions options{queue_depth, block_bytes, threads, patience_s};
  return released_without_gil(make_own<IoEngine>(kind, options));
}

using Transfer = Handle<IoEngine, IoOp>;

template <IoKind kind>
Transfer submit(const std::shared_ptr<IoEngine>& engine, int file, std::uintptr_t address,
                std::size_t nbytes, std::uint64_t offset, bool soon) {
  const IoTurn turn = soon ? IoTurn::soon : IoTurn::next;
  return Transfer(
      engine, engine->submit(kind, file, reinterpret_cast<void*>(address), nbytes, offset, turn));
}

int add_striped_file(IoEngine& engine, const std::vector<std::pair<int, std::string>>& sources,
                     const StripeMap& stripes, bool checksums) {
  std::vector<FileMember> members;
  for (const auto& [fd, path] : sources) members.push_back({fd, path});
  return engine.add_file(members, stripes, checksums);
}

py::bytes checksums_of(const IoEngine& engine, int file, std::uint64_t offset, std::size_t nbytes) {
  const auto found = without_gil([&] { return engine.checksums(file, offset, nbytes); });
  return {reinterpret_cast<const char*>(found.data()), found.size() * sizeof(std::uint32_t)};
}

void set_checksums(IoEngine& engine, int file, std::uint64_t offset, const py::bytes& content) {
  const std::string_view bytes = content;
  PageChecksums::Checksums checksums(bytes.size() / sizeof(std::uint32_t));
  if (bytes.size() % sizeof(std::uint32_t) != 0) {
    throw std::invalid_argument("checksums are 4 bytes a page, not " +
                                std::to_string(bytes.size()) + " in all");
  }
  if (!checksums.empty()) std::memcpy(checksums.data(), bytes.data(), bytes.size());
  without_gil([&] { engine.set_checksums(file, offset, checksums); });
}

py::dict stats_of(const IoEngine& engine) {
  const IoStats stats = without_gil([&] { return engine.stats(); });
  return py::dict("read_bytes"_a = stats.read_bytes, "written_bytes"_a = stats.written_bytes,
                  "reads"_a = stats.reads, "writes"_a = stats.writes,
                  "short_transfers"_a = stats.short_transfers, "retries"_a = stats.retries,
                  "errors"_a = stats.errors, "in_flight"_a = stats.in_flight,
                  "busy_s"_a = stats.busy_s);
}

void bind_io(py::module_& module) {
  io_error_type = PyErr_NewExceptionWithDoc(
      "offload._native.NativeIoError",
      "A failed transfer: which, of what file, how far it came, and why.", PyExc_OSError, nullptr);
  if (io_error_type == nullptr) throw py::error_already_set();
  const auto type = py::reinterpret_borrow<py::object>(io_error_type);
  // OSError's own text has errno and file only.
  type.attr("__str__") =
      py::cpp_function([](const py::object& self) { return self.attr("message"); },
                       py::is_method(type), py::name("__str__"));
  module.attr("NativeIoError") = type;
  py::register_local_exception_translator(&translate);

  Transfer::bind(module, "IoOp")
      .def("hurry", [](const Transfer& self) { self.owner->hurry(*self.op); }, ReleaseGil());

  py::class_<StripeMap>(module, "StripeMap")
      .def(py::init<const std::vector<unsigned>&, std::uint64_t>(), "weights"_a, "unit_bytes"_a)
      .def_property_readonly("members", &StripeMap::members)
      .def_property_readonly("unit_bytes", &StripeMap::unit_bytes)
      .def_property_readonly("pattern", &StripeMap::pattern)
      .def(
          "place",
          [](const StripeMap& self, std::uint64_t offset) {
            const StripeMap::Place place = self.place(offset);
            return py::make_tuple(place.member, place.offset, place.run_bytes);
          },
          "offset"_a)
      .def("member_bytes", &StripeMap::member_bytes, "member"_a, "nbytes"_a);

  const IoOptions defaults;
  py::class_<IoEngine, std::shared_ptr<IoEngine>>(module, "IoEngine")
      .def(py::init(&make_engine), "kind"_a, "queue_depth"_a = defaults.queue_depth,
           "block_bytes"_a = defaults.block_bytes, "threads"_a = defaults.threads,
           "patience_s"_a = defaults.patience_s)
      .def_property_readonly("kind", &IoEngine::kind)
      .def_property_readonly("notes", py::cpp_function(&IoEngine::notes, ReleaseGil()))
      .def(
          "add_file",
          [](IoEngine& self, int fd, const std::string& path) {
            return self.add_file({{fd, path}}, StripeMap());
          },
          "fd"_a, "path"_a, ReleaseGil())
      .def("add_striped_file", &add_striped_file, "members"_a, "stripes"_a, "checksums"_a = false,
           ReleaseGil())
      .def("name_range", &IoEngine::name_range, "file"_a, "offset"_a, "nbytes"_a, "name"_a,
           ReleaseGil())
      .def("checksums", &checksums_of, "file"_a, "offset"_a, "nbytes"_a)
      .def("set_checksums", &set_checksums, "file"_a, "offset"_a, "checksums"_a)
      .def("reserve_checksums", &IoEngine::reserve_checksums, "file"_a, "nbytes"_a, ReleaseGil())
      .def("sync", &IoEngine::sync, "file"_a, ReleaseGil())
      .def("remove_file", &IoEngine::remove_file, "file"_a, ReleaseGil())
      .def("register", &IoEngine::register_memory, "arena"_a, ReleaseGil())
      .def("unregister", &IoEngine::unregister_memory, "arena"_a, ReleaseGil())
      .def("read", &submit<IoKind::read>, "file"_a, "address"_a, "nbytes"_a, "offset"_a,
           "soon"_a = false, ReleaseGil())
      .def("write", &submit<IoKind::write>, "file"_a, "address"_a, "nbytes"_a, "offset"_a,
           "soon"_a = false, ReleaseGil())
      .def_property_readonly("stats", &stats_of)
      .def(
          "inject",
          [](IoEngine& self, const std::string& op, std::uint64_t nth, int error,
             std::int64_t short_bytes, std::uint64_t count, bool throws) {
            self.inject(
                {value_of<IoKind>(kKinds, op, "op"), nth, error, short_bytes, count, throws});
          },
          "op"_a, "nth"_a, "error"_a = 0, "short_bytes"_a = -1, "count"_a = 1, "throws"_a = false,
          ReleaseGil())
      .def("close", &IoEngine::close, ReleaseGil());
}

}  // namespace

void bind_memory_io(py::module_& module) {
  bind_memory(module);
  bind_io(module);
}

}  // namespace hetero
