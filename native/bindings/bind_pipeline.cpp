// The step pipeline.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/python.h"
#include "io/io_engine.h"
#include "memory/arena.h"
#include "pipeline/step_pipeline.h"
#include "update/tile_layout.h"
#include "update/update.h"

namespace hetero {

namespace {

// Does not hold the GIL while the destructor waits for transfers. A forked child's copy is left
// alone (step_pipeline.h).
struct PipelineDeleter {
  void operator()(StepPipeline* pipeline) const {
    if (!pipeline->foreign()) without_gil([&] { delete pipeline; });
  }
};
using PipelineHolder = std::unique_ptr<StepPipeline, PipelineDeleter>;

using ExpectationTuple = std::tuple<std::int64_t, Location, Location, std::uint32_t>;
using SegmentTuple = std::tuple<std::size_t, std::size_t, std::size_t, std::uint64_t>;

StepTask make_task(std::int64_t key, const Location& param, const Location& grad,
                   const Location& optim_state, const std::vector<SegmentTuple>& segments,
                   std::uint32_t next_use) {
  StepTask task = {key, next_use, param, grad, optim_state, {}};
  task.segments.reserve(segments.size());
  for (const auto& [first, numel, hyper, index] : segments) {
    task.segments.push_back({first, numel, hyper, index});
  }
  return task;
}

void expect(StepPipeline& pipeline, const std::vector<ExpectationTuple>& expected,
            std::size_t streaming) {
  std::vector<Expectation> made;
  made.reserve(expected.size());
  for (const auto& [key, param, optim_state, next_use] : expected) {
    made.push_back({key, next_use, param, optim_state});
  }
  pipeline.expect(std::move(made), streaming);
}

PipelineHolder make_pipeline(std::shared_ptr<IoEngine> engine, int file, const Arena* arena,
                             std::size_t buffers, const UpdateKind& kind, std::size_t tile_numel,
                             bool param_in_file, bool grad_in_file) {
  char* const memory = arena == nullptr ? nullptr : reinterpret_cast<char*>(arena->address());
  return PipelineHolder(new StepPipeline(std::move(engine), file, memory,
                                         arena == nullptr ? 0 : arena->nbytes(), buffers,
                                         TileLayout(kind, tile_numel, param_in_file, grad_in_file),
                                         arena == nullptr ? nullptr : arena->hold_pages()));
}

py::dict stats_dict(const StepPipeline& pipeline) {
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
           py::arg("optim_state"), py::arg("segments"), py::arg("next_use") = 0);
  py::class_<StepPipeline, PipelineHolder>(module, "StepPipeline")
      .def(py::init(&make_pipeline), py::arg("engine").none(true), py::arg("file"),
           py::arg("arena").none(true), py::arg("buffers"), py::arg("kind").none(false),
           py::arg("tile_numel"), py::arg("param_in_file"), py::arg("grad_in_file"),
           py::keep_alive<1, 2>())
      .def_static(
          "buffer_bytes",
          [](const UpdateKind& kind, std::size_t tile_numel, bool param_in_file,
             bool grad_in_file) {
            return TileLayout(kind, tile_numel, param_in_file, grad_in_file).buffer_bytes();
          },
          py::arg("kind").none(false), py::arg("tile_numel"), py::arg("param_in_file"),
          py::arg("grad_in_file"))
      .def(
          "submit",
          [](StepPipeline& self, std::vector<StepTask> tasks, const std::vector<Hyper>& hypers) {
            self.submit(std::move(tasks), hypers);
          },
          py::arg("tasks"), py::arg("hypers"), ReleaseGil())
      .def("expect", &expect, py::arg("expected"), py::arg("streaming") = 0, ReleaseGil())
      .def("wait_updated", &StepPipeline::wait_updated, py::arg("key") = -1, ReleaseGil())
      .def("is_updated", &StepPipeline::is_updated, py::arg("key") = -1, ReleaseGil())
      .def("is_written", &StepPipeline::is_written, py::arg("key") = -1, ReleaseGil())
      .def("wait_written", &StepPipeline::wait_written, py::arg("key") = -1, ReleaseGil())
      .def("flush", &StepPipeline::flush, py::arg("key") = -1, ReleaseGil())
      .def("forget", &StepPipeline::forget, py::arg("key") = -1, ReleaseGil())
      .def_property_readonly("stats", &stats_dict)
      .def("inject", &StepPipeline::inject, py::arg("nth"), ReleaseGil())
      .def("hold", &StepPipeline::hold, py::arg("nth"), ReleaseGil())
      .def("release", &StepPipeline::release, ReleaseGil())
      .def("close", &StepPipeline::close, ReleaseGil());
}

}  // namespace hetero
