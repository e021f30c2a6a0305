// The extension module offload._native: what it was built from, and everything the other bindings
// files add.
#include <pybind11/pybind11.h>

#include <sstream>
#include <string>

namespace py = pybind11;

namespace hetero {

void bind_timeline(py::module_& module);
void bind_memory_io(py::module_& module);
void bind_update(py::module_& module);
void bind_pipeline(py::module_& module);
void bind_link(py::module_& module);
void bind_cuda_sources(py::module_& module);

namespace {

py::dict build_info() {
  py::list isas;
  std::istringstream names(HETERO_ISAS);
  for (std::string name; std::getline(names, name, ',');) isas.append(name);
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
  info["isas"] = isas;
  return info;
}

}  // namespace

PYBIND11_MODULE(_native, module) {
  module.doc() =
      "The native core of hetero: host memory, file transfers, updates, the step pipeline, "
      "the emulated link.";
  module.def("build_info", &build_info);
  bind_timeline(module);
  bind_memory_io(module);
  bind_update(module);
  bind_pipeline(module);
  bind_link(module);
  bind_cuda_sources(module);
}

}  // namespace hetero
