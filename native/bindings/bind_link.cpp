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

const char* name_of(LinkDirection direction) {
  return direction == LinkDirection::h2d ? "h2d" : "d2h";
}

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
    error.attr("direction") = name_of(failure.direction);
    error.attr("wanted_bytes") = failure.wanted_bytes;
    error.attr("got_bytes") = failure.got_bytes;
    PyErr_SetObject(link_error_type, error.ptr());
  }
}

std::shared_ptr<Link> make_link(double h2d_bytes_per_s, double d2h_bytes_per_s) {
  return released_without_gil(std::make_shared<Link>(h2d_bytes_per_s, d2h_bytes_per_s));
}

// The handle holds the link, so that a copy still held can finish. One that nobody holds any more
// is cancelled, and over when the handle is gone.
struct Copy {
  Copy(std::shared_ptr<Link> link, std::shared_ptr<LinkOp> op)
      : link(std::move(link)), op(std::move(op)) {}
  Copy(Copy&&) = default;
  ~Copy() {
    if (op && !op->done()) without_gil([&] { link->abandon(*op); });
  }

  std::shared_ptr<Link> link;
  std::shared_ptr<LinkOp> op;
};

Copy copy(const std::shared_ptr<Link>& link, const std::string& direction, std::uintptr_t to,
          std::uintptr_t source, std::size_t nbytes) {
  return {link, link->copy(direction_of(direction), reinterpret_cast<void*>(to),
                           reinterpret_cast<const void*>(source), nbytes)};
}

py::dict stats_of(const Link& link) {
  const LinkStats stats = [&] {
    const py::gil_scoped_release released;
    return link.stats();
  }();
  py::dict result;
  result["h2d_bytes"] = stats.h2d.bytes;
  result["d2h_bytes"] = stats.d2h.bytes;
  result["h2d_busy_s"] = stats.h2d.busy_s;
  result["d2h_busy_s"] = stats.d2h.busy_s;
  result["h2d_copies"] = stats.h2d.copies;
  result["d2h_copies"] = stats.d2h.copies;
  result["h2d_errors"] = stats.h2d.errors;
  result["d2h_errors"] = stats.d2h.errors;
  return result;
}

}  // namespace

void bind_link(py::module_& module) {
  link_error_type =
      make_os_error(module, "NativeLinkError",
                    "A failed copy over the link: which way, how far it came, and why.");
  py::register_local_exception_translator(&translate);

  py::class_<Copy>(module, "LinkOp")
      .def("done", [](const Copy& self) { return self.op->done(); })
      .def(
          "wait", [](const Copy& self) { self.op->wait(); }, ReleaseGil())
      .def("cancel", [](const Copy& self) { self.link->cancel(*self.op); }, ReleaseGil());

  py::class_<Link, std::shared_ptr<Link>>(module, "Link")
      .def(py::init(&make_link), py::arg("h2d_bytes_per_s"), py::arg("d2h_bytes_per_s"))
      .def("copy", &copy, py::arg("direction"), py::arg("to"), py::arg("source"), py::arg("nbytes"),
           ReleaseGil())
      .def_property_readonly("stats", &stats_of)
      .def(
          "inject",
          [](Link& self, const std::string& direction, std::uint64_t nth, int error,
             std::uint64_t count) { self.inject(direction_of(direction), nth, error, count); },
          py::arg("direction"), py::arg("nth"), py::arg("error") = EIO, py::arg("count") = 1,
          ReleaseGil())
      .def("close", &Link::close, ReleaseGil());
}

}  // namespace hetero
