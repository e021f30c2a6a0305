"""Updates of what is at home on DEVICE, by kernels there."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from ctypes import c_char, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from offload._native import Hyper, UpdateKind, update_constants
from offload.device.cuda_module import THREADS, CudaModule

if TYPE_CHECKING:
    from offload.device.cuda_runtime import CudaRuntime

# As native/update/cuda/update.cu has them.
_GROUP = 4
_STATE_BLOCK_NUMEL = 64
_MOST_SEGMENTS = 64
_MOST_CONSTANTS = 16
_CONSTANTS_BYTES = 64
_LANES = 32
_SUM_NUMEL = 32 * 1024


def _struct(**fields: Any) -> Any:
    return type("_Struct", (ctypes.Structure,), {"_fields_": tuple(fields.items())})


_Segment = _struct(
    first=c_uint64, numel=c_uint64, index=c_uint64, constants=c_uint32, first_block=c_uint32
)
_Batch = _struct(
    param=c_void_p,
    grad=c_void_p,
    master=c_void_p,
    states=c_void_p * 2,
    segments=c_uint64,
    segment=_Segment * _MOST_SEGMENTS,
    constants=c_char * (_CONSTANTS_BYTES * _MOST_CONSTANTS),
)
_SumSegment = _struct(values=c_void_p, numel=c_uint64, first_block=c_uint32, first_out=c_uint32)
_SumBatch = _struct(lanes=c_void_p, segments=c_uint64, segment=_SumSegment * _MOST_SEGMENTS)
_SplitArrays = _struct(param=c_void_p, remainder=c_void_p, carrier=c_void_p)


def _split_arrays(
    param: torch.Tensor, remainder: torch.Tensor, carrier: torch.Tensor | None
) -> Any:
    address = None if carrier is None else carrier.data_ptr()
    return _SplitArrays(param.data_ptr(), remainder.data_ptr(), address)


@dataclass(frozen=True)
class DeviceTask:
    """One tile's update: addresses on the device, and segments as StepTask has them."""

    param: int
    grad: int
    optim_state: int
    segments: Sequence[tuple[int, int, int, int]]


class Updater:
    """One kind's update, sums of squares and split, on the device, in the stream of compute.

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
        # Elements that a thread updates: a state block, or as many as it reads at once.
        self._thread_numel = _STATE_BLOCK_NUMEL if kind.state_dtype == "8bit" else _GROUP

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
        """Starts all updates."""
        if not tasks:
            return
        constants = [update_constants(self._kind, hyper) for hyper in hypers]
        stream = self._runtime.current_stream()
        for task in tasks:
            for segments in _batches(task.segments):
                self._launch(task, segments, constants, stream)

    def _launch(
        self,
        task: DeviceTask,
        segments: Sequence[tuple[int, int, int, int]],
        constants: Sequence[bytes],
        stream: object,
    ) -> None:
        batch = _Batch()
        batch.param, batch.grad = task.param, task.grad
        batch.master = task.optim_state if self._has_master else None
        for i, at in enumerate(self._state_at):
            batch.states[i] = task.optim_state + at
        number_of: dict[int, int] = {}
        blocks = 0
        for i, (first, numel, hyper, index) in enumerate(segments):
            number = number_of.setdefault(hyper, len(number_of))
            batch.segment[i] = _Segment(first, numel, index, number, blocks)
            blocks += -(-numel // (THREADS * self._thread_numel))
        batch.segments = len(segments)
        packed = b"".join(constants[hyper] for hyper in number_of)
        ctypes.memmove(ctypes.addressof(batch) + _Batch.constants.offset, packed, len(packed))
        self.prepare().launch("hetero_update", blocks, [batch], stream)

    def sums_of_squares(self, arrays: Sequence[tuple[int, int]]) -> list[float]:
        """Of each (address, numel) in the gradients' dtype, as the CPU sums them.

        Waits for the device: its numbers are wanted.
        """
        stream = self._runtime.current_stream()
        totals = self._runtime.empty(8 * max(1, len(arrays))).view(torch.float64)
        for begin in range(0, len(arrays), _MOST_SEGMENTS):
            some = arrays[begin : begin + _MOST_SEGMENTS]
            batch = _SumBatch()
            together = THREADS // _LANES
            launched = out = 0
            for i, (address, numel) in enumerate(some):
                batch.segment[i] = _SumSegment(address, numel, launched, out)
                count = -(-numel // _SUM_NUMEL)
                launched += max(1, -(-count // together))
                out += count
            batch.segments = len(some)
            lanes = self._runtime.empty(8 * _LANES * max(1, out))
            batch.lanes = lanes.data_ptr()
            self.prepare().launch("hetero_lanes", launched, [batch], stream)
            tree = [c_void_p(lanes.data_ptr()), c_uint64(out)]
            self.prepare().launch("hetero_tree", -(-out // THREADS), tree, stream)
            total = [batch, c_void_p(totals.data_ptr() + 8 * begin)]
            self.prepare().launch("hetero_total", 1, total, stream)
        return [float(value) for value in totals[: len(arrays)].tolist()]

    def split(
        self,
        values: torch.Tensor,
        param: torch.Tensor,
        remainder: torch.Tensor,
        carrier: torch.Tensor | None,
    ) -> None:
        """As _native.split_master(), of flat tensors on the device."""
        at = _split_arrays(param, remainder, carrier)
        arguments = [c_void_p(values.data_ptr()), at, c_uint64(values.numel())]
        self._one_each("hetero_split", values.numel(), arguments)

    def join(
        self,
        param: torch.Tensor,
        remainder: torch.Tensor,
        carrier: torch.Tensor | None,
        target: torch.Tensor,
    ) -> None:
        """As _native.join_master(), of flat tensors on the device."""
        at = _split_arrays(param, remainder, carrier)
        arguments = [at, c_void_p(target.data_ptr()), c_uint64(target.numel())]
        self._one_each("hetero_join", target.numel(), arguments)

    def _one_each(self, kernel: str, numel: int, arguments: Sequence[object]) -> None:
        blocks = -(-numel // THREADS)
        self.prepare().launch(kernel, blocks, arguments, self._runtime.current_stream())


def _batches(
    segments: Sequence[tuple[int, int, int, int]],
) -> Iterator[list[tuple[int, int, int, int]]]:
    """As many at a time as one launch can have, of segments and of their hyper-parameters."""
    batch: list[tuple[int, int, int, int]] = []
    hypers: set[int] = set()
    for segment in segments:
        hypers.add(segment[2])
        if len(batch) == _MOST_SEGMENTS or len(hypers) > _MOST_CONSTANTS:
            yield batch
            batch, hypers = [], {segment[2]}
        batch.append(segment)
    if batch:
        yield batch
