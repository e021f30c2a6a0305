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
    """Updates state whose home is on the device, with the bits of the CPU's kernels.

    It does not wait for the device: work that the caller gives to it afterwards comes after it."""

    def prepare(self) -> None:
        """Compiles the kernels, unless that was done. Raises HeteroError if that fails."""

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
        """As _native.join_master(), of flat tensors on the device."""


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

    @property
    def link_busy_s(self) -> tuple[float, float]:
        """Seconds for which something was copied to DEVICE, and to HOST; 0 where nobody counts."""

    def arena(self, slots: int, slot_bytes: int, ledger: Ledger, account: Account) -> HostArena:
        """An arena where compute happens; its slots are charged to the tier of that memory."""

    def host_arena(
        self, slots: int, slot_bytes: int, ledger: Ledger, account: Account
    ) -> HostArena:
        """An arena in RAM that copies to the device and from it are fast with."""

    def record_event(self) -> Any:
        """An event that comes when the device has done all that the caller has given to it so far.

        None if that is done when the caller's call returns."""

    def fetch(self, to: torch.Tensor, source: torch.Tensor) -> Operation:
        """Starts copying `source`, in RAM, to `to`, on the device: flat, of the same bytes.

        Both are kept until the copy is done. wait() raises an OSError if it failed.
        """

    def grad_offload(self, to: torch.Tensor, source: torch.Tensor, after: Any = None) -> Operation:
        """Starts copying `source`, on the device, to `to`, in RAM; otherwise as fetch().

        `after` is the event after which `source` is computed, of record_event(); by default, an
        event that is recorded now.
        """

    def updater(self, kind: UpdateKind, tile_numel: int) -> Updater | None:
        """The updater of homes on DEVICE, of tiles of `tile_numel` elements; None: the CPU's."""

    def synchronize(self) -> None:
        """Until the device has done all work that any thread gave to it."""

    def device_bytes(self) -> int | None:
        """Bytes of memory of the device, used or not; None if that is not known."""

    def beside_bytes(self) -> int:
        """The most memory of the device that was used beside arenas since reset_beside().

        0 if that is not known."""

    def reset_beside(self) -> None:
        """Restarts the measurement of beside_bytes()."""

    def trim(self) -> None:
        """Frees the device's memory that libraries keep and do not use."""

    def close(self) -> None:
        """Abandons copies under way; idempotent."""


class _OnTheCpu:
    """The common part of backends that compute on the CPU: work is done when a call returns."""

    device = torch.device("cpu")
    in_order = False

    def __init__(self) -> None:
        self.notes: list[str] = []

    def host_arena(
        self, slots: int, slot_bytes: int, ledger: Ledger, account: Account
    ) -> HostArena:
        """As Backend."""
        return HostArena(slots, slot_bytes, ledger, account)

    def record_event(self) -> None:
        """No event: the CPU's work is done when a call returns."""

    def updater(self, kind: UpdateKind, tile_numel: int) -> None:
        """None: the CPU updates what is on DEVICE."""

    def synchronize(self) -> None:
        """Nothing: the CPU's work is done when a call returns."""

    def device_bytes(self) -> None:
        """Not known."""

    def beside_bytes(self) -> int:
        """Not known."""
        return 0

    def reset_beside(self) -> None:
        """Nothing: beside_bytes() is not known."""

    def trim(self) -> None:
        """Nothing: no library keeps memory."""


class CpuBackend(_OnTheCpu):
    """Computes in RAM: DEVICE and HOST are the same memory, and nothing is copied."""

    kind = "cpu"
    separate = False
    h2d_bytes = 0
    d2h_bytes = 0
    link_busy_s = (0.0, 0.0)

    def arena(self, slots: int, slot_bytes: int, ledger: Ledger, account: Account) -> HostArena:
        """Host memory."""
        return HostArena(slots, slot_bytes, ledger, account)

    def fetch(self, to: torch.Tensor, source: torch.Tensor) -> Operation:
        """Not used: DEVICE and HOST are the same memory."""
        raise AssertionError("what is in RAM is where the CPU computes")

    def grad_offload(self, to: torch.Tensor, source: torch.Tensor, after: Any = None) -> Operation:
        """Not used: DEVICE and HOST are the same memory."""
        return self.fetch(to, source)

    def close(self) -> None:
        """Nothing to do."""


class EmulatedBackend(_OnTheCpu):
    """Computes on the CPU as if it had memory of its own, behind a link of a given bandwidth.

    So the budget of a device, its copies and their overlap can be tested without one. The copies
    take the CPU's time and memory bandwidth, too.
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

    @property
    def link_busy_s(self) -> tuple[float, float]:
        """Seconds for which something was copied to DEVICE, and to HOST."""
        stats = self.link.stats
        return stats["h2d_busy_s"], stats["d2h_busy_s"]

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
    """A copy over the link, which keeps its tensors until it is done."""

    def __init__(self, op: LinkOp, *tensors: torch.Tensor) -> None:
        self._op = op
        self._tensors = tensors

    def done(self) -> bool:
        """Whether it is done or has failed."""
        return self._op.done()

    def wait(self) -> None:
        """Until it is done. Raises NativeLinkError."""
        try:
            self._op.wait()
        finally:
            self._tensors = ()

    def cancel(self) -> None:
        """Copies nothing more."""
        self._op.cancel()
