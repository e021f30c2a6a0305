// The emulated link, and the queue of gradients on their way from a device to RAM.
#include <pybind11/stl.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "bindings/python.h"
#include "link/link.h"
#include "link/offload_queue.h"

namespace hetero {

namespace {

using Address = std::uintptr_t;

LinkDirection direction_of(const std::string& name) {
  return value_of<LinkDirection>({"h2d", "d2h"}, name, "direction");
}

void translate(std::exception_ptr caught) {
  try {
    std::rethrow_exception(std::move(caught));
  } catch (const CopyError& failure) {
    const py::tuple arguments = py::make_tuple(failure.error, failure.what());
    PyErr_SetObject(PyExc_OSError, arguments.ptr());
  }
}

Handle<Link, LinkOp> copy(const std::shared_ptr<Link>& link, const std::string& direction,
                          Address to, Address source, std::size_t nbytes) {
  return {link, link->copy(direction_of(direction), reinterpret_cast<void*>(to),
                           reinterpret_cast<const void*>(source), nbytes)};
}

py::dict stats_of(Link& link) {
  py::dict found;
  for (const char* const name : {"h2d", "d2h"}) {
    const LinkStats stats = without_gil([&] { return link.stats(direction_of(name)); });
    const py::str way = std::string(name) + "_";
    found[way + py::str("bytes")] = stats.bytes;
    found[way + py::str("copies")] = stats.copies;
    found[way + py::str("errors")] = stats.errors;
    found[way + py::str("busy_s")] = stats.busy_s;
  }
  return found;
}

using Functions = std::map<std::string, Address>;

template <typename Function>
void find(const Functions& functions, const char* name, Function*& found) {
  const auto at = functions.find(name);
  if (at == functions.end() || at->second == 0) {
    throw std::invalid_argument(std::string("the driver's ") + name + " is missing");
  }
  found = reinterpret_cast<Function*>(at->second);
}

CudaDriver driver_of(const Functions& functions) {
  CudaDriver driver{};
  find(functions, "cuCtxSetCurrent", driver.cuCtxSetCurrent);
  find(functions, "cuEventCreate", driver.cuEventCreate);
  find(functions, "cuEventDestroy_v2", driver.cuEventDestroy_v2);
  find(functions, "cuEventRecord", driver.cuEventRecord);
  find(functions, "cuEventSynchronize", driver.cuEventSynchronize);
  find(functions, "cuStreamWaitEvent", driver.cuStreamWaitEvent);
  find(functions, "cuMemcpyDtoHAsync_v2", driver.cuMemcpyDtoHAsync_v2);
  find(functions, "cuGetErrorString", driver.cuGetErrorString);
  return driver;
}

std::shared_ptr<OffloadQueue> make_queue(std::unique_ptr<Copier> copier, Address buffers,
                                         std::size_t count, std::size_t buffer_bytes) {
  return released_without_gil(make_own<OffloadQueue>(
      std::move(copier), reinterpret_cast<std::byte*>(buffers), count, buffer_bytes));
}

Handle<OffloadQueue, OffloadOp> submit(const std::shared_ptr<OffloadQueue>& queue, Address source,
                                       const std::string& source_dtype, Address to,
                                       const std::string& dtype, std::size_t numel, bool add,
                                       Address event) {
  if (numel != 0 && (source == 0 || to == 0)) {
    throw std::invalid_argument("a gradient offload needs two addresses");
  }
  return {queue, queue->submit({.from = reinterpret_cast<const std::byte*>(source),
                                .from_dtype = parse_dtype(source_dtype, "source_dtype"),
                                .to = reinterpret_cast<std::byte*>(to),
                                .dtype = parse_dtype(dtype),
                                .numel = numel,
                                .add = add,
                                .event = event})};
}

}  // namespace

void bind_link(py::module_& module) {
  py::register_local_exception_translator(&translate);

  Handle<Link, LinkOp>::bind(module, "LinkOp");
  py::class_<Link, std::shared_ptr<Link>>(module, "Link")
      .def(py::init([](double h2d_bytes_per_s, double d2h_bytes_per_s) {
             return released_without_gil(make_own<Link>(h2d_bytes_per_s, d2h_bytes_per_s));
           }),
           "h2d_bytes_per_s"_a, "d2h_bytes_per_s"_a)
      .def("copy", &copy, "direction"_a, "to"_a, "source"_a, "nbytes"_a, ReleaseGil())
      .def_property_readonly("stats", &stats_of)
      .def(
          "inject",
          [](Link& self, const std::string& direction, std::uint64_t nth, int error,
             std::uint64_t count) { self.inject(direction_of(direction), nth, error, count); },
          "direction"_a, "nth"_a, "error"_a = EIO, "count"_a = 1, ReleaseGil())
      .def("close", &Link::close, ReleaseGil());

  Handle<OffloadQueue, OffloadOp>::bind(module, "OffloadOp");
  py::class_<OffloadQueue, std::shared_ptr<OffloadQueue>>(module, "OffloadQueue")
      .def_static(
          "over_link",
          [](std::shared_ptr<Link> link, Address buffers, std::size_t count,
             std::size_t buffer_bytes) {
            return make_queue(make_link_copier(std::move(link)), buffers, count, buffer_bytes);
          },
          "link"_a, "buffers"_a, "count"_a, "buffer_bytes"_a)
      .def_static(
          "on_cuda",
          [](const Functions& functions, Address context, Address stream, Address buffers,
             std::size_t count, std::size_t buffer_bytes) {
            return make_queue(make_cuda_copier(driver_of(functions), context, stream), buffers,
                              count, buffer_bytes);
          },
          "functions"_a, "context"_a, "stream"_a, "buffers"_a, "count"_a, "buffer_bytes"_a)
      .def("submit", &submit, "source"_a, "source_dtype"_a, "to"_a, "dtype"_a, "numel"_a, "add"_a,
           "event"_a = 0, ReleaseGil())
      .def("close", &OffloadQueue::close, ReleaseGil());
}

}  // namespace hetero
