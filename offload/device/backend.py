"""Where compute happens, and how bytes come there from RAM and go back.

A backend is `separate` if its DEVICE is not HOST: compute then uses copies of parameters in an
arena of DEVICE memory, and gradients are copied to RAM.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from offload._native import Hyper, Link, LinkOp, UpdateKind
from offload.memory.arena import HostArena
from offload.memory.ledger import Ledger
from offload.memory.operation import Operation
from offload.memory.tiers import Account, Tier

Direction = Literal["h2d", "d2h"]


@dataclass(frozen=True)
class DeviceTask:
    """One tile's update: addresses on the device, and segments as StepTask has them."""

    param: int
    grad: int
    optim_state: int
    segments: Sequence[tuple[int, int, int, int]]


class Updater(Protocol):
    """Does on the device what the CPU's kernels cannot, with the same bits. It waits for nothing:
    what the caller gives to the device afterwards comes after it."""

    def prepare(self) -> None:
        """Does what takes long and is done but once. Raises HeteroError if it cannot work."""

    def update(self, tasks: Sequence[DeviceTask], hypers: Sequence[Hyper]) -> None:
        """Starts all updates."""

    def sums_of_squares(self, arrays: Sequence[tuple[int, int]]) -> list[float]:
        """Of each (address, numel) in the gradients' dtype; waits, because numbers are wanted."""

    def split(
        self,
        values: torch.Tensor,
        param: torch.Tensor,
        remainder: torch.Tensor,
        carrier: torch.Tensor,
    ) -> None:
        """As _native.split_master(), of flat tensors on the device."""

    def join(
        self,
        param: torch.Tensor,
        remainder: torch.Tensor,
        carrier: torch.Tensor,
        target: torch.Tensor,
    ) -> None:
        """As _native.join_master(), likewise."""


class Backend(Protocol):
    """A compute device and the link to it. Any thread may use it."""

    kind: str
    device: torch.device
    separate: bool  # DEVICE is not HOST
    in_order: bool  # the device does later what it is given, and waits for copies by itself
    notes: list[str]  # what the user should know

    @property
    def h2d_bytes(self) -> int:
        """Copied from HOST to DEVICE so far."""

    @property
    def d2h_bytes(self) -> int:
        """Copied from DEVICE to HOST so far."""

    def arena(self, slots: int, slot_bytes: int, ledger: Ledger, account: Account) -> HostArena:
        """Memory where compute happens, charged to its tier slot by slot."""

    def host_arena(
        self, slots: int, slot_bytes: int, ledger: Ledger, account: Account
    ) -> HostArena:
        """RAM that is copied to the device, or from it."""

    def mark(self) -> Any:
        """The moment when all is done that the caller has given to the device so far."""

    def fetch(self, to: torch.Tensor, source: torch.Tensor) -> Operation:
        """Starts copying `source`, in RAM, to `to`, on the device: flat, of the same bytes.

        Both are kept until the copy is done. wait() raises an OSError if it failed.
        """

    def grad_offload(self, to: torch.Tensor, source: torch.Tensor, after: Any = None) -> Operation:
        """Starts copying `source`, on the device, to `to`, in RAM, likewise.

        `after` is when `source` is computed, as mark() gave it; by default: what is given by now.
        """

    def updater(self, kind: UpdateKind, tile_numel: int) -> Updater | None:
        """What updates homes on DEVICE, of tiles of `piece_numel`; None: the CPU can."""

    def settle(self) -> None:
        """Until the device has done all that it was given, by whomever."""

    def device_bytes(self) -> int | None:
        """All that the device has; None: nothing says."""

    def beside_bytes(self) -> int:
        """The most that was taken on the device beside arenas, since reset_beside(); 0: no idea."""

    def reset_beside(self) -> None:
        """Begins to measure anew."""

    def trim(self) -> None:
        """What libraries keep of the device's memory, and do not use, is free again."""

    def close(self) -> None:
        """Abandons copies under way; idempotent."""


class _OnTheCpu:
    """What is alike wherever the CPU computes: its work is done when a call returns."""

    device = torch.device("cpu")
    in_order = False

    def __init__(self) -> None:
        self.notes: list[str] = []

    def host_arena(
        self, slots: int, slot_bytes: int, ledger: Ledger, account: Account
    ) -> HostArena:
        """As Backend."""
        return HostArena(slots, slot_bytes, ledger, account)

    def mark(self) -> None:
        """It is over."""

    def updater(self, kind: UpdateKind, tile_numel: int) -> None:
        """The CPU can."""

    def settle(self) -> None:
        """Who gave it has waited for it."""

    def device_bytes(self) -> None:
        """Nothing says."""

    def beside_bytes(self) -> int:
        """Nothing says."""
        return 0

    def reset_beside(self) -> None:
        """Nothing to measure."""

    def trim(self) -> None:
        """Nothing is kept."""


class CpuBackend(_OnTheCpu):
    """Computes in RAM: DEVICE and HOST are the same memory, and nothing is copied."""

    kind = "cpu"
    separate = False
    h2d_bytes = 0
    d2h_bytes = 0

    def arena(self, slots: int, slot_bytes: int, ledger: Ledger, account: Account) -> HostArena:
        """Host memory."""
        return HostArena(slots, slot_bytes, ledger, account)

    def fetch(self, to: torch.Tensor, source: torch.Tensor) -> Operation:
        """Never."""
        raise AssertionError("what is in RAM is where the CPU computes")

    def grad_offload(self, to: torch.Tensor, source: torch.Tensor, after: Any = None) -> Operation:
        """Never."""
        return self.fetch(to, source)

    def close(self) -> None:
        """Nothing to do."""


class EmulatedBackend(_OnTheCpu):
    """Computes on the CPU as if it had memory of its own, behind a link of a given bandwidth.

    So all that a device brings, its budget, copies and their overlap, runs without one. The copies
    take the CPU's own time and memory bandwidth, too.
    """

    kind = "emulated"
    separate = True

    def __init__(self, bytes_per_s: float) -> None:
        """`bytes_per_s`: of each direction. Raises ValueError for less than 1000."""
        super().__init__()
        self.link = Link(bytes_per_s, bytes_per_s)
        self._lock = threading.Lock()
        self._under_way: dict[Direction, deque[_Copy]] = {"h2d": deque(), "d2h": deque()}

    @property
    def h2d_bytes(self) -> int:
        """Copied from HOST to DEVICE so far."""
        return int(self.link.stats["h2d_bytes"])

    @property
    def d2h_bytes(self) -> int:
        """Copied from DEVICE to HOST so far."""
        return int(self.link.stats["d2h_bytes"])

    def arena(self, slots: int, slot_bytes: int, ledger: Ledger, account: Account) -> HostArena:
        """Host memory that counts as the device's."""
        return HostArena(slots, slot_bytes, ledger, account, Tier.DEVICE)

    def fetch(self, to: torch.Tensor, source: torch.Tensor) -> Operation:
        """Starts copying from RAM to the device."""
        return self._copy("h2d", to, source)

    def grad_offload(self, to: torch.Tensor, source: torch.Tensor, after: Any = None) -> Operation:
        """Starts copying from the device to RAM."""
        return self._copy("d2h", to, source)

    def _copy(self, direction: Direction, to: torch.Tensor, source: torch.Tensor) -> _Copy:
        assert to.is_contiguous()
        assert source.is_contiguous()
        assert to.nbytes == source.nbytes, (to.nbytes, source.nbytes)
        with self._lock:
            under_way = self._under_way[direction]
            while under_way and under_way[0].done():
                under_way.popleft()
            op = self.link.copy(direction, to.data_ptr(), source.data_ptr(), to.nbytes)
            copy = _Copy(op, to, source)
            under_way.append(copy)
        return copy

    def close(self) -> None:
        """Abandons copies under way; idempotent."""
        self.link.close()
        for under_way in self._under_way.values():
            under_way.clear()


class _Copy:
    """A copy over the link, and what it needs."""

    def __init__(self, op: LinkOp, *tensors: torch.Tensor) -> None:
        self._op = op
        self._tensors = tensors

    def done(self) -> bool:
        """Whether it has come to its end, good or bad."""
        return self._op.done()

    def wait(self) -> None:
        """Until it is done. Raises NativeLinkError."""
        try:
            self._op.wait()
        finally:
            self._tensors = ()

    def cancel(self) -> None:
        """Drops what is not copied yet."""
        self._op.cancel()
