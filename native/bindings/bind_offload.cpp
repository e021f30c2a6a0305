// The queue of gradients on their way from a device to RAM.
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "bindings/dtype_names.h"
#include "bindings/python.h"
#include "link/cuda_copier.h"
#include "link/link.h"
#include "link/link_copier.h"
#include "link/offload_queue.h"

namespace hetero {

namespace {

using Address = std::uintptr_t;
using Functions = std::map<std::string, Address>;

void translate(std::exception_ptr caught) {
  try {
    std::rethrow_exception(std::move(caught));
  } catch (const CopyError& failure) {
    const py::tuple arguments = py::make_tuple(failure.error, failure.what());
    PyErr_SetObject(PyExc_OSError, arguments.ptr());
  }
}

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
                                         std::size_t buffer_bytes) {
  return released_without_gil(std::make_shared<OffloadQueue>(
      std::move(copier), reinterpret_cast<std::byte*>(buffers), buffer_bytes));
}

std::shared_ptr<OffloadQueue> over_link(const std::shared_ptr<Link>& link, Address buffers,
                                        std::size_t buffer_bytes) {
  return make_queue(std::make_unique<LinkCopier>(link), buffers, buffer_bytes);
}

std::shared_ptr<OffloadQueue> on_cuda(const Functions& functions, Address context, Address stream,
                                      Address buffers, std::size_t buffer_bytes) {
  const CudaDriver driver = driver_of(functions);
  return make_queue(std::make_unique<CudaCopier>(driver, context, stream), buffers, buffer_bytes);
}

using Submitted = Handle<OffloadQueue, OffloadOp>;

Submitted submit(const std::shared_ptr<OffloadQueue>& queue, Address source,
                 const std::string& source_dtype, Address to, const std::string& dtype,
                 std::size_t numel, bool add, Address event) {
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

void bind_offload(py::module_& module) {
  py::register_local_exception_translator(&translate);
  Submitted::bind(module, "OffloadOp");
  py::class_<OffloadQueue, std::shared_ptr<OffloadQueue>>(module, "OffloadQueue")
      .def_static("over_link", &over_link, "link"_a, "buffers"_a, "buffer_bytes"_a)
      .def_static("on_cuda", &on_cuda, "functions"_a, "context"_a, "stream"_a, "buffers"_a,
                  "buffer_bytes"_a)
      .def("submit", &submit, "source"_a, "source_dtype"_a, "to"_a, "dtype"_a, "numel"_a, "add"_a,
           "event"_a = 0, ReleaseGil())
      .def("close", &OffloadQueue::close, ReleaseGil());
}

}  // namespace hetero
