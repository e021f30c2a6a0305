// The step pipeline.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "io/io_engine.h"
#include "memory/arena.h"
#include "pipeline/step_pipeline.h"
#include "update/state_layout.h"
#include "update/update.h"

namespace py = pybind11;

namespace hetero {

namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

// A pipeline that does not hold the GIL while its destructor waits for transfers.
class BoundPipeline : public StepPipeline {
 public:
  using StepPipeline::StepPipeline;
  ~BoundPipeline() {
    const py::gil_scoped_release release;
    close();
  }
};

using ExpectationTuple = std::tuple<std::int64_t, Location, Location, std::uint32_t>;
using SegmentTuple = std::tuple<std::size_t, std::size_t, std::size_t, std::uint64_t>;

StepTask make_task(std::int64_t key, const Location& param, const Location& grad,
                   const Location& record, const std::vector<SegmentTuple>& segments,
                   std::uint32_t due) {
  StepTask task = {key, due, param, grad, record, {}};
  task.segments.reserve(segments.size());
  for (const auto& [first, numel, hyper, index] : segments) {
    task.segments.push_back({first, numel, hyper, index});
  }
  return task;
}

void expect(BoundPipeline& pipeline, const std::vector<ExpectationTuple>& expected,
            std::size_t streaming) {
  std::vector<Expectation> made;
  made.reserve(expected.size());
  for (const auto& [key, param, record, due] : expected) {
    made.push_back({key, due, param, record});
  }
  pipeline.expect(std::move(made), streaming);
}

std::unique_ptr<BoundPipeline> make_pipeline(std::shared_ptr<IoEngine> engine, int file,
                                             const Arena* arena, std::size_t buffers,
                                             const UpdateKind& kind, std::size_t piece_numel,
                                             bool param_in_file, bool grad_in_file) {
  char* const memory = arena == nullptr ? nullptr : reinterpret_cast<char*>(arena->address());
  return std::make_unique<BoundPipeline>(
      std::move(engine), file, memory, arena == nullptr ? 0 : arena->nbytes(), buffers,
      PieceLayout(kind, piece_numel, param_in_file, grad_in_file),
      arena == nullptr ? nullptr : arena->hold_pages());
}

py::dict stats_dict(const BoundPipeline& pipeline) {
  const StepStats stats = pipeline.stats();
  py::dict dict;
  dict["tasks"] = stats.tasks;
  dict["hits"] = stats.hits;
  dict["ahead"] = stats.ahead;
  dict["read_bytes"] = stats.read_bytes;
  dict["written_bytes"] = stats.written_bytes;
  dict["adam_s"] = stats.adam_s;
  dict["read_wait_s"] = stats.read_wait_s;
  dict["write_wait_s"] = stats.write_wait_s;
  return dict;
}

}  // namespace

void bind_pipeline(py::module_& module) {
  py::class_<Location>(module, "Location")
      .def(py::init([](std::uintptr_t address, std::int64_t file_offset) {
             return Location{reinterpret_cast<char*>(address), file_offset};
           }),
           py::arg("address") = 0, py::arg("file_offset") = -1);
  py::class_<StepTask>(module, "StepTask")
      .def(py::init(&make_task), py::arg("key"), py::arg("param"), py::arg("grad"),
           py::arg("record"), py::arg("segments"), py::arg("due") = 0);
  py::class_<BoundPipeline>(module, "StepPipeline")
      .def(py::init(&make_pipeline), py::arg("engine").none(true), py::arg("file"),
           py::arg("arena").none(true), py::arg("buffers"), py::arg("kind").none(false),
           py::arg("piece_numel"), py::arg("param_in_file"), py::arg("grad_in_file"),
           py::keep_alive<1, 2>())
      .def_static(
          "buffer_bytes",
          [](const UpdateKind& kind, std::size_t piece_numel, bool param_in_file,
             bool grad_in_file) {
            return PieceLayout(kind, piece_numel, param_in_file, grad_in_file).buffer_bytes();
          },
          py::arg("kind").none(false), py::arg("piece_numel"), py::arg("param_in_file"),
          py::arg("grad_in_file"))
      .def(
          "submit",
          [](BoundPipeline& self, std::vector<StepTask> tasks, const std::vector<Hyper>& hypers) {
            self.submit(std::move(tasks), hypers);
          },
          py::arg("tasks"), py::arg("hypers"), NoGil())
      .def("expect", &expect, py::arg("expected"), py::arg("streaming") = 0, NoGil())
      .def("wait_updated", &BoundPipeline::wait_updated, py::arg("key") = -1, NoGil())
      .def("is_updated", &BoundPipeline::is_updated, py::arg("key") = -1, NoGil())
      .def("is_written", &BoundPipeline::is_written, py::arg("key") = -1, NoGil())
      .def("wait_written", &BoundPipeline::wait_written, py::arg("key") = -1, NoGil())
      .def("flush", &BoundPipeline::flush, py::arg("key") = -1, NoGil())
      .def("forget", &BoundPipeline::forget, py::arg("key") = -1, NoGil())
      .def_property_readonly("stats", &stats_dict)
      .def("inject", &BoundPipeline::inject, py::arg("nth"), NoGil())
      .def("close", &BoundPipeline::close, NoGil());
}

}  // namespace hetero
