"""Makes the store of an engine's activations, as the options want it."""

from __future__ import annotations

from collections.abc import Callable

from hetero.activations.kept_tensors import KeptTensors
from hetero.activations.limits import ActivationLimits
from hetero.activations.movement.activation_file import ActivationFile
from hetero.activations.movement.by_link import KEPT_SHARE, ByLink
from hetero.activations.movement.device_copies import DeviceCopies
from hetero.activations.movement.in_ram import InRam
from hetero.activations.movement.movement import Movement
from hetero.activations.movement.ram_copies import RamCopies
from hetero.activations.store import ActivationStore
from hetero.config import Config
from offload._native import IoEngine
from offload.device.backend import Backend
from offload.memory.arena import HostArena
from offload.memory.ledger import Ledger
from offload.memory.run_pool import RunPool
from offload.memory.tiers import Account, Tier

# Where compute happens in RAM slots come and go among the tensors, so that runs of free ones may be
# short: there are addresses for so many times the bytes.
_ADDRESSES = 4
# Of RAM behind a link: what may be in slots alone before the earliest is written.
_UNWRITTEN_SHARE = 3 / 4


def build_activation_store(
    config: Config,
    limits: ActivationLimits,
    backend: Backend,
    ledger: Ledger,
    notes: list[str],
    model_state_io: Callable[[], IoEngine | None],
    excess: Callable[[int], int] = lambda _: 0,
) -> ActivationStore:
    """A store without activations. It takes memory when it needs it, within `limits`.

    Args:
        config: says where NVMe is.
        limits: the bytes that placement leaves out for it.
        backend: where compute happens.
        ledger: charged.
        notes: lines for the user, to append to.
        model_state_io: the I/O engine of model state, if it has one; it lives longer.
        excess: by how many bytes the process is larger than it may be, if so many more come.
    """
    tier = Tier.DEVICE if backend.separate else Tier.HOST
    kept = KeptTensors(ledger, tier, limits.may_leave)
    file = ActivationFile(config, ledger, notes, model_state_io) if config.nvme_paths else None
    slot_bytes = limits.slot_bytes(limits.host_bytes)
    slots = limits.host_bytes // slot_bytes
    movement: Movement
    if not backend.separate:

        def room() -> int:
            return limits.usable_bytes - kept.nbytes

        arena = HostArena(_ADDRESSES * slots, slot_bytes, ledger, Account.ACTIVATION)
        ram = RamCopies(RunPool(arena, room), room, file, unwritten_bytes=0)
        movement = InRam(limits, kept, ram, file, config.debugging.prefetch, excess)
    else:
        arena = backend.host_arena(slots, slot_bytes, ledger, Account.ACTIVATION)

        def behind_link() -> int:
            return limits.host_bytes

        pool = RunPool(arena, behind_link, in_one=True)
        devices = DeviceCopies(
            backend,
            ledger,
            limits.device_bytes // KEPT_SHARE,
            limits.slot_bytes(limits.device_bytes),
        )
        unwritten_bytes = int(slots * slot_bytes * _UNWRITTEN_SHARE)
        ram = RamCopies(pool, behind_link, file, unwritten_bytes, devices.wait_for_one)
        movement = ByLink(limits, kept, ram, file, config.debugging.prefetch, backend, devices)
    return ActivationStore(limits, kept, movement, notes)
