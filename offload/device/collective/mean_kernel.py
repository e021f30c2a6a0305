"""Means of what ranks have sent, by a kernel of the device."""

from __future__ import annotations

import ctypes
from ctypes import c_uint32, c_uint64, c_void_p
from typing import TYPE_CHECKING

import torch

from offload.device.cuda_module import THREADS, CudaModule

if TYPE_CHECKING:
    from offload.device.cuda_runtime import CudaRuntime

# As native/update/update_kind.h numbers them.
_NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class _Parts(ctypes.Structure):
    """As native/update/cuda/mean.cu has it."""

    _fields_ = (
        ("first", c_void_p),
        ("target", c_void_p),
        ("numel", c_uint64),
        ("count", c_uint32),
        ("dtype", c_uint32),
        ("divisor", c_uint32),
        ("unused", c_uint32),
    )


class MeanKernel:
    """The mean of several arrays, with the bits of _native.mean()."""

    def __init__(self, runtime: CudaRuntime) -> None:
        """Compiles the kernel. Raises HeteroError."""
        self._runtime = runtime
        self._made: CudaModule = runtime.kernels(None)

    def launch(self, parts: torch.Tensor, divisor: int, target: torch.Tensor) -> None:
        """Starts adding up parts, divided by `divisor`, in the current stream.

        All is flat, on the device and of one dtype. `parts` has one or more, of as many elements as
        `target`, which may be the first one.
        """
        numel = target.numel()
        first, count = parts.data_ptr(), len(parts) // numel
        number = _NUMBERS[parts.dtype]
        argument = _Parts(first, target.data_ptr(), numel, count, number, divisor, 0)
        blocks = -(-numel // THREADS)
        self._made.launch("hetero_mean", blocks, [argument], self._runtime.current_stream())

    def close(self) -> None:
        """Unloads the kernel, which is not running; idempotent."""
        self._made.close()
