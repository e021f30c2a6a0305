// The timeline's recorder.
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "base/timeline.h"
#include "bindings/python.h"

namespace hetero {

namespace {

std::int64_t nanoseconds(timeline::Clock::time_point at) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(at.time_since_epoch()).count();
}

py::tuple stop() {
  const timeline::Recording found = [] {
    const py::gil_scoped_release released;
    return timeline::stop();
  }();
  py::list intervals;
  for (const auto& [lane, begin, end, bytes] : found.intervals) {
    intervals.append(
        py::make_tuple(timeline::name_of(lane), nanoseconds(begin), nanoseconds(end), bytes));
  }
  return py::make_tuple(nanoseconds(found.begin), nanoseconds(found.end), intervals, found.dropped);
}

}  // namespace

void bind_timeline(py::module_& module) {
  module.def("start_timeline", &timeline::start, py::arg("capacity"), ReleaseGil());
  module.def("stop_timeline", &stop);
}

}  // namespace hetero
