// Adam, the norms, the step pipeline, and the choice of instruction set and threads.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "adam.h"
#include "arena.h"
#include "io_engine.h"
#include "isa.h"
#include "norm.h"
#include "step_pipeline.h"
#include "worker_pool.h"

namespace py = pybind11;

namespace hetero {

namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;
using Address = std::uintptr_t;

// A pipeline that does not hold the GIL while its destructor waits for transfers.
class BoundPipeline : public StepPipeline {
 public:
  using StepPipeline::StepPipeline;
  ~BoundPipeline() {
    const py::gil_scoped_release release;
    close();
  }
};

Dtype parse_dtype(const std::string& name) {
  if (name == "fp32") return Dtype::fp32;
  if (name == "bf16") return Dtype::bf16;
  if (name == "fp16") return Dtype::fp16;
  throw std::invalid_argument("dtype is '" + name + "', must be 'fp32', 'bf16' or 'fp16'");
}

char* pointer(Address address, std::size_t numel, const char* name) {
  if (address == 0 && numel != 0) {
    throw std::invalid_argument(std::string(name) + " is 0, must be the address of " +
                                std::to_string(numel) + " elements");
  }
  return reinterpret_cast<char*>(address);
}

void bound_adam_step(const std::string& dtype_name, const std::string& grad_dtype_name,
                     Address param, Address grad, Address master, Address exp_avg,
                     Address exp_avg_sq, std::size_t numel, const AdamHyper& hyper,
                     double grad_scale) {
  const Dtype dtype = parse_dtype(dtype_name);
  const Dtype grad_dtype = parse_dtype(grad_dtype_name);
  if (dtype == Dtype::fp32 && master != 0) {
    throw std::invalid_argument("master is not 0, but an fp32 parameter is its own master");
  }
  const AdamArrays at = {
      .param = pointer(param, numel, "param"),
      .grad = pointer(grad, numel, "grad"),
      .master = pointer(master, dtype == Dtype::fp32 ? 0 : numel, "master"),
      .exp_avg = pointer(exp_avg, numel, "exp_avg"),
      .exp_avg_sq = pointer(exp_avg_sq, numel, "exp_avg_sq"),
  };
  const AdamSlice slice = {at, numel, make_adam_constants(hyper, grad_scale)};
  adam_step(dtype, grad_dtype, {&slice, 1});
}

void bound_split_master(Address source, Address param, Address remainder, Address exp_avg_sq,
                        std::size_t numel) {
  split_master(pointer(source, numel, "source"), pointer(param, numel, "param"),
               pointer(remainder, numel, "remainder"), pointer(exp_avg_sq, numel, "exp_avg_sq"),
               numel);
}

void bound_join_master(Address param, Address remainder, Address exp_avg_sq, Address target,
                       std::size_t numel) {
  join_master(pointer(param, numel, "param"), pointer(remainder, numel, "remainder"),
              pointer(exp_avg_sq, numel, "exp_avg_sq"), pointer(target, numel, "target"), numel);
}

double bound_sum_of_squares(const std::string& dtype, Address address, std::size_t numel) {
  return sum_of_squares(parse_dtype(dtype), pointer(address, numel, "address"), numel);
}

AdamHyper make_hyper(double lr, double beta1, double beta2, double eps, double weight_decay,
                     bool decoupled, bool bias_correction, std::int64_t step) {
  const AdamHyper hyper = {lr, beta1, beta2, eps, weight_decay, decoupled, bias_correction, step};
  hyper.validate();
  return hyper;
}

using SegmentTuple = std::tuple<std::size_t, std::size_t, std::size_t>;

StepTask make_task(std::int64_t key, const Location& param, const Location& grad,
                   const Location& record, const std::vector<SegmentTuple>& segments) {
  StepTask task = {key, param, grad, record, {}};
  task.segments.reserve(segments.size());
  for (const auto& [first, numel, hyper] : segments) task.segments.push_back({first, numel, hyper});
  return task;
}

PieceLayout make_layout(const std::string& dtype, const std::string& grad_dtype,
                        std::size_t piece_numel, bool param_in_file, bool grad_in_file) {
  return {parse_dtype(dtype), parse_dtype(grad_dtype), piece_numel, param_in_file, grad_in_file};
}

std::unique_ptr<BoundPipeline> make_pipeline(std::shared_ptr<IoEngine> engine, int file,
                                             const Arena* arena, std::size_t buffers,
                                             const std::string& dtype,
                                             const std::string& grad_dtype, std::size_t piece_numel,
                                             bool param_in_file, bool grad_in_file) {
  char* const memory = arena == nullptr ? nullptr : reinterpret_cast<char*>(arena->address());
  return std::make_unique<BoundPipeline>(
      std::move(engine), file, memory, arena == nullptr ? 0 : arena->nbytes(), buffers,
      make_layout(dtype, grad_dtype, piece_numel, param_in_file, grad_in_file));
}

py::dict stats_dict(const BoundPipeline& pipeline) {
  const StepStats stats = pipeline.stats();
  py::dict dict;
  dict["tasks"] = stats.tasks;
  dict["hits"] = stats.hits;
  dict["read_bytes"] = stats.read_bytes;
  dict["written_bytes"] = stats.written_bytes;
  dict["adam_s"] = stats.adam_s;
  dict["read_wait_s"] = stats.read_wait_s;
  dict["write_wait_s"] = stats.write_wait_s;
  return dict;
}

void bind_choices(py::module_& module) {
  module.def("isa_available", &isa_available);
  module.def("isa", &isa);
  module.def("set_isa", &set_isa, py::arg("name"));
  module.def(
      "set_threads",
      [](std::int64_t count) {
        if (count < 1 || count > 4096) {
          throw std::invalid_argument("set_threads: count is " + std::to_string(count) +
                                      ", must be from 1 to 4096");
        }
        WorkerPool::instance().set_threads(static_cast<unsigned>(count));
      },
      py::arg("count"), NoGil());
  module.def("threads", [] { return WorkerPool::instance().threads(); });
  module.def("shutdown_workers", [] { WorkerPool::instance().shutdown(); }, NoGil());
}

void bind_kernels(py::module_& module) {
  py::class_<AdamHyper>(module, "AdamHyper")
      .def(py::init(&make_hyper), py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"),
           py::arg("weight_decay"), py::arg("decoupled"), py::arg("bias_correction"),
           py::arg("step"));
  module.def("adam_step", &bound_adam_step, py::arg("dtype"), py::arg("grad_dtype"),
             py::arg("param"), py::arg("grad"), py::arg("master"), py::arg("exp_avg"),
             py::arg("exp_avg_sq"), py::arg("numel"), py::arg("hyper"), py::arg("grad_scale"),
             NoGil());
  module.def("split_master", &bound_split_master, py::arg("source"), py::arg("param"),
             py::arg("remainder"), py::arg("exp_avg_sq"), py::arg("numel"), NoGil());
  module.def("join_master", &bound_join_master, py::arg("param"), py::arg("remainder"),
             py::arg("exp_avg_sq"), py::arg("target"), py::arg("numel"), NoGil());
  module.def("sum_of_squares", &bound_sum_of_squares, py::arg("dtype"), py::arg("address"),
             py::arg("numel"), NoGil());
}

void bind_pipeline(py::module_& module) {
  py::class_<Location>(module, "Location")
      .def(py::init([](Address address, std::int64_t file_offset) {
             return Location{reinterpret_cast<char*>(address), file_offset};
           }),
           py::arg("address") = 0, py::arg("file_offset") = -1);
  py::class_<StepTask>(module, "StepTask")
      .def(py::init(&make_task), py::arg("key"), py::arg("param"), py::arg("grad"),
           py::arg("record"), py::arg("segments"));
  py::class_<BoundPipeline>(module, "StepPipeline")
      .def(py::init(&make_pipeline), py::arg("engine").none(true), py::arg("file"),
           py::arg("arena").none(true), py::arg("buffers"), py::arg("dtype"), py::arg("grad_dtype"),
           py::arg("piece_numel"), py::arg("param_in_file"), py::arg("grad_in_file"),
           py::keep_alive<1, 2>(), py::keep_alive<1, 4>())
      .def_static(
          "buffer_bytes",
          [](const std::string& dtype, const std::string& grad_dtype, std::size_t piece_numel,
             bool param_in_file, bool grad_in_file) {
            return make_layout(dtype, grad_dtype, piece_numel, param_in_file, grad_in_file)
                .buffer_bytes();
          },
          py::arg("dtype"), py::arg("grad_dtype"), py::arg("piece_numel"), py::arg("param_in_file"),
          py::arg("grad_in_file"))
      .def(
          "submit",
          [](BoundPipeline& self, std::vector<StepTask> tasks, const std::vector<AdamHyper>& hypers,
             double grad_scale) { self.submit(std::move(tasks), hypers, grad_scale); },
          py::arg("tasks"), py::arg("hypers"), py::arg("grad_scale"), NoGil())
      .def("wait_updated", &BoundPipeline::wait_updated, NoGil())
      .def("wait_written", &BoundPipeline::wait_written, py::arg("key") = -1, NoGil())
      .def("flush", &BoundPipeline::flush, py::arg("key") = -1, NoGil())
      .def("forget", &BoundPipeline::forget, py::arg("key") = -1, NoGil())
      .def_property_readonly("stats", &stats_dict)
      .def("inject", &BoundPipeline::inject, py::arg("nth"), NoGil())
      .def("close", &BoundPipeline::close, NoGil());
}

}  // namespace

void bind_optimizer(py::module_& module) {
  bind_choices(module);
  bind_kernels(module);
  bind_pipeline(module);
}

}  // namespace hetero
