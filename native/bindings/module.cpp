// The extension module offload._native: what it was built from, the timeline, and everything the
// other bindings files add.
#include <chrono>
#include <cstdint>

#include "base/timeline.h"
#include "bindings/python.h"

namespace hetero {

void bind_memory_io(py::module_& module);
void bind_update(py::module_& module);
void bind_pipeline(py::module_& module);
void bind_link(py::module_& module);
void bind_cuda_sources(py::module_& module);

namespace {

py::dict build_info() {
  py::dict info;
#ifdef HETERO_LIBURING
  info["liburing"] = HETERO_LIBURING;
#else
  info["liburing"] = py::none();
#endif
#ifdef __clang__
  info["compiler"] = "clang " __clang_version__;
#else
  info["compiler"] = "gcc " __VERSION__;
#endif
  info["isas"] = py::str(HETERO_ISAS).attr("split")(",");
  return info;
}

std::int64_t nanoseconds(timeline::Clock::time_point at) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(at.time_since_epoch()).count();
}

py::tuple stop_timeline() {
  const timeline::Recording found = without_gil(&timeline::stop);
  py::list intervals;
  for (const auto& [lane, begin, end, bytes] : found.intervals) {
    intervals.append(py::make_tuple(lane, nanoseconds(begin), nanoseconds(end), bytes));
  }
  return py::make_tuple(nanoseconds(found.begin), nanoseconds(found.end), intervals, found.dropped);
}

}  // namespace

PYBIND11_MODULE(_native, module) {
  module.doc() =
      "The native core of hetero: host memory, file transfers, updates, the step pipeline, "
      "gradients from a GPU, checksums.";
  module.def("build_info", &build_info);
  module.def("start_timeline", &timeline::start, "capacity"_a, ReleaseGil());
  module.def("stop_timeline", &stop_timeline);
  bind_memory_io(module);
  bind_update(module);
  bind_pipeline(module);
  bind_link(module);
  bind_cuda_sources(module);
}

}  // namespace hetero
