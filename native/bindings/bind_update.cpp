// The update, the sums of squares, and the choice of instruction set and threads.
#include <pybind11/operators.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/usable_cpus.h"
#include "base/worker_pool.h"
#include "bindings/python.h"
#include "update/isa/isa.h"
#include "update/reductions.h"
#include "update/update.h"

namespace hetero {

namespace {

using Address = std::uintptr_t;

Dtype parse_dtype(const std::string& name, const char* parameter = "dtype") {
  if (name == "fp32") return Dtype::fp32;
  if (name == "bf16") return Dtype::bf16;
  if (name == "fp16") return Dtype::fp16;
  throw std::invalid_argument(std::string(parameter) + " is '" + name +
                              "', must be 'fp32', 'bf16' or 'fp16'");
}

Dtype parse_state_dtype(const std::string& name) {
  if (name == "fp32") return Dtype::fp32;
  if (name == "bf16") return Dtype::bf16;
  throw std::invalid_argument("state_dtype is '" + name + "', must be 'fp32' or 'bf16'");
}

Rule parse_rule(const std::string& name) {
  if (name == "adam") return Rule::adam;
  if (name == "lion") return Rule::lion;
  if (name == "adagrad") return Rule::adagrad;
  throw std::invalid_argument("rule is '" + name + "', must be 'adam', 'lion' or 'adagrad'");
}

const char* name_of(Rule rule) {
  switch (rule) {
    case Rule::adam:
      return "adam";
    case Rule::lion:
      return "lion";
    case Rule::adagrad:
      return "adagrad";
  }
  throw std::logic_error("unknown rule");
}

UpdateKind make_kind(const std::string& dtype, const std::string& grad_dtype,
                     const std::string& rule, const std::string& state_dtype) {
  return {.dtype = parse_dtype(dtype),
          .grad_dtype = parse_dtype(grad_dtype, "grad_dtype"),
          .rule = parse_rule(rule),
          .state_dtype = parse_state_dtype(state_dtype)};
}

std::string repr(const UpdateKind& kind) {
  return std::string("UpdateKind(dtype='") + name_of(kind.dtype) + "', grad_dtype='" +
         name_of(kind.grad_dtype) + "', rule='" + name_of(kind.rule) + "', state_dtype='" +
         name_of(kind.state_dtype) + "')";
}

Hyper make_hyper(double lr, double weight_decay, bool decoupled, double beta1, double beta2,
                 double eps, bool bias_correction, double lr_decay, std::int64_t step,
                 double grad_scale) {
  const Hyper hyper = {.lr = lr,
                       .weight_decay = weight_decay,
                       .decoupled = decoupled,
                       .beta1 = beta1,
                       .beta2 = beta2,
                       .eps = eps,
                       .bias_correction = bias_correction,
                       .lr_decay = lr_decay,
                       .step = step,
                       .grad_scale = grad_scale};
  hyper.validate();
  return hyper;
}

char* pointer(Address address, std::size_t numel, const std::string& name) {
  if (address == 0 && numel != 0) {
    throw std::invalid_argument(name + " is 0, must be the address of " + std::to_string(numel) +
                                " elements");
  }
  return reinterpret_cast<char*>(address);
}

void bound_update(const UpdateKind& kind, Address param, Address grad, Address master,
                  const std::vector<Address>& states, std::size_t numel, const Hyper& hyper,
                  std::uint64_t index) {
  if (kind.dtype == Dtype::fp32 && master != 0) {
    throw std::invalid_argument("master is not 0, but an fp32 parameter is its own master");
  }
  if (states.size() != kind.states()) {
    throw std::invalid_argument("states has " + std::to_string(states.size()) + " addresses, " +
                                name_of(kind.rule) + " has " + std::to_string(kind.states()));
  }
  UpdateArrays at = {
      .param = pointer(param, numel, "param"),
      .grad = pointer(grad, numel, "grad"),
      .master = pointer(master, kind.dtype == Dtype::fp32 ? 0 : numel, "master"),
  };
  for (std::size_t i = 0; i < states.size(); ++i) {
    at.states[i] = pointer(states[i], numel, "states[" + std::to_string(i) + "]");
  }
  const UpdateSlice slice = {at, numel, make_constants(kind, hyper), index};
  update(kind, {&slice, 1});
}

SplitArrays split_arrays(Address param, Address remainder, Address carrier, std::size_t numel) {
  return {pointer(param, numel, "param"), pointer(remainder, numel, "remainder"),
          pointer(carrier, numel, "carrier")};
}

void bound_split_master(const UpdateKind& kind, Address source, Address param, Address remainder,
                        Address carrier, std::size_t numel) {
  split_master(kind, pointer(source, numel, "source"),
               split_arrays(param, remainder, carrier, numel), numel);
}

void bound_join_master(const UpdateKind& kind, Address param, Address remainder, Address carrier,
                       Address target, std::size_t numel) {
  join_master(kind, split_arrays(param, remainder, carrier, numel),
              pointer(target, numel, "target"), numel);
}

// As a kernel on another device takes them.
py::bytes constants_of(const UpdateKind& kind, const Hyper& hyper) {
  const UpdateConstants constants = make_constants(kind, hyper);
  return {reinterpret_cast<const char*>(&constants), sizeof constants};
}

double bound_sum_of_squares(const std::string& dtype, Address address, std::size_t numel) {
  return sum_of_squares(parse_dtype(dtype), pointer(address, numel, "address"), numel);
}

void bound_mean(const std::string& dtype, const std::vector<Address>& sources, Address target,
                std::size_t numel) {
  if (sources.empty()) throw std::invalid_argument("a mean needs at least one source");
  std::vector<const char*> from;
  for (const Address source : sources) from.push_back(pointer(source, numel, "source"));
  mean(parse_dtype(dtype), from, pointer(target, numel, "target"), numel);
}

void bound_stream(Address param, Address grad, Address exp_avg, Address exp_avg_sq,
                  std::size_t numel) {
  stream(pointer(param, numel, "param"), pointer(grad, numel, "grad"),
         pointer(exp_avg, numel, "exp_avg"), pointer(exp_avg_sq, numel, "exp_avg_sq"), numel);
}

void bind_choices(py::module_& module) {
  module.def("isa_available", &isa_available);
  module.def("isa", &isa);
  module.def("set_isa", &set_isa, py::arg("name"));
  module.def(
      "set_threads",
      [](std::int64_t count, const std::optional<std::vector<int>>& cpus) {
        if (count < 1 || count > 4096) {
          throw std::invalid_argument("set_threads: count is " + std::to_string(count) +
                                      ", must be from 1 to 4096");
        }
        WorkerPool::instance().set_threads(static_cast<unsigned>(count), cpus);
      },
      py::arg("count"), py::arg("cpus") = py::none(), ReleaseGil());
  module.def("cpu_quota", &cpu_quota, py::arg("root") = "");
  module.def("usable_cpus", &usable_cpus);
  module.def("threads", [] { return WorkerPool::instance().threads(); });
  module.def("thread_cpus", [] { return WorkerPool::instance().cpus(); });
  module.def("shutdown_workers", [] { WorkerPool::instance().shutdown(); }, ReleaseGil());
}

void bind_kind(py::module_& module) {
  py::class_<UpdateKind>(module, "UpdateKind")
      .def(py::init(&make_kind), py::arg("dtype"), py::arg("grad_dtype"), py::arg("rule") = "adam",
           py::arg("state_dtype") = "fp32")
      .def_property_readonly("dtype", [](const UpdateKind& kind) { return name_of(kind.dtype); })
      .def_property_readonly("grad_dtype",
                             [](const UpdateKind& kind) { return name_of(kind.grad_dtype); })
      .def_property_readonly("rule", [](const UpdateKind& kind) { return name_of(kind.rule); })
      .def_property_readonly("state_dtype",
                             [](const UpdateKind& kind) { return name_of(kind.state_dtype); })
      .def_property_readonly("states", &UpdateKind::states)
      .def_property_readonly("optim_state_bytes", &UpdateKind::optim_state_bytes)
      .def_property_readonly("bytes_moved", &UpdateKind::bytes_moved)
      .def(py::self == py::self)
      .def("__hash__", &number_of)
      .def("__repr__", &repr);
}

void bind_kernels(py::module_& module) {
  const Hyper defaults;
  py::class_<Hyper>(module, "Hyper")
      .def(py::init(&make_hyper), py::kw_only(), py::arg("lr"),
           py::arg("weight_decay") = defaults.weight_decay,
           py::arg("decoupled") = defaults.decoupled, py::arg("beta1") = defaults.beta1,
           py::arg("beta2") = defaults.beta2, py::arg("eps") = defaults.eps,
           py::arg("bias_correction") = defaults.bias_correction,
           py::arg("lr_decay") = defaults.lr_decay, py::arg("step") = defaults.step,
           py::arg("grad_scale") = defaults.grad_scale);
  module.def("update", &bound_update, py::arg("kind").none(false), py::arg("param"),
             py::arg("grad"), py::arg("master"), py::arg("states"), py::arg("numel"),
             py::arg("hyper").none(false), py::arg("index") = 0, ReleaseGil());
  module.def("update_constants", &constants_of, py::arg("kind").none(false),
             py::arg("hyper").none(false));
  module.def("split_master", &bound_split_master, py::arg("kind").none(false), py::arg("source"),
             py::arg("param"), py::arg("remainder"), py::arg("carrier"), py::arg("numel"),
             ReleaseGil());
  module.def("join_master", &bound_join_master, py::arg("kind").none(false), py::arg("param"),
             py::arg("remainder"), py::arg("carrier"), py::arg("target"), py::arg("numel"),
             ReleaseGil());
  module.def("sum_of_squares", &bound_sum_of_squares, py::arg("dtype"), py::arg("address"),
             py::arg("numel"), ReleaseGil());
  module.def("mean", &bound_mean, py::arg("dtype"), py::arg("sources"), py::arg("target"),
             py::arg("numel"), ReleaseGil());
  module.def("stream", &bound_stream, py::arg("param"), py::arg("grad"), py::arg("exp_avg"),
             py::arg("exp_avg_sq"), py::arg("numel"), ReleaseGil());
}

}  // namespace

void bind_update(py::module_& module) {
  bind_choices(module);
  bind_kind(module);
  bind_kernels(module);
}

}  // namespace hetero
