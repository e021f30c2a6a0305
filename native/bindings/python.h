// What several files of bindings need of Python: the GIL let go, and errors that are OSErrors.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <utility>

namespace hetero {

namespace py = pybind11;

// For functions that may block.
using ReleaseGil = py::call_guard<py::gil_scoped_release>;

// Calls `body` without the GIL, which this thread may have or not.
template <typename Body>
void without_gil(Body body) {
  if (PyGILState_Check() != 0) {
    const py::gil_scoped_release released;
    body();
  } else {
    body();
  }
}

// The last owner lets go of the object without the GIL, because the destructor may take its time.
template <typename T>
std::shared_ptr<T> released_without_gil(std::shared_ptr<T> object) {
  T* const raw = object.get();
  return {raw, [object = std::move(object)](T*) mutable { without_gil([&] { object.reset(); }); }};
}

// offload._native.`name`, a subclass of OSError whose text is its attribute `message`. Borrowed and
// never released: exceptions may be translated until the interpreter is gone.
inline PyObject* make_os_error(py::module_& module, const char* name, const char* doc) {
  const std::string full_name = std::string("offload._native.") + name;
  PyObject* const made = PyErr_NewExceptionWithDoc(full_name.c_str(), doc, PyExc_OSError, nullptr);
  if (made == nullptr) throw py::error_already_set();
  const auto type = py::reinterpret_borrow<py::object>(made);
  // OSError's own text has errno and file only.
  type.attr("__str__") =
      py::cpp_function([](const py::object& self) { return self.attr("message"); },
                       py::is_method(type), py::name("__str__"));
  module.attr(name) = type;
  return made;
}

}  // namespace hetero
