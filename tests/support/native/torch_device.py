"""A device of torch's that is not the CPU, without one: "hetero_test", over PrivateUse1.

Its C++ is tests/native/torch_device. join() makes it the process's accelerator for good, so only
processes of its own call it: `run_forked()`. This module is `torch.hetero_test` then, and has what
torch and libraries ask of a device's module.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.utils import cpp_extension

from offload._native import OffloadQueue, UpdateKind
from offload.device.cuda_backend import CudaBackend
from offload.device.cuda_runtime import CudaRuntime
from offload.memory.arena import HostArena
from tests.support.cuda.watch import Watch
from tests.support.native.fake_cuda import FakeRuntime, HostKernels
from tests.support.native.native_build import CXX, ROOT, cached, succeed

NAME = "hetero_test"
EXTENSION = (12, 0)  # DLPack's number of it, kDLExtDev
TOTAL = 1 << 30  # bytes, it says
MISSING = None if shutil.which(CXX) else f"needs a C++ compiler, and there is no {CXX}"
default_generators: tuple[torch.Generator, ...] = ()


def build() -> Path:
    """The library, compiled once for all processes, as long as neither it nor torch changes."""
    flags = ["-std=c++20", "-O1", "-fPIC", "-shared", "-Wall", "-Werror"]
    sources = sorted((ROOT / "tests/native/torch_device").glob("*.cpp"))
    torch_at = [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu", "-lc10"]
    for folder in cpp_extension.include_paths("cpu"):
        torch_at += ["-isystem", folder]

    def make(target: Path) -> None:
        succeed([CXX, *flags, *map(str, sources), "-o", str(target), *torch_at])

    return cached("torch_device.so", [*flags, torch.__version__], sources, make)


def join(library: Path) -> torch.device:
    """The device, which this process has from now on."""
    global default_generators
    if not default_generators:
        torch.ops.load_library(str(library))
        torch.utils.rename_privateuse1_backend(NAME)
        torch._register_device_module(NAME, sys.modules[__name__])
        torch.utils.generate_methods_for_privateuse1_backend()
        default_generators = (torch.ops.hetero_test.default_generator(),)
    return torch.device(NAME, 0)


class Counts(NamedTuple):
    """What the device has counted: bytes that tensors have and had at most, allocations of pinned
    RAM, tensors that were recorded for streams, draws of random numbers, and bytes that tensors
    were copied to it and from it."""

    allocated: int
    peak: int
    pinned: int
    recorded: int
    random: int
    crossed: int


def counts() -> Counts:
    """Those of this process so far."""
    return Counts(*torch.ops.hetero_test.counts())


# What a device's module has by custom


def _nothing(device: Any = None) -> None:
    """There is nothing to do."""


init = synchronize = empty_cache = _nothing
is_available = is_initialized = lambda: True
_is_in_bad_fork = is_current_stream_capturing = lambda: False
device_count = lambda: 1  # noqa: E731
current_device = lambda: 0  # noqa: E731


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def manual_seed_all(seed: int) -> None:
    for generator in default_generators:
        generator.manual_seed(seed)


def get_rng_state_all() -> list[torch.Tensor]:
    return [generator.get_state() for generator in default_generators]


def set_rng_state_all(states: Sequence[torch.Tensor]) -> None:
    for generator, state in zip(default_generators, states, strict=True):
        generator.set_state(state)


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream()


@cache
def default_stream(device: Any = None) -> torch.Stream:
    """(It is asked for before another one is set.)"""
    return torch.accelerator.current_stream()


def stream(given: torch.Stream) -> torch.Stream:
    return given


def Event(blocking: bool) -> torch.Event:
    return torch.Event(NAME)


def mem_get_info(device: Any = None) -> tuple[int, int]:
    return TOTAL - counts().allocated, TOTAL


def memory_allocated(device: Any = None) -> int:
    return counts().allocated


memory_reserved = memory_allocated


def max_memory_reserved(device: Any = None) -> int:
    return counts().peak


def reset_peak_memory_stats(device: Any = None) -> None:
    torch.ops.hetero_test.reset_peak()


# The same device for hetero


@contextmanager
def exposed() -> Iterator[None]:
    """Inside the block the host may use the device's memory: in a kernel."""
    torch.ops.hetero_test.expose(True)
    try:
        yield
    finally:
        torch.ops.hetero_test.expose(False)


class LateRuntime(FakeRuntime):
    """Its memory is the device's, its streams are FakeRuntime's."""

    dlpack_device = EXTENSION

    def __init__(self, library: Path) -> None:
        super().__init__()
        self.device = join(library)
        self.real, self.exposed = torch.ops.hetero_test.real, exposed


class TorchRuntime(CudaRuntime):
    """A CudaRuntime of the device, but for what CUDA's driver does."""

    exposed = staticmethod(exposed)

    def __init__(self, library: Path) -> None:
        join(library)
        super().__init__(NAME)
        self.dlpack_device = EXTENSION
        self.page_locked: dict[int, int] = {}
        self.launched = 0
        self._copies = FakeRuntime(page_lockable=False)  # of RAM to RAM, done at once
        self._copies.real = torch.ops.hetero_test.real

    def new_stream(self) -> torch.Stream:
        return torch.Stream(self.device)

    def handle(self, event: object) -> int:
        return 0  # it has come

    def offload_queue(self, stream: object, buffers: HostArena) -> OffloadQueue:
        return self._copies.offload_queue(self._copies.compute, buffers)

    def collective_name(self) -> None:
        return None

    def register(self, address: int, nbytes: int) -> None:
        self.page_locked[address] = nbytes

    def unregister(self, address: int) -> None:
        del self.page_locked[address]

    def kernels(self, kind: UpdateKind) -> Any:
        return HostKernels(self, kind)

    def give(self, stream: object, work: Callable[[], object]) -> None:
        """For kernels, which are done at once."""
        work()


RUNTIMES: dict[str, Callable[[Path], Any]] = {"late": LateRuntime, "torch": TorchRuntime}


@contextmanager
def device_of_hetero(library: Path, runtime: str) -> Iterator[Any]:
    """Inside the block backend="cuda" computes there, by one of RUNTIMES."""
    made = RUNTIMES[runtime](library)
    with (
        patch("hetero.config.cuda_available", lambda: True),
        patch("hetero.config.default_device_bytes", lambda *_: 64 << 20),
        patch("hetero.config.CudaBackend", lambda: CudaBackend(made)),
        Watch(made) if isinstance(made, FakeRuntime) else nullcontext(),
    ):
        yield made
