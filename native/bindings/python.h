// What several files of bindings need: the GIL let go, handles, names of an enum's values.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "base/completion.h"
#include "update/update_kind.h"

namespace hetero {

namespace py = pybind11;
using py::literals::operator""_a;

// For functions that may block.
using ReleaseGil = py::call_guard<py::gil_scoped_release>;

// Whether this thread has the GIL. (PyGILState_Check() says so of every thread when Python has
// ended, and from the making of a second interpreter on.)
inline bool has_gil() {
#if PY_VERSION_HEX >= 0x030D0000
  const PyThreadState* const current = PyThreadState_GetUnchecked();
#else
  const PyThreadState* const current = _PyThreadState_UncheckedGet();
#endif
  return current != nullptr && current == PyGILState_GetThisThreadState();
}

// Calls `body` without the GIL, which this thread may have or not.
template <typename Body>
auto without_gil(Body body) {
  std::optional<py::gil_scoped_release> released;
  if (has_gil()) released.emplace();
  return body();
}

// The handle of a background operation. It holds the owner, so that an operation still held can
// finish. One that nobody holds any more is cancelled, and over when the handle is gone.
// (py::keep_alive would say the first, but with pybind11 3.1.0 a call with wrong argument types
// then crashes.)
template <typename Owner, typename Op>
struct Handle {
  Handle(std::shared_ptr<Owner> owner, std::shared_ptr<Op> op)
      : owner(std::move(owner)), op(std::move(op)) {}
  Handle(Handle&&) = default;
  ~Handle() {
    if (op && !op->done()) without_gil([&] { abandon(*owner, *op); });
  }

  // The class; operations of some kinds can do more.
  static py::class_<Handle> bind(py::module_& module, const char* name) {
    return py::class_<Handle>(module, name)
        .def("done", [](const Handle& self) { return self.op->done(); })
        .def(
            "wait", [](const Handle& self) { self.op->wait(); }, ReleaseGil())
        .def("cancel", [](const Handle& self) { self.owner->cancel(*self.op); }, ReleaseGil());
  }

  std::shared_ptr<Owner> owner;
  std::shared_ptr<Op> op;
};

// The last owner lets go of the object without the GIL, because the destructor may take its time.
template <typename T>
std::shared_ptr<T> released_without_gil(std::shared_ptr<T> object) {
  T* const raw = object.get();
  return {raw, [object = std::move(object)](T*) mutable { without_gil([&] { object.reset(); }); }};
}

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
  return value_of<Dtype>({"fp32", "bf16", "fp16"}, name, parameter);
}

}  // namespace hetero
