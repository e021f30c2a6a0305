"""Builds offload._native, and says which packages there are; everything else is in pyproject.toml.

CMake and ninja build it. Where one of them is missing, as on a machine with a GPU and no network,
the compiler alone does, each time anew.

Environment: HETERO_IO_URING=OFF builds without io_uring, HETERO_WERROR=1 makes warnings errors,
HETERO_SANITIZE=address,undefined or =thread builds with sanitizers (by CMake), HETERO_JOBS limits
the compilers, CXX names the compiler.
"""

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from platform import machine

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


def find_tool(name: str) -> str | None:
    """The tool of the Python package of that name, which need not be on PATH, or the system's."""
    directory = None
    try:
        if name == "cmake":
            from cmake import CMAKE_BIN_DIR as directory
        elif name == "ninja":
            from ninja import BIN_DIR as directory
    except ImportError:
        pass
    return (directory and shutil.which(name, path=directory)) or shutil.which(name)


def find_pybind11() -> tuple[str, str | None]:
    """The folder of pybind11's headers, and that of its CMake files; torch brings the headers."""
    try:
        import pybind11
    except ImportError:
        found = importlib.util.find_spec("torch")
        include = found and found.origin and Path(found.origin).parent / "include"
        if not include or not (include / "pybind11" / "pybind11.h").exists():
            raise SystemExit("pybind11 is needed to build hetero: pip install pybind11") from None
        return str(include), None
    return pybind11.get_include(), pybind11.get_cmake_dir()


def is_on(name: str, default: str) -> bool:
    """Whether the environment says so, in the words that CMake understands."""
    return os.environ.get(name, default).upper() not in ("", "OFF", "0", "NO", "FALSE")


class NativeExtension(Extension):
    """An extension whose sources are in native/sources.txt."""

    def __init__(self, name: str) -> None:
        super().__init__(name, sources=[])


class NativeBuild(build_ext):
    """Builds in build/, so that CMake compiles only what changed."""

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        sanitize = os.environ.get("HETERO_SANITIZE", "")
        missing = [tool for tool in ("cmake", "ninja") if not find_tool(tool)]
        if missing and sanitize:
            raise SystemExit(f"HETERO_SANITIZE needs {missing[0]}: pip install {missing[0]}")
        build = (
            ROOT
            / "build"
            / "-".join(
                ["native", sys.implementation.cache_tag]
                + ([] if is_on("HETERO_IO_URING", "ON") else ["no-uring"])
                + ([sanitize] if sanitize else [])
            )
        )
        build.mkdir(parents=True, exist_ok=True)
        # Two builds of one tree at a time would write the same files.
        with open(build / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            (compile_alone if missing else compile_by_cmake)(build, target.name)
            # A new file, not new content: a process may have the old one mapped.
            target.unlink(missing_ok=True)
            shutil.copy2(build / target.name, target)


def compile_by_cmake(build: Path, _: str) -> None:
    """Configures and builds in the folder."""
    cmake = str(find_tool("cmake"))
    headers, cmake_files = find_pybind11()
    configure = [
        cmake,
        f"-S{ROOT}",
        f"-B{build}",
        "-GNinja",
        # Given each time: an isolated build leaves paths in the cache that are gone later.
        f"-DCMAKE_MAKE_PROGRAM={find_tool('ninja')}",
        f"-Dpybind11_DIR={cmake_files}" if cmake_files else f"-DHETERO_PYBIND11_INCLUDE={headers}",
        f"-DPython_EXECUTABLE={sys.executable}",
        "-DCMAKE_BUILD_TYPE=Release",
        f"-DHETERO_IO_URING={os.environ.get('HETERO_IO_URING', 'ON')}",
        f"-DHETERO_WERROR={os.environ.get('HETERO_WERROR', 'OFF')}",
        f"-DHETERO_SANITIZE={os.environ.get('HETERO_SANITIZE', '')}",
    ]
    compile_ = [cmake, "--build", str(build), "--target", "_native"]
    if jobs := os.environ.get("HETERO_JOBS"):
        compile_ += ["--parallel", jobs]
    subprocess.run(configure, check=True)
    subprocess.run(compile_, check=True)


def compile_alone(build: Path, name: str) -> None:
    """Makes the module of that name in the folder with the compiler, as CMakeLists.txt does."""
    compiler = os.environ.get("CXX", "c++")
    if not shutil.which(compiler):
        raise SystemExit(f"a C++20 compiler is needed to build hetero: there is no {compiler}")
    native = ROOT / "native"
    processor = {"amd64": "x86_64", "arm64": "aarch64"}.get(machine().lower(), machine().lower())
    rows = [line.split() for line in (native / "sources.txt").read_text().splitlines()]
    sources = {
        native / row[0]: row[2:]
        for row in rows
        if row and row[0] != "#" and row[1] in ("all", processor)
    }
    isas = [path.stem[len("kernels_") :] for path in sources if path.stem.startswith("kernels_")]
    define = f'-DHETERO_ISAS="{",".join([*isas, "scalar"])}"'
    sources[native / "bindings" / "module.cpp"] = [define]
    flags = ["-std=c++20", "-O3", "-DNDEBUG", "-fPIC", "-fvisibility=hidden", "-pthread"]
    flags += ["-Wall", "-Wextra", "-Wpedantic", "-ffp-contract=off", f"-I{native}"]
    flags += ["-Werror"] * is_on("HETERO_WERROR", "OFF")
    link = [compiler, "-shared", "-pthread", "-o"]
    libraries = []
    driver = native / "io" / "engines" / "uring_driver.cpp"
    if is_on("HETERO_IO_URING", "ON"):
        calls = [str(driver.with_name("uring_calls.cpp")), "-std=c++20", "-fPIC", "-luring"]
        tried = subprocess.run(
            [*link, str(build / "calls.so"), *calls, "-Wl,-z,defs"], capture_output=True
        )
        if tried.returncode:
            print("hetero: no liburing 2.2 or newer: threads will do all I/O", file=sys.stderr)
        else:
            sources[driver] = []
            flags.append('-DHETERO_LIBURING="unknown"')
            libraries.append("-luring")
    # As in CMakeLists.txt, the bindings' headers are no part of the core.
    made_source = build / "bind_cuda_sources.cpp"
    maker = native / "bindings" / made_source.with_suffix(".py").name
    subprocess.run([sys.executable, str(maker), str(made_source)], check=True)
    sources[made_source] = []
    headers = [f"-isystem{find_pybind11()[0]}", f"-isystem{sysconfig.get_path('include')}"]
    bindings = {path for path in sources if path.parent == maker.parent or path == made_source}

    def compiled(source: Path) -> str:
        made = build / (source.stem + ".o")
        options = [*flags, *sources[source], *(headers if source in bindings else [])]
        subprocess.run([compiler, "-c", str(source), *options, "-o", str(made)], check=True)
        return str(made)

    with ThreadPoolExecutor(int(os.environ.get("HETERO_JOBS") or os.cpu_count() or 1)) as pool:
        objects = dict(zip(sources, pool.map(compiled, sources), strict=True))
    # The module's undefined names are Python's. Of the core none may be, which ends the build here.
    core = [made for source, made in objects.items() if source not in bindings]
    subprocess.run([*link, str(build / "core.so"), *core, *libraries, "-Wl,-z,defs"], check=True)
    subprocess.run([*link, str(build / name), *objects.values(), *libraries], check=True)


# Benchmarks lie where no import finds them by chance: `bench` is a name for anybody's.
# hetero/cli/bench.py runs them from there.
BENCH = "hetero.benchmarks.bench"

setup(
    packages=[
        *find_packages(include=["hetero*", "offload*"]),
        *(BENCH + name.removeprefix("bench") for name in find_packages(include=["bench*"])),
    ],
    package_dir={BENCH: "bench"},
    ext_modules=[NativeExtension("offload._native")],
    cmdclass={"build_ext": NativeBuild},
)
