"""Where compute happens, and how bytes come there from RAM and go back.

A backend is `separate` if its DEVICE is not HOST: compute then uses copies of parameters in an
arena of DEVICE memory, and gradients are copied to RAM.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Literal, Protocol

import torch

from offload._native import Link, LinkOp
from offload.arena import HostArena
from offload.backing import Operation
from offload.ledger import Ledger
from offload.tiers import Account, Tier

Direction = Literal["h2d", "d2h"]


class Backend(Protocol):
    """A compute device and the link to it. Any thread may use it."""

    kind: str
    device: torch.device
    separate: bool  # DEVICE is not HOST

    @property
    def h2d_bytes(self) -> int:
        """Copied from HOST to DEVICE so far."""

    @property
    def d2h_bytes(self) -> int:
        """Copied from DEVICE to HOST so far."""

    def arena(self, slots: int, slot_bytes: int, ledger: Ledger, account: Account) -> HostArena:
        """Memory where compute happens, charged to its tier slot by slot."""

    def fetch(self, to: torch.Tensor, source: torch.Tensor) -> Operation:
        """Starts copying `source`, in RAM, to `to`, on the device: flat, of the same bytes.

        Both are kept until the copy is done. wait() raises an OSError if it failed.
        """

    def drain(self, to: torch.Tensor, source: torch.Tensor) -> Operation:
        """Starts copying `source`, on the device, to `to`, in RAM, likewise."""

    def close(self) -> None:
        """Abandons copies under way; idempotent."""


class CpuBackend:
    """Computes in RAM: DEVICE and HOST are the same memory, and nothing is copied."""

    kind = "cpu"
    device = torch.device("cpu")
    separate = False
    h2d_bytes = 0
    d2h_bytes = 0

    def arena(self, slots: int, slot_bytes: int, ledger: Ledger, account: Account) -> HostArena:
        """Host memory."""
        return HostArena(slots, slot_bytes, ledger, account)

    def fetch(self, to: torch.Tensor, source: torch.Tensor) -> Operation:
        """Never."""
        raise AssertionError("what is in RAM is where the CPU computes")

    drain = fetch

    def close(self) -> None:
        """Nothing to do."""


class EmulatedBackend:
    """Computes on the CPU as if it had memory of its own, behind a link of a given bandwidth.

    So all that a device brings, its budget, copies and their overlap, runs without one. The copies
    take the CPU's own time and memory bandwidth, too.
    """

    kind = "emulated"
    device = torch.device("cpu")
    separate = True

    def __init__(self, bytes_per_s: float) -> None:
        """`bytes_per_s`: of each direction. Raises ValueError for less than 1000."""
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

    def drain(self, to: torch.Tensor, source: torch.Tensor) -> Operation:
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
