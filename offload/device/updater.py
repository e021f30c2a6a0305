"""Updates of what is at home on DEVICE, by kernels there."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from ctypes import c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from offload._native import Hyper, UpdateKind, update_constants
from offload.device.cuda_module import THREADS, CudaModule

if TYPE_CHECKING:
    from offload.device.cuda_runtime import CudaRuntime

# As native/update/cuda has them.
_THREAD_NUMEL = 4  # elements that a thread has
_LANES = 32
_SUM_NUMEL = 32 * 1024


def _struct(**fields: Any) -> Any:
    return type("_Struct", (ctypes.Structure,), {"_fields_": tuple(fields.items())})


_Arrays = _struct(param=c_void_p, grad=c_void_p, master=c_void_p, states=c_void_p * 2)
_Segment = _struct(
    first=c_uint64,
    numel=c_uint64,
    index=c_uint64,
    constants=c_uint32,
    tile=c_uint32,
    first_block=c_uint32,
    unused=c_uint32,
)
_Batch = _struct(tiles=c_void_p, constants=c_void_p, segment=c_void_p, segments=c_uint64)
_SumSegment = _struct(values=c_void_p, numel=c_uint64, first_block=c_uint32, first_out=c_uint32)
_SumBatch = _struct(lanes=c_void_p, segment=c_void_p, segments=c_uint64)


def _blocks(numel: int) -> int:
    """Blocks of threads for so many elements."""
    return -(-numel // (THREADS * _THREAD_NUMEL))


@dataclass(frozen=True)
class DeviceTask:
    """One tile's update: addresses on the device, and segments as StepTask has them."""

    param: int
    grad: int
    optim_state: int
    segments: Sequence[tuple[int, int, int, int]]


class Updater:
    """One kind's update and sums of squares, on the device, in the stream of compute.

    It does not wait for the device: what the caller gives to it afterwards comes after it. The bits
    are those of the CPU's kernels. Optimizer states are laid out as docs/formats.md says.
    """

    def __init__(self, runtime: CudaRuntime, kind: UpdateKind, tile_numel: int) -> None:
        """The kernels are compiled when they are first needed, or by prepare()."""
        self._runtime = runtime
        self._kind = kind
        self._made: CudaModule | None = None
        self._state_at = [kind.state_at(i, tile_numel) for i in range(kind.states)]
        self._has_master = self._state_at[0] > 0

    def prepare(self) -> CudaModule:
        """The kernels, which are compiled unless that was done. Raises HeteroError."""
        if self._made is None:
            self._made = self._runtime.kernels(self._kind)
        return self._made

    def close(self) -> None:
        """Unloads the kernels, of which none is running; idempotent."""
        if self._made is not None:
            self._made.close()
            self._made = None

    def update(self, tasks: Sequence[DeviceTask], hypers: Sequence[Hyper]) -> None:
        """Starts all updates, in one launch."""
        segments, blocks = [], 0
        for tile, task in enumerate(tasks):
            for first, numel, hyper, index in task.segments:
                segments.append((first, numel, index, hyper, tile, blocks, 0))
                blocks += _blocks(numel)
        if not segments:
            return
        arrays = [self._arrays(task) for task in tasks]
        constants = b"".join(update_constants(self._kind, hyper) for hyper in hypers)
        tables = (
            bytes((_Arrays * len(arrays))(*arrays)),
            constants,
            bytes((_Segment * len(segments))(*segments)),
        )
        # (The memory may go before the launch comes: what gets it next is in the same stream.)
        memory = self._runtime.upload(b"".join(tables))
        at = list(itertools.accumulate((len(table) for table in tables), initial=memory.data_ptr()))
        batch = _Batch(*at[: len(tables)], len(segments))
        stream = self._runtime.current_stream()
        self.prepare().launch("hetero_update", blocks, [batch], stream)

    def _arrays(self, task: DeviceTask) -> tuple[int, int, int | None, tuple[int, ...]]:
        master = task.optim_state if self._has_master else None
        states = tuple(task.optim_state + at for at in self._state_at)
        return task.param, task.grad, master, states

    def sums_of_squares(self, arrays: Sequence[tuple[int, int]]) -> list[float]:
        """Of each (address, numel) in the gradients' dtype, as the CPU sums them.

        Waits for the device: its numbers are wanted.
        """
        if not arrays:
            return []
        segments, launched, out = [], 0, 0
        for address, numel in arrays:
            segments.append((address, numel, launched, out))
            count = -(-numel // _SUM_NUMEL)
            launched += max(1, -(-count // (THREADS // _LANES)))
            out += count
        stream = self._runtime.current_stream()
        table = self._runtime.upload(bytes((_SumSegment * len(segments))(*segments)))
        lanes = self._runtime.empty(8 * _LANES * max(1, out))
        totals = self._runtime.empty(8 * len(arrays)).view(torch.float64)
        batch = _SumBatch(lanes.data_ptr(), table.data_ptr(), len(segments))
        kernels = self.prepare()
        kernels.launch("hetero_lanes", launched, [batch], stream)
        tree = [c_void_p(lanes.data_ptr()), c_uint64(out)]
        kernels.launch("hetero_tree", -(-out // THREADS), tree, stream)
        total = [batch, c_void_p(totals.data_ptr())]
        kernels.launch("hetero_total", -(-len(arrays) // THREADS), total, stream)
        return [float(value) for value in totals.tolist()]
