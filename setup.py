"""Builds offload._native with CMake, and says which packages there are; everything else is in
pyproject.toml.

Environment: HETERO_IO_URING=OFF builds without io_uring, HETERO_WERROR=1 makes warnings errors,
HETERO_SANITIZE=address,undefined or =thread builds with sanitizers, HETERO_JOBS limits the
compilers.
"""

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


def find_tool(name: str) -> str:
    """The tool of the Python package of that name, which need not be on PATH, or the system's."""
    directory = None
    try:
        if name == "cmake":
            from cmake import CMAKE_BIN_DIR as directory
        elif name == "ninja":
            from ninja import BIN_DIR as directory
    except ImportError:
        pass
    found = (directory and shutil.which(name, path=directory)) or shutil.which(name)
    if not found:
        raise SystemExit(f"{name} is needed to build hetero: pip install {name}")
    return found


def find_pybind11() -> str:
    """The option that tells CMake: the package, or else the headers that torch brings."""
    try:
        import pybind11
    except ImportError:
        found = importlib.util.find_spec("torch")
        include = found and found.origin and Path(found.origin).parent / "include"
        if not include or not (include / "pybind11" / "pybind11.h").exists():
            raise SystemExit("pybind11 is needed to build hetero: pip install pybind11") from None
        return f"-DHETERO_PYBIND11_INCLUDE={include}"
    return f"-Dpybind11_DIR={pybind11.get_cmake_dir()}"


class CMakeExtension(Extension):
    """An extension whose sources CMake knows."""

    def __init__(self, name: str) -> None:
        super().__init__(name, sources=[])


class CMakeBuild(build_ext):
    """Configures and builds in build/, so that building again compiles only what changed."""

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        io_uring = os.environ.get("HETERO_IO_URING", "ON")
        werror = os.environ.get("HETERO_WERROR", "OFF")
        sanitize = os.environ.get("HETERO_SANITIZE", "")
        build = (
            ROOT
            / "build"
            / "-".join(
                ["native", sys.implementation.cache_tag]
                + (["no-uring"] if io_uring.upper() in ("OFF", "0", "NO", "FALSE") else [])
                + ([sanitize] if sanitize else [])
            )
        )
        build.mkdir(parents=True, exist_ok=True)
        cmake = find_tool("cmake")
        configure = [
            cmake,
            f"-S{ROOT}",
            f"-B{build}",
            "-GNinja",
            # Given each time: an isolated build leaves paths in the cache that are gone later.
            f"-DCMAKE_MAKE_PROGRAM={find_tool('ninja')}",
            find_pybind11(),
            f"-DPython_EXECUTABLE={sys.executable}",
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DHETERO_IO_URING={io_uring}",
            f"-DHETERO_WERROR={werror}",
            f"-DHETERO_SANITIZE={sanitize}",
        ]
        compile_ = [cmake, "--build", str(build), "--target", "_native"]
        if jobs := os.environ.get("HETERO_JOBS"):
            compile_ += ["--parallel", jobs]
        # Two builds of one tree at a time would write the same files.
        with open(build / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            subprocess.run(configure, check=True)
            subprocess.run(compile_, check=True)
            # A new file, not new content: a process may have the old one mapped.
            target.unlink(missing_ok=True)
            shutil.copy2(build / target.name, target)


# Benchmarks lie where no import finds them by chance: `bench` is a name for anybody's.
# hetero/cli/bench.py runs them from there.
BENCH = "hetero.benchmarks.bench"

setup(
    packages=[
        *find_packages(include=["hetero*", "offload*"]),
        *(BENCH + name.removeprefix("bench") for name in find_packages(include=["bench*"])),
    ],
    package_dir={BENCH: "bench"},
    ext_modules=[CMakeExtension("offload._native")],
    cmdclass={"build_ext": CMakeBuild},
)
