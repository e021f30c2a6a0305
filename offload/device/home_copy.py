"""Copies of whole homes between DEVICE and RAM or the file, through buffers in RAM."""

from __future__ import annotations

from collections.abc import Callable

import torch

from offload.cache.slot_cache import FileTransfers
from offload.device.backend import Backend
from offload.memory.arena import HostArena
from offload.memory.operation import Operation, wait_quietly

# Starts moving a part of a home to a buffer, or from it. None: it is done already.
_Move = Callable[[slice, torch.Tensor], Operation | None]


class HomeCopier:
    """Copies through buffers in RAM, half of which are filled while the others are emptied.

    Homes in RAM need not be page-locked, so copies between them and DEVICE use the buffers, too.
    All calls return when the copy is done; meanwhile the caller keeps others from using the buffers
    and what is copied. All tensors are flat bytes. Calls raise an OSError if a transfer fails;
    nothing is under way then.
    """

    def __init__(self, backend: Backend, buffers: HostArena, file: FileTransfers) -> None:
        """`buffers` has two slots or more, of whole pages."""
        self._backend = backend
        self._buffers = buffers
        self._file = file

    def to_ram(self, source: torch.Tensor, to: torch.Tensor) -> None:
        """Copies `source`, on DEVICE, to `to`, in RAM."""
        self._run(
            len(source), self._from_device(source), lambda part, buffer: _copy(to[part], buffer)
        )

    def to_file(self, source: torch.Tensor, offset: int) -> None:
        """Writes `source`, on DEVICE, to the file from byte `offset` on; whole pages."""

        def write(part: slice, buffer: torch.Tensor) -> Operation:
            return self._file.write(buffer.data_ptr(), len(buffer), offset + part.start)

        self._run(len(source), self._from_device(source), write)

    def from_ram(self, source: torch.Tensor, to: torch.Tensor) -> None:
        """Copies `source`, in RAM, to `to`, on DEVICE."""
        self._run(len(to), lambda part, buffer: _copy(buffer, source[part]), self._to_device(to))

    def from_file(self, offset: int, to: torch.Tensor) -> None:
        """Reads the file from byte `offset` on to `to`, on DEVICE; whole pages."""

        def read(part: slice, buffer: torch.Tensor) -> Operation:
            return self._file.read(buffer.data_ptr(), len(buffer), offset + part.start)

        self._run(len(to), read, self._to_device(to))

    def _from_device(self, source: torch.Tensor) -> _Move:
        return lambda part, buffer: self._backend.to_ram(buffer, source[part])

    def _to_device(self, to: torch.Tensor) -> _Move:
        return lambda part, buffer: self._backend.fetch(to[part], buffer)

    def _run(self, nbytes: int, fill: _Move, empty: _Move) -> None:
        """Fills a buffer with each part, and empties it while others are filled."""
        length, buffers = self._buffers.slot_bytes, self._buffers.slots
        parts = [slice(at, min(at + length, nbytes)) for at in range(0, nbytes, length)]
        fills: list[Operation | None] = []
        empties: list[Operation | None] = []

        def buffer(number: int) -> torch.Tensor:
            part = parts[number]
            whole = self._buffers.view(number % buffers, 1, torch.uint8)
            return whole[: part.stop - part.start]

        try:
            for number in range(len(parts) + buffers):
                if number >= buffers:
                    _wait(empties[number - buffers])
                if number < len(parts):
                    fills.append(fill(parts[number], buffer(number)))
                filled = number - buffers // 2
                if 0 <= filled < len(parts):
                    _wait(fills[filled])
                    empties.append(empty(parts[filled], buffer(filled)))
        except Exception:
            for op in (*empties, *fills):
                wait_quietly(op)  # its memory gets another use
            raise


def _copy(to: torch.Tensor, source: torch.Tensor) -> None:
    to.copy_(source)


def _wait(op: Operation | None) -> None:
    if op is not None:
        op.wait()
