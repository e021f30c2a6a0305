"""Writes the program that keeps the sources that NVRTC compiles as text in the module.

On a machine with a GPU the module then needs no files of its own.

usage: python bind_cuda_sources.py FILE
"""

import sys
from pathlib import Path

NATIVE = Path(__file__).resolve().parents[1]
PROGRAM = """// Made by native/bindings/bind_cuda_sources.py.
#include <pybind11/pybind11.h>

namespace py = pybind11;

namespace hetero {

void bind_cuda_sources(py::module_& module) {
  module.def("cuda_sources", [] {
    py::dict sources;
%s
    return sources;
  });
}

}  // namespace hetero
"""
HEADERS = [
    "update/cuda/group.h",
    "update/update_kind.h",
    "update/isa/vec_operators.h",
    "update/isa/vec_scalar.h",
    "update/kernels/kernels.h",
    *sorted(
        f"update/kernels/{path.name}"
        for path in NATIVE.glob("update/kernels/*.inl.h")
        if path.name != "make_kernels.inl.h"  # the CPU's tables of kernels
    ),
]
# By the name that the kernels include them by.
FILES = {
    "update.cu": "update/cuda/update.cu",
    **{name: name for name in HEADERS},
    **dict.fromkeys(("cmath", "cstddef", "cstdint", "cstring"), "update/cuda/nvrtc_std.h"),
}


def main(target: Path) -> None:
    """Writes the file."""
    texts = (
        f'    sources["{name}"] = R"hetero({(NATIVE / file).read_text()})hetero";'
        for name, file in FILES.items()
    )
    target.write_text(PROGRAM % "\n".join(texts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
