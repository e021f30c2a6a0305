// The update, the sums of squares, writes that take them, and the choice of instruction set and
// threads.
#include <pybind11/operators.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/worker_pool.h"
#include "bindings/python.h"
#include "update/isa/isa.h"
#include "update/reductions.h"
#include "update/update.h"

namespace hetero {

namespace {

using Address = std::uintptr_t;

constexpr const char* kStateDtypeNames[] = {"fp32", "bf16", "8bit"};
constexpr const char* kRuleNames[] = {"adam", "lion", "adagrad", "sgd", "muon", "muon_momentum"};
// What the split of bf16 masters does with the last state.
constexpr const char* kCarrierNames[] = {"none", "sign", "lowest", "remainder"};

const char* name_of(Rule rule) { return kRuleNames[static_cast<std::size_t>(rule)]; }

UpdateKind make_kind(const std::string& dtype, const std::string& grad_dtype,
                     const std::string& rule, const std::string& state_dtype) {
  return {.dtype = parse_dtype(dtype),
          .grad_dtype = parse_dtype(grad_dtype, "grad_dtype"),
          .rule = value_of<Rule>(kRuleNames, rule, "rule"),
          .state_dtype = value_of<StateDtype>(kStateDtypeNames, state_dtype, "state_dtype")};
}

std::string repr(const UpdateKind& kind) {
  return std::string("UpdateKind(dtype='") + name_of(kind.dtype) + "', grad_dtype='" +
         name_of(kind.grad_dtype) + "', rule='" + name_of(kind.rule) + "', state_dtype='" +
         name_of(kind.state_dtype) + "')";
}

Hyper make_hyper(double lr, double weight_decay, bool decoupled, double beta1, double beta2,
                 double eps, bool bias_correction, double lr_decay, double momentum,
                 double dampening, bool nesterov, double lr_scale, std::int64_t step,
                 double grad_scale) {
  const Hyper hyper = {lr,       weight_decay, decoupled, beta1,    beta2,    eps,  bias_correction,
                       lr_decay, momentum,     dampening, nesterov, lr_scale, step, grad_scale};
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
  update(kind, {{at, numel, make_constants(kind, hyper), index}});
}

SplitArrays split_arrays(const UpdateKind& kind, Address param, Address remainder, Address carrier,
                         std::size_t numel) {
  const bool has_carrier = kind.carrier(kind.states() - 1) != Carrier::remainder;
  if (!has_carrier && carrier != 0) {
    throw std::invalid_argument("carrier is not 0, but states in 8 bits have no bit for the carry");
  }
  return {pointer(param, numel, "param"), pointer(remainder, numel, "remainder"),
          pointer(carrier, has_carrier ? numel : 0, "carrier")};
}

void bound_split_master(const UpdateKind& kind, Address source, Address param, Address remainder,
                        Address carrier, std::size_t numel) {
  split_master(kind, pointer(source, numel, "source"),
               split_arrays(kind, param, remainder, carrier, numel), numel);
}

void bound_join_master(const UpdateKind& kind, Address param, Address remainder, Address carrier,
                       Address target, std::size_t numel) {
  join_master(kind, split_arrays(kind, param, remainder, carrier, numel),
              pointer(target, numel, "target"), numel);
}

void bound_encode_state(const UpdateKind& kind, std::size_t state, Address source, Address blocks,
                        std::size_t numel) {
  encode_state(kind, state, pointer(source, numel, "source"), pointer(blocks, numel, "blocks"),
               numel);
}

void bound_decode_state(const UpdateKind& kind, std::size_t state, Address blocks, Address target,
                        std::size_t numel) {
  decode_state(kind, state, pointer(blocks, numel, "blocks"), pointer(target, numel, "target"),
               numel);
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

using SummedWrite = double (*)(Dtype, const char*, Dtype, char*, std::size_t);

// copy_and_sum() or add_and_sum().
template <SummedWrite write>
double bound_summed_write(const std::string& source_dtype, Address source, const std::string& dtype,
                          Address target, std::size_t numel) {
  const Dtype from_dtype = parse_dtype(source_dtype, "source_dtype");
  const char* const from = pointer(source, numel, "source");
  const Dtype to_dtype = parse_dtype(dtype);
  return write(from_dtype, from, to_dtype, pointer(target, numel, "target"), numel);
}

void bound_stream(Address param, Address grad, Address exp_avg, Address exp_avg_sq,
                  std::size_t numel) {
  stream(pointer(param, numel, "param"), pointer(grad, numel, "grad"),
         pointer(exp_avg, numel, "exp_avg"), pointer(exp_avg_sq, numel, "exp_avg_sq"), numel);
}

void bind_choices(py::module_& module) {
  module.def("isa_available", &isa_available);
  module.def("isa", &isa);
  module.def("set_isa", &set_isa, "name"_a);
  module.def(
      "set_threads",
      [](std::int64_t count) {
        if (count < 1 || count > 4096) {
          throw std::invalid_argument("set_threads: count is " + std::to_string(count) +
                                      ", must be from 1 to 4096");
        }
        WorkerPool::instance().set_threads(static_cast<unsigned>(count));
      },
      "count"_a, ReleaseGil());
  module.def("start_threads", [] { return WorkerPool::instance().start(); }, ReleaseGil());
  module.def("threads", [] { return WorkerPool::instance().threads(); });
  module.def("shutdown_workers", [] { WorkerPool::instance().shutdown(); }, ReleaseGil());
}

void bind_kind(py::module_& module) {
  py::class_<UpdateKind>(module, "UpdateKind")
      .def(py::init(&make_kind), "dtype"_a, "grad_dtype"_a, "rule"_a = "adam",
           "state_dtype"_a = "fp32")
      .def_property_readonly("dtype", [](const UpdateKind& kind) { return name_of(kind.dtype); })
      .def_property_readonly("grad_dtype",
                             [](const UpdateKind& kind) { return name_of(kind.grad_dtype); })
      .def_property_readonly("rule", [](const UpdateKind& kind) { return name_of(kind.rule); })
      .def_property_readonly("state_dtype",
                             [](const UpdateKind& kind) { return name_of(kind.state_dtype); })
      .def_property_readonly("states", &UpdateKind::states)
      .def_property_readonly(
          "carrier",
          [](const UpdateKind& kind) {
            return kCarrierNames[static_cast<std::size_t>(kind.carrier(kind.states() - 1))];
          })
      .def(
          "state_bytes",
          [](const UpdateKind& kind, std::size_t numel) {
            return state_bytes(kind.state_dtype, numel);
          },
          "numel"_a)
      .def("state_at", &UpdateKind::state_at, "state"_a, "tile_numel"_a)
      .def("optim_state_bytes", &UpdateKind::optim_state_bytes, "tile_numel"_a)
      .def("bytes_moved", &UpdateKind::bytes_moved, "numel"_a)
      .def(py::self == py::self)
      .def("__hash__", &number_of)
      .def("__repr__", &repr);
}

void bind_kernels(py::module_& module) {
  const Hyper defaults;
  py::class_<Hyper>(module, "Hyper")
      .def(py::init(&make_hyper), py::kw_only(), "lr"_a, "weight_decay"_a = defaults.weight_decay,
           "decoupled"_a = defaults.decoupled, "beta1"_a = defaults.beta1,
           "beta2"_a = defaults.beta2, "eps"_a = defaults.eps,
           "bias_correction"_a = defaults.bias_correction, "lr_decay"_a = defaults.lr_decay,
           "momentum"_a = defaults.momentum, "dampening"_a = defaults.dampening,
           "nesterov"_a = defaults.nesterov, "lr_scale"_a = defaults.lr_scale,
           "step"_a = defaults.step, "grad_scale"_a = defaults.grad_scale)
      .def("__eq__", [](const Hyper& self, const Hyper& other) { return self == other; });
  module.def("update", &bound_update, "kind"_a.none(false), "param"_a, "grad"_a, "master"_a,
             "states"_a, "numel"_a, "hyper"_a.none(false), "index"_a = 0, ReleaseGil());
  module.def("update_constants", &constants_of, "kind"_a.none(false), "hyper"_a.none(false));
  module.def("split_master", &bound_split_master, "kind"_a.none(false), "source"_a, "param"_a,
             "remainder"_a, "carrier"_a, "numel"_a, ReleaseGil());
  module.def("join_master", &bound_join_master, "kind"_a.none(false), "param"_a, "remainder"_a,
             "carrier"_a, "target"_a, "numel"_a, ReleaseGil());
  module.def("encode_state", &bound_encode_state, "kind"_a.none(false), "state"_a, "source"_a,
             "blocks"_a, "numel"_a, ReleaseGil());
  module.def("decode_state", &bound_decode_state, "kind"_a.none(false), "state"_a, "blocks"_a,
             "target"_a, "numel"_a, ReleaseGil());
  module.def("sum_of_squares", &bound_sum_of_squares, "dtype"_a, "address"_a, "numel"_a,
             ReleaseGil());
  module.def("mean", &bound_mean, "dtype"_a, "sources"_a, "target"_a, "numel"_a, ReleaseGil());
  module.def("copy_and_sum", &bound_summed_write<copy_and_sum>, "source_dtype"_a, "source"_a,
             "dtype"_a, "target"_a, "numel"_a, ReleaseGil());
  module.def("add_and_sum", &bound_summed_write<add_and_sum>, "source_dtype"_a, "source"_a,
             "dtype"_a, "target"_a, "numel"_a, ReleaseGil());
  module.def("stream", &bound_stream, "param"_a, "grad"_a, "exp_avg"_a, "exp_avg_sq"_a, "numel"_a,
             ReleaseGil());
}

}  // namespace

void bind_update(py::module_& module) {
  bind_choices(module);
  bind_kind(module);
  bind_kernels(module);
}

}  // namespace hetero
