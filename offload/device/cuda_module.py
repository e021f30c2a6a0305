"""CUDA's driver, and kernels that it launches: compiled by NVRTC, for one kind of update each."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from ctypes import POINTER, byref, c_char_p, c_int, c_uint, c_void_p
from functools import cache
from typing import Any

import torch

from offload._native import UpdateKind, cuda_sources
from offload.device.nvrtc import Nvrtc, load_library
from offload.errors import HeteroError

THREADS = 256  # of a block, as native/update/cuda/group.h has it
_PROTOTYPES = {
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuDeviceGetPCIBusId": (c_char_p, c_int, c_int),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuModuleLoadData": (POINTER(c_void_p), c_char_p),
    "cuModuleUnload": (c_void_p,),
    "cuModuleGetFunction": (POINTER(c_void_p), c_void_p, c_char_p),
    "cuLaunchKernel": (
        c_void_p,
        *(c_uint,) * 7,  # blocks and threads in three dimensions, bytes of shared memory
        c_void_p,
        POINTER(c_void_p),
        POINTER(c_void_p),
    ),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
}
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: it does not wait for work in the default stream
# What native code calls to copy (native/link/offload_queue.h).
COPY_FUNCTIONS = (
    "cuCtxSetCurrent",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuStreamWaitEvent",
    "cuMemcpyDtoHAsync_v2",
    "cuGetErrorString",
)


class CudaModule:
    """The kernels of native/update/cuda/update.cu, for one kind, on one device.

    Any thread may launch them, whatever its current device.
    """

    def __init__(self, kind: UpdateKind, index: int) -> None:
        """Compiles them for device `index`, in half a second.

        Raises HeteroError with the compiler's messages.
        """
        code = compile_kernels(kind, torch.cuda.get_device_capability(index))
        self._driver = _driver()
        self._functions: dict[str, c_void_p] = {}
        self._module = c_void_p()
        self._context = c_void_p(primary_context(index))
        with _in_context(self._context):
            loaded = self._driver.cuModuleLoadData(byref(self._module), code)
            _check(loaded, "loading kernels")

    def launch(self, kernel: str, blocks: int, arguments: Sequence[Any], stream: Any) -> None:
        """Starts `blocks` blocks of THREADS threads on torch's `stream`.

        `arguments` are ctypes objects. Raises HeteroError if the kernel cannot be started.
        """
        if blocks == 0:
            return
        pointers = (c_void_p * len(arguments))(*(ctypes.addressof(one) for one in arguments))
        shape = (blocks, 1, 1, THREADS, 1, 1, 0)
        handle = c_void_p(stream.cuda_stream)
        with _in_context(self._context):
            if kernel not in self._functions:
                name, function = kernel.encode(), c_void_p()
                found = self._driver.cuModuleGetFunction(byref(function), self._module, name)
                _check(found, kernel)
                self._functions[kernel] = function
            launched = self._driver.cuLaunchKernel(
                self._functions[kernel], *shape, handle, pointers, None
            )
            _check(launched, f"launching {kernel} with {blocks} blocks")

    def close(self) -> None:
        """Unloads them; none of them is running. Idempotent."""
        if self._module.value is None:
            return
        with suppress(HeteroError), _in_context(self._context):
            self._driver.cuModuleUnload(self._module)
        self._module = c_void_p()
        self._functions.clear()


@contextmanager
def _in_context(context: c_void_p) -> Iterator[None]:
    """The device's context is the thread's current one inside the block, and no longer."""
    _check(_driver().cuCtxPushCurrent_v2(context), "context")
    try:
        yield
    finally:
        _driver().cuCtxPopCurrent_v2(byref(c_void_p()))


def create_stream(index: int) -> int:
    """The driver's handle of a new stream of device `index`. Raises HeteroError."""
    handle = c_void_p()
    with _in_context(c_void_p(primary_context(index))):
        _check(_driver().cuStreamCreate(byref(handle), _NON_BLOCKING), "creating a stream")
    return handle.value or 0


@cache
def compile_kernels(kind: UpdateKind, capability: tuple[int, int], ptx: bool = False) -> bytes:
    """Machine code for a GPU of compute capability `capability`, as CudaModule says.

    `ptx`: the text of which machine code is made. Raises HeteroError.
    """
    sources = cuda_sources()
    options = (
        f"--gpu-architecture={'compute' if ptx else 'sm'}_{capability[0]}{capability[1]}",
        "--std=c++20",
        # The CPU's templates carry no annotations.
        "--device-as-default-execution-space",
        # The bits are to be the CPU's.
        "--fmad=false",
        "--ftz=false",
        "--prec-div=true",
        "--prec-sqrt=true",
        f"-DHETERO_KIND={hash(kind)}",
    )
    source = sources.pop("update.cu")
    return Nvrtc.find().compile(source, "hetero's update", sources, options, ptx)


def driver_functions(names: Sequence[str]) -> dict[str, int]:
    """The addresses of the driver's functions. Raises AttributeError if it lacks one."""
    driver = _driver()
    return {name: ctypes.cast(getattr(driver, name), c_void_p).value or 0 for name in names}


@cache
def primary_context(index: int) -> int:
    """The driver's handle of torch's context on device `index`; kept for the process's life.

    Raises HeteroError.
    """
    context = c_void_p()
    _check(_driver().cuDevicePrimaryCtxRetain(byref(context), index), "context")
    return context.value or 0


@cache
def pci_device(index: int) -> str:
    """Device `index` as PCI names it: "0000:3B:00.0". Raises HeteroError."""
    name = ctypes.create_string_buffer(32)
    _check(_driver().cuDeviceGetPCIBusId(name, len(name), index), "PCI address")
    return name.value.decode()


def _check(result: int, what: str) -> None:
    """Raises HeteroError, with the driver's words, if `result` is an error's number."""
    if result:
        text = c_char_p()
        _driver().cuGetErrorString(result, byref(text))
        words = text.value.decode() if text.value else "unknown"
        raise HeteroError(f"CUDA failed at {what}: {words} (error {result})")


@cache
def _driver() -> ctypes.CDLL:
    return load_library("libcuda.so.1", _PROTOTYPES)
