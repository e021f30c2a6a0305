"""Where compute happens, and how bytes come there from RAM and go back.

A backend is `separate` if its DEVICE is not HOST: compute then uses copies of parameters in an
arena of DEVICE memory, and gradients are copied to RAM.

Copies of the emulated device go past the caches, as a true device's do, so that compute keeps what
it has there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from offload import _native
from offload._native import OffloadQueue, UpdateKind
from offload.device.emulated_link import LinkCopy, LinkWay
from offload.device.updater import Updater
from offload.memory.arena import HostArena
from offload.memory.ledger import Ledger
from offload.memory.operation import Operation, Transfer
from offload.memory.tiers import Account, Tier

if TYPE_CHECKING:
    from offload._native import DtypeName


DTYPE_NAMES: dict[torch.dtype, DtypeName] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}


class Backend:
    """A compute device and the link to it. Any thread may use it.

    What is not overridden is right where the CPU computes: work is done when a call returns.
    """

    kind: str
    separate: bool  # DEVICE is not HOST
    in_order = False  # the device does later what it is given, and waits for copies by itself
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.notes: list[str] = []  # what the user should know

    @property
    def h2d_bytes(self) -> int:
        """Copied from HOST to DEVICE so far."""
        return 0

    @property
    def d2h_bytes(self) -> int:
        """Copied from DEVICE to HOST so far."""
        return 0

    @property
    def link_busy_s(self) -> tuple[float, float]:
        """Seconds for which something was copied to DEVICE, and to HOST; 0 where nobody counts."""
        return 0.0, 0.0

    def arena(self, slots: int, slot_bytes: int, ledger: Ledger, account: Account) -> HostArena:
        """An arena where compute happens; its slots are charged to the tier of that memory.

        Raises BudgetError if a device has no room.
        """
        tier = Tier.DEVICE if self.separate else Tier.HOST
        return HostArena(slots, slot_bytes, ledger, account, tier)

    def host_arena(
        self, slots: int, slot_bytes: int, ledger: Ledger, account: Account
    ) -> HostArena:
        """An arena in RAM that copies to the device and from it are fast with."""
        return HostArena(slots, slot_bytes, ledger, account)

    def record_event(self) -> Any:
        """An event that comes when the device has done all that the caller has given to it so far.

        None if that is done when the caller's call returns."""
        return None

    def current_stream(self) -> Any:
        """What gets the calling thread's work; None where that is done when a call returns."""
        return None

    def lead_threads(self) -> None:
        """What other threads give to the device from now on comes after what this one has given."""

    def fetch(self, to: torch.Tensor, source: torch.Tensor) -> Transfer:
        """Starts copying `source`, in RAM, to `to`, on the device: flat, of the same bytes.

        Both are kept until the copy is done. wait() raises an OSError if it failed.
        """
        raise AssertionError("what is in RAM is where the CPU computes")

    def to_ram(
        self, to: torch.Tensor, source: torch.Tensor, streams: Iterable[Any] | None = None
    ) -> Transfer:
        """Starts copying `source`, on the device, to `to`, in RAM; otherwise as fetch().

        It comes after what was given to `streams`, of current_stream(); by default, to the current
        one.
        """
        raise AssertionError("what is in RAM is where the CPU computes")

    def offload_queue(self, buffers: HostArena) -> OffloadQueue | None:
        """What offload() brings arrays by, through `buffers`, slots in RAM; None: it needs nothing.

        The caller closes it, before the slots and the backend.
        """
        return None

    def offload(
        self,
        queue: OffloadQueue | None,
        to: torch.Tensor,
        source: torch.Tensor,
        add: bool,
        after: Any = None,
    ) -> Operation:
        """Starts bringing `source`, on the device, to `to`, in RAM: flat, of dtypes of DTYPE_NAMES.

        It is converted to the dtype of `to`; `add`: added to what is there. `after` is the event
        after which `source` is computed, of record_event(). The caller keeps all three until that
        is done. wait() raises an OSError if it failed.
        """
        raise AssertionError("what is in RAM is where the CPU computes")

    def collective_device(self) -> str | None:
        """The device's name on this machine, if devices of ranks can gather by themselves."""
        return None

    def updater(self, kind: UpdateKind, tile_numel: int) -> Updater | None:
        """The updater of homes on DEVICE, of tiles of `tile_numel` elements; None: the CPU's."""
        return None

    def check_not_capturing(self) -> None:
        """Raises HeteroError if the caller's work is captured in a graph, for later replays."""

    def synchronize(self) -> None:
        """Until the device has done all work that any thread gave to it."""

    def device_bytes(self) -> int | None:
        """Bytes of memory of the device, used or not; None if that is not known."""
        return None

    def beside_bytes(self) -> int:
        """The most memory of the device that was used beside arenas since reset_beside().

        0 if that is not known."""
        return 0

    def reset_beside(self) -> None:
        """Restarts the measurement of beside_bytes()."""

    def trim(self) -> None:
        """Frees the device's memory that libraries keep and do not use."""

    def close(self) -> None:
        """Abandons copies under way, or waits for them; idempotent."""


class CpuBackend(Backend):
    """Computes in RAM: DEVICE and HOST are the same memory, and nothing is copied."""

    kind = "cpu"
    separate = False


class EmulatedBackend(Backend):
    """Computes on the CPU as if it had memory of its own, behind a link of a given bandwidth.

    So the budget of a device, its copies and their overlap can be tested without one. The copies
    take the CPU's time and memory bandwidth, too.
    """

    kind = "emulated"
    separate = True

    def __init__(self, bytes_per_s: float) -> None:
        """`bytes_per_s`: of each direction. Raises ValueError for less than 1000."""
        super().__init__()
        self.h2d, self.d2h = LinkWay("h2d", bytes_per_s), LinkWay("d2h", bytes_per_s)

    @property
    def h2d_bytes(self) -> int:
        return self.h2d.nbytes

    @property
    def d2h_bytes(self) -> int:
        return self.d2h.nbytes

    @property
    def link_busy_s(self) -> tuple[float, float]:
        return self.h2d.busy_s, self.d2h.busy_s

    def fetch(self, to: torch.Tensor, source: torch.Tensor) -> LinkCopy:
        check_sides(to, source)
        return self.h2d.start(_mover(to, source, False), source.nbytes)

    def to_ram(
        self, to: torch.Tensor, source: torch.Tensor, streams: Iterable[Any] | None = None
    ) -> LinkCopy:
        check_sides(to, source)
        return self.d2h.start(_mover(to, source, False), source.nbytes)

    def offload(
        self,
        queue: OffloadQueue | None,
        to: torch.Tensor,
        source: torch.Tensor,
        add: bool,
        after: Any = None,
    ) -> LinkCopy:
        """As Backend. It is added, or converted, from where it is, which is RAM, too."""
        return self.d2h.start(_mover(to, source, add), source.nbytes)

    def close(self) -> None:
        self.h2d.close()
        self.d2h.close()


def _mover(to: torch.Tensor, source: torch.Tensor, add: bool) -> Callable[[int, int], object]:
    """Moves bytes of `source`, given the first one and how many, to their place in `to`."""
    assert to.numel() == source.numel(), (to.numel(), source.numel())
    if not add and to.dtype is source.dtype:
        return lambda at, nbytes: _native.stream_copy(
            to.data_ptr() + at, source.data_ptr() + at, nbytes
        )
    write = _native.add_and_sum if add else _native.copy_and_sum
    names = DTYPE_NAMES[source.dtype], DTYPE_NAMES[to.dtype]

    def move(at: int, nbytes: int) -> None:
        place = to.data_ptr() + at // source.itemsize * to.itemsize
        write(names[0], source.data_ptr() + at, names[1], place, nbytes // source.itemsize)

    return move


def check_sides(to: torch.Tensor, source: torch.Tensor) -> None:
    """Asserts what copies expect of their tensors."""
    assert to.is_contiguous()
    assert source.is_contiguous()
    assert to.dtype is source.dtype, (to.dtype, source.dtype)
    assert to.nbytes == source.nbytes, (to.nbytes, source.nbytes)
