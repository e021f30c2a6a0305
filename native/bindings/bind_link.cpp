// The emulated link.
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "bindings/python.h"
#include "link/link.h"

namespace hetero {

namespace {

constexpr const char* kDirections[] = {"h2d", "d2h"};

LinkDirection direction_of(const std::string& name) {
  if (name == "h2d") return LinkDirection::h2d;
  if (name == "d2h") return LinkDirection::d2h;
  throw std::invalid_argument("direction must be \"h2d\" or \"d2h\", not \"" + name + "\"");
}

PyObject* link_error_type = nullptr;

void translate(std::exception_ptr caught) {
  try {
    std::rethrow_exception(std::move(caught));
  } catch (const LinkError& failure) {
    const py::object type = py::reinterpret_borrow<py::object>(link_error_type);
    const py::object error = type(failure.error, std::generic_category().message(failure.error));
    error.attr("message") = failure.what();
    error.attr("direction") = kDirections[static_cast<int>(failure.direction)];
    error.attr("wanted_bytes") = failure.wanted_bytes;
    error.attr("got_bytes") = failure.got_bytes;
    PyErr_SetObject(link_error_type, error.ptr());
  }
}

std::shared_ptr<Link> make_link(double h2d_bytes_per_s, double d2h_bytes_per_s) {
  return released_without_gil(std::make_shared<Link>(h2d_bytes_per_s, d2h_bytes_per_s));
}

using Copy = Handle<Link, LinkOp>;

Copy copy(const std::shared_ptr<Link>& link, const std::string& direction, std::uintptr_t to,
          std::uintptr_t source, std::size_t nbytes) {
  return {link, link->copy(direction_of(direction), reinterpret_cast<void*>(to),
                           reinterpret_cast<const void*>(source), nbytes)};
}

py::dict stats_of(const Link& link) {
  const LinkStats stats = without_gil([&] { return link.stats(); });
  return py::dict("h2d_bytes"_a = stats.h2d.bytes, "d2h_bytes"_a = stats.d2h.bytes,
                  "h2d_busy_s"_a = stats.h2d.busy_s, "d2h_busy_s"_a = stats.d2h.busy_s,
                  "h2d_copies"_a = stats.h2d.copies, "d2h_copies"_a = stats.d2h.copies,
                  "h2d_errors"_a = stats.h2d.errors, "d2h_errors"_a = stats.d2h.errors);
}

}  // namespace

void bind_link(py::module_& module) {
  link_error_type =
      make_os_error(module, "NativeLinkError",
                    "A failed copy over the link: which way, how far it came, and why.");
  py::register_local_exception_translator(&translate);

  Copy::bind(module, "LinkOp");
  py::class_<Link, std::shared_ptr<Link>>(module, "Link")
      .def(py::init(&make_link), "h2d_bytes_per_s"_a, "d2h_bytes_per_s"_a)
      .def("copy", &copy, "direction"_a, "to"_a, "source"_a, "nbytes"_a, ReleaseGil())
      .def_property_readonly("stats", &stats_of)
      .def(
          "inject",
          [](Link& self, const std::string& direction, std::uint64_t nth, int error,
             std::uint64_t count) { self.inject(direction_of(direction), nth, error, count); },
          "direction"_a, "nth"_a, "error"_a = EIO, "count"_a = 1, ReleaseGil())
      .def("close", &Link::close, ReleaseGil());
}

}  // namespace hetero
