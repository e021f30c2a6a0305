// The step pipeline.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/python.h"
#include "io/io_engine.h"
#include "memory/arena.h"
#include "pipeline/step_pipeline.h"
#include "update/update.h"

namespace hetero {

namespace {

using ExpectationTuple = std::tuple<std::int64_t, Location, Location, std::uint32_t>;
using SegmentTuple = std::tuple<std::size_t, std::size_t, std::size_t, std::uint64_t>;

StepTask make_task(std::int64_t key, const Location& param, const Location& grad,
                   const Location& optim_state, const std::vector<SegmentTuple>& segments,
                   std::uint32_t priority, std::int64_t optim_state_to, std::int64_t param_to,
                   std::int64_t saved_param) {
  StepTask task = {key, priority,       param,    grad,       optim_state,
                   {},  optim_state_to, param_to, saved_param};
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
  for (const auto& [key, param, optim_state, priority] : expected) {
    made.push_back({key, priority, param, optim_state});
  }
  pipeline.expect(std::move(made), streaming);
}

std::shared_ptr<StepPipeline> make_pipeline(std::shared_ptr<IoEngine> engine, int file,
                                            const Arena* arena, std::size_t buffers,
                                            const UpdateKind& kind, std::size_t tile_numel,
                                            bool param_in_file, bool grad_in_file) {
  return released_without_gil(
      make_own<StepPipeline>(std::move(engine), file, arena, buffers,
                             TileLayout(kind, tile_numel, param_in_file, grad_in_file)));
}

// Calls `method` with each of `count` keys from `key` on: those of one chunk's tiles.
auto each_of(void (StepPipeline::*method)(std::int64_t)) {
  return [method](StepPipeline& pipeline, std::int64_t key, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) (pipeline.*method)(key + i);
  };
}

// Whether `method` says so of all of `count` keys from `key` on.
auto all_of(bool (StepPipeline::*method)(std::int64_t) const) {
  return [method](const StepPipeline& pipeline, std::int64_t key, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) {
      if (!(pipeline.*method)(key + i)) return false;
    }
    return true;
  };
}

py::dict stats_dict(const StepPipeline& pipeline) {
  const StepStats stats = without_gil([&] { return pipeline.stats(); });
  return py::dict("tasks"_a = stats.tasks, "hits"_a = stats.hits, "ahead"_a = stats.ahead,
                  "read_bytes"_a = stats.read_bytes, "written_bytes"_a = stats.written_bytes,
                  "busy_s"_a = stats.busy_s, "compute_s"_a = stats.compute_s);
}

}  // namespace

void bind_pipeline(py::module_& module) {
  py::class_<Location>(module, "Location")
      .def(py::init([](std::uintptr_t address, std::int64_t file_offset) {
             return Location{reinterpret_cast<char*>(address), file_offset};
           }),
           "address"_a = 0, "file_offset"_a = -1);
  py::class_<StepTask>(module, "StepTask")
      .def(py::init(&make_task), "key"_a, "param"_a, "grad"_a, "optim_state"_a, "segments"_a,
           "priority"_a = 0, "optim_state_to"_a = StepTask::kNone, "param_to"_a = StepTask::kNone,
           "saved_param"_a = StepTask::kNone);
  py::class_<StepPipeline, std::shared_ptr<StepPipeline>>(module, "StepPipeline")
      .def(py::init(&make_pipeline), "engine"_a.none(true), "file"_a, "arena"_a.none(true),
           "buffers"_a, "kind"_a.none(false), "tile_numel"_a, "param_in_file"_a, "grad_in_file"_a)
      .def_static(
          "buffer_bytes",
          [](const UpdateKind& kind, std::size_t tile_numel, bool param_in_file,
             bool grad_in_file) {
            return TileLayout(kind, tile_numel, param_in_file, grad_in_file).buffer_bytes();
          },
          "kind"_a.none(false), "tile_numel"_a, "param_in_file"_a, "grad_in_file"_a)
      .def(
          "submit",
          [](StepPipeline& self, std::vector<StepTask> tasks, const std::vector<Hyper>& hypers,
             const std::optional<UpdateKind>& kind) {
            self.submit(std::move(tasks), hypers, kind);
          },
          "tasks"_a, "hypers"_a, "kind"_a = py::none(), ReleaseGil())
      .def("expect", &expect, "expected"_a, "streaming"_a = 0, ReleaseGil())
      .def("take_back", &StepPipeline::take_back, "first"_a, "count"_a, ReleaseGil())
      .def(
          "keeps",
          [](const StepPipeline& pipeline, std::int64_t key, std::int64_t count) {
            for (std::int64_t i = 0; i < count; ++i) {
              if (pipeline.keeps(key + i)) return true;
            }
            return false;
          },
          "key"_a, "count"_a = 1, ReleaseGil())
      .def("wait_updated", each_of(&StepPipeline::wait_updated), "key"_a = -1, "count"_a = 1,
           ReleaseGil())
      .def("is_updated", all_of(&StepPipeline::is_updated), "key"_a = -1, "count"_a = 1,
           ReleaseGil())
      .def("is_written", all_of(&StepPipeline::is_written), "key"_a = -1, "count"_a = 1,
           ReleaseGil())
      .def("wait_written", each_of(&StepPipeline::wait_written), "key"_a = -1, "count"_a = 1,
           ReleaseGil())
      .def("flush", each_of(&StepPipeline::flush), "key"_a = -1, "count"_a = 1, ReleaseGil())
      .def("forget", each_of(&StepPipeline::forget), "key"_a = -1, "count"_a = 1, ReleaseGil())
      .def_property_readonly("stats", &stats_dict)
      .def("give_up", &StepPipeline::give_up, "why"_a, ReleaseGil())
      .def("inject", &StepPipeline::inject, "nth"_a, ReleaseGil())
      .def("hold", &StepPipeline::hold, "nth"_a, ReleaseGil())
      .def("release", &StepPipeline::release, ReleaseGil())
      .def("close", &StepPipeline::close, ReleaseGil());
}

}  // namespace hetero
