// The queue of gradients on their way from a GPU to RAM.
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "bindings/python.h"
#include "link/offload_queue.h"

namespace hetero {

namespace {

using Address = std::uintptr_t;

void translate(std::exception_ptr caught) {
  try {
    std::rethrow_exception(std::move(caught));
  } catch (const CopyError& failure) {
    const py::tuple arguments = py::make_tuple(failure.error, failure.what());
    PyErr_SetObject(PyExc_OSError, arguments.ptr());
  }
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

std::shared_ptr<OffloadQueue> make_queue(const Functions& functions, Address context,
                                         Address stream, Address buffers, std::size_t count,
                                         std::size_t buffer_bytes) {
  return released_without_gil(make_own<OffloadQueue>(driver_of(functions), context, stream,
                                                     reinterpret_cast<std::byte*>(buffers), count,
                                                     buffer_bytes));
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

  Handle<OffloadQueue, OffloadOp>::bind(module, "OffloadOp");
  py::class_<OffloadQueue, std::shared_ptr<OffloadQueue>>(module, "OffloadQueue")
      .def(py::init(&make_queue), "functions"_a, "context"_a, "stream"_a, "buffers"_a, "count"_a,
           "buffer_bytes"_a)
      .def("submit", &submit, "source"_a, "source_dtype"_a, "to"_a, "dtype"_a, "numel"_a, "add"_a,
           "event"_a = 0, ReleaseGil())
      .def("close", &OffloadQueue::close, ReleaseGil());
}

}  // namespace hetero
