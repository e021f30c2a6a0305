"""What a placement is: on which tier each chunk's state lives, and what memory that takes.

Data only: candidates.py makes a `Placement` from a `GroupSpec`, the runtime carries it out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hetero.chunks.dtypes import Dtypes
from hetero.chunks.layout import Chunk, Layout, ParamSpec
from offload.device.grad_offload import buffer_sizes
from offload.disk.scratch_file import checksum_bytes
from offload.errors import BudgetError
from offload.memory.tiers import Tier

CONSTRUCTION_BYTES = 4  # of a parameter element as it is constructed


class PlacementError(BudgetError):
    """No placement fits the budgets: the least demanding one needs `smallest_host_bytes` of RAM and
    `smallest_device_bytes` of a DEVICE with memory of its own (0 without such a device)."""

    def __init__(
        self, message: str, smallest_host_bytes: int, smallest_device_bytes: int = 0
    ) -> None:
        super().__init__(message)
        self.smallest_host_bytes = smallest_host_bytes
        self.smallest_device_bytes = smallest_device_bytes


@dataclass(frozen=True)
class Budgets:
    """Bytes of one rank that a chunk group may use, and what of them other chunk groups have."""

    host: int  # RAM
    disk: int  # file space; 0 without a directory
    gathered: int | None = None  # RAM for gathered parameters; None: no limit of their own
    device: int | None = None  # of a DEVICE with memory of its own; None: DEVICE is RAM
    # RAM that is left over may keep optimizer states of DISK-homed chunks in buffers from step to
    # step.
    keep_optim_states: bool = True
    taken_host: int = 0  # by other chunk groups, like all that is taken
    reserved_host: int = 0  # RAM that stays free for parameters that come later
    activations_host: int = 0  # RAM, and bytes of DEVICE, for what autograd saves
    activations_device: int = 0
    taken_disk: int = 0
    taken_gathered: int = 0
    taken_device: int = 0
    # RAM that parameters of chunk groups to come take while this chunk group's chunks are made.
    waiting: int = 0
    # The model is being built, so first values pass through RAM in fp32.
    under_construction: bool = True

    def minus(self, made: Placement, slot: SlotBytes) -> Budgets:
        """What is left beside a chunk group with slots of `slot` that is placed as `made`."""
        return replace(
            self,
            taken_host=self.taken_host + made.host_bytes,
            taken_disk=self.taken_disk + made.disk_bytes,
            taken_gathered=self.taken_gathered + made.gathered_slots * slot.gathered,
            taken_device=self.taken_device + made.device_bytes,
        )


@dataclass(frozen=True)
class SlotBytes:
    """Bytes that one slot of a chunk takes: at home on this rank, gathered, and in a bucket."""

    param: int
    grad: int
    optim_state: int
    gathered: int
    bucket: int

    @classmethod
    def of(cls, layout: Layout, dtypes: Dtypes) -> SlotBytes:
        """The slots of `layout` in `dtypes`."""
        whole, tile, shard = layout.slot_numel, layout.tile_numel, layout.shard
        return cls(
            (tile if shard.params else whole) * dtypes.param_bytes,
            tile * dtypes.grad_bytes,
            dtypes.optim_state_bytes(tile),
            whole * dtypes.param_bytes,
            whole * dtypes.reduce_bytes,
        )


def part_bytes(nbytes: int, ranks: int) -> int:
    """RAM for one rank's part of a parameter of `nbytes` that waits for its chunk.

    It is as much on all ranks, so that they offload the same.
    """
    return -(-nbytes // ranks)


def waiting_bytes(params: Iterable[ParamSpec], ranks: int, disk: bool) -> int:
    """RAM of one rank for parameters that wait for their chunks: its part of each, or nothing with
    a disk; and all of those that stay."""
    return sum(
        part_bytes(param.numel * CONSTRUCTION_BYTES, 1 if param.stays else ranks)
        for param in params
        if param.stays or not disk
    )


def link_buffers(layout: Layout, dtypes: Dtypes) -> tuple[int, int]:
    """Number and bytes of the buffers in RAM between which and a DEVICE of its own bytes pass."""
    largest = max(s.param.numel for c in layout.chunks for s in c.slices)
    return buffer_sizes(largest * dtypes.param_bytes)


@dataclass(frozen=True)
class FileChecksums:
    """What decides how many pages the file of a chunk group has, whose checksums are in RAM."""

    is_durable: bool  # commits copy what is in memory to one of two extents
    held_bytes: int = 0  # that a file has already, which does not shrink

    def most_bytes(self, in_file: int, in_memory: int, trained: int) -> int:
        """RAM for them, of state of so many bytes in the file and elsewhere; `trained` is that of
        trained chunks without gradients, wherever it is."""
        file_bytes = in_file
        if in_file or self.is_durable:
            file_bytes += trained
        if self.is_durable:
            file_bytes += 2 * in_memory
        return max(self.held_bytes, checksum_bytes(file_bytes))


@dataclass(frozen=True)
class GroupSpec:
    """A chunk group that is to be placed."""

    layout: Layout
    dtypes: Dtypes
    policy: str  # "cpu", "nvme", "auto", or, with a DEVICE of its own, "cuda"
    budgets: Budgets
    min_gathered_slots: int = 1  # that a module and its ancestors may need at once
    reduce_at_end: bool = False  # each of several ranks keeps whole gradients until backward ends
    # Updates go on beside forward or backward, in the same order in every step.
    overlaps_updates: bool = False
    checksums: FileChecksums | None = None  # of the file's pages; None: there are none

    @property
    def slot(self) -> SlotBytes:
        """The sizes of its slots."""
        return SlotBytes.of(self.layout, self.dtypes)

    @property
    def averages_on_device(self) -> bool:
        """Whether the devices of several ranks average gradients, and not RAM."""
        shard = self.layout.shard
        return shard.between_devices and shard.ranks * shard.replicas > 1

    def within(self, budgets: Budgets) -> GroupSpec:
        """The same chunk group with other budgets."""
        return replace(self, budgets=budgets)


@dataclass(frozen=True, kw_only=True)
class PoolSizes:
    """The sizes of a chunk group's pools, and the bytes of pools and homes together."""

    # For copies of parameters that are on DISK or on other ranks. In RAM if DEVICE is RAM, else on
    # DEVICE.
    gathered_slots: int = 0
    grad_slots: int = 0  # for DISK-homed gradients on their way
    buffers: int = 0  # of the optimizer pipeline
    shard_slots: int = 0  # for shards of DISK-homed parameters on their way to other ranks
    # On DEVICE where the ranks' devices average, else in RAM.
    bucket_slots: int = 0  # for whole gradients until they are averaged over the ranks
    receive_slots: int = 0  # for other ranks' gradients while they are averaged
    staged_slots: int = 0  # of RAM, for copies of several ranks' shards on their way to DEVICE
    # Of DEVICE, for chunks that its rank gathers for other ranks alone, or to a home in RAM.
    unkept_slots: int = 0
    grad_offload_bytes: int = 0  # of DEVICE, for gradients on their way to RAM
    pool_bytes: int = 0  # of RAM, slots and buffers without homes
    host_bytes: int = 0  # of RAM, homes and pools together
    disk_bytes: int = 0  # of the file
    device_bytes: int = 0  # of a DEVICE that is not RAM, homes and slots together


@dataclass(frozen=True, kw_only=True)
class Placement(PoolSizes):
    """Where a chunk group's state lives, and the sizes of its pools.

    A chunk with one kind of state on DEVICE has all of it there and is updated there.
    """

    # The tier by chunk id; None for the gradient and the optimizer state of a frozen chunk.
    param: tuple[Tier, ...]
    grad: tuple[Tier | None, ...]
    optim_state: tuple[Tier | None, ...]
    longest_trained: int = 0  # slots of the longest chunk that is trained

    @property
    def trained_param_on_disk(self) -> bool:
        """Whether the optimizer finds parameters in the file."""
        pairs = zip(self.param, self.optim_state, strict=True)
        return any(p is Tier.DISK and r is not None for p, r in pairs)


def concurrent_slots(chunk_sets: Iterable[Sequence[Chunk]]) -> int:
    """The slots that always find room for any one of `chunk_sets` gathered at once.

    With k other runs of slots in use at the worst places, a run of r finds room in
    others + (k + 1) (r - 1) + 1 slots.
    """
    need = 1
    for chunks in chunk_sets:
        longest = max(c.slots for c in chunks)
        others = sum(c.slots for c in chunks) - longest
        need = max(need, others + len(chunks) * (longest - 1) + 1)
    return need
