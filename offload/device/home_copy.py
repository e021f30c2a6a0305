"""Copies of whole homes between DEVICE and RAM or the file, through two buffers in RAM."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch

from offload.device.backend import Backend
from offload.device.grad_offload import BUFFERS
from offload.disk.backing import FileTransfers
from offload.memory.arena import HostArena
from offload.memory.operation import Operation

# Starts moving bytes [first, first + len(buffer)) of a home to the buffer or from it. None: it is
# done already.
_Part = Callable[[int, torch.Tensor], Operation | None]


class HomeCopier:
    """Copies through buffers in RAM, one of which is filled while another is emptied.

    Homes in RAM need not be page-locked, so copies between them and DEVICE use the buffers, too.
    All calls return when the copy is done; meanwhile the caller keeps others from using the buffers
    and what is copied. All tensors are flat bytes. Calls raise an OSError if a transfer fails;
    nothing is under way then.
    """

    def __init__(self, backend: Backend, buffers: HostArena, file: FileTransfers) -> None:
        """`buffers` has BUFFERS slots, of whole pages."""
        self._backend = backend
        self._buffers = buffers
        self._file = file

    def to_ram(self, source: torch.Tensor, to: torch.Tensor) -> None:
        """Copies `source`, on DEVICE, to `to`, in RAM."""

        def put(first: int, buffer: torch.Tensor) -> None:
            to[first : first + len(buffer)] = buffer

        self._run(len(source), self._from_device(source), put)

    def to_file(self, source: torch.Tensor, offset: int) -> None:
        """Writes `source`, on DEVICE, to the file from byte `offset` on; whole pages."""

        def write(first: int, buffer: torch.Tensor) -> Operation:
            return self._file.write(buffer.data_ptr(), len(buffer), offset + first)

        self._run(len(source), self._from_device(source), write)

    def from_ram(self, source: torch.Tensor, to: torch.Tensor) -> None:
        """Copies `source`, in RAM, to `to`, on DEVICE."""

        def get(first: int, buffer: torch.Tensor) -> None:
            buffer.copy_(source[first : first + len(buffer)])

        self._run(len(to), get, self._to_device(to))

    def from_file(self, offset: int, to: torch.Tensor) -> None:
        """Reads the file from byte `offset` on to `to`, on DEVICE; whole pages."""

        def read(first: int, buffer: torch.Tensor) -> Operation:
            return self._file.read(buffer.data_ptr(), len(buffer), offset + first)

        self._run(len(to), read, self._to_device(to))

    def _from_device(self, source: torch.Tensor) -> _Part:
        return lambda first, buffer: self._backend.grad_offload(
            buffer, source[first : first + len(buffer)]
        )

    def _to_device(self, to: torch.Tensor) -> _Part:
        return lambda first, buffer: self._backend.fetch(to[first : first + len(buffer)], buffer)

    def _run(self, nbytes: int, fill: _Part, empty: _Part) -> None:
        """Fills a buffer with each part, and empties it once it is full."""
        length = self._buffers.slot_bytes
        filling: dict[int, tuple[int, torch.Tensor, Operation | None]] = {}  # by buffer
        emptying: dict[int, Operation | None] = {}

        def start_emptying(number: int) -> None:
            """Waits until the buffer is full, if it is being filled, and starts emptying it."""
            if number in filling:
                first, buffer, op = filling[number]
                _wait(op)
                del filling[number]
                emptying[number] = empty(first, buffer)

        try:
            for count, first in enumerate(range(0, nbytes, length)):
                number = count % BUFFERS
                _wait(emptying.pop(number, None))
                buffer = self._buffers.view(number, 1, torch.uint8)[: min(length, nbytes - first)]
                filling[number] = first, buffer, fill(first, buffer)
                start_emptying((count + 1) % BUFFERS)  # the one before, while this one is filled
            for number in list(filling):
                start_emptying(number)
            for op in emptying.values():
                _wait(op)
        except BaseException:
            for op in (*emptying.values(), *(op for _, _, op in filling.values())):
                with suppress(Exception):
                    _wait(op)  # its memory gets another use
            self._backend.synchronize()  # a copy whose handle KeyboardInterrupt has lost
            raise


def _wait(op: Operation | None) -> None:
    if op is not None:
        op.wait()
