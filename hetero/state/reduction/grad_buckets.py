"""Buckets: the memory in which whole gradients wait until they are averaged over the ranks."""

from __future__ import annotations

import enum
import mmap
from dataclasses import dataclass, field
from functools import cache

import torch

from hetero.chunks.layout import Chunk
from hetero.ranks.process_groups import ProcessGroups
from hetero.state.managed_param import ManagedParam
from hetero.state.reduction.device_means import DeviceMean, DeviceMeans
from hetero.state.reduction.mean import RankMean
from offload.device.cuda_runtime import Event
from offload.memory.arena import HostArena
from offload.memory.slot_pool import DevicePool, SlotPool

Pool = SlotPool | DevicePool


@dataclass(frozen=True)
class ReduceBuffers:
    """Memory in which gradients are while they become means; all of it in `dtype`.

    It is in RAM, or where compute happens (hetero/state/reduction/device_means.py).

    Attributes:
        dtype: of gradients on their way between ranks.
        buckets: slots for buckets, in stages 2 and 3; None in stage 1, where GRAD homes are whole,
            and are the buckets.
        received: slots for what other ranks of the shard group send, one whole chunk at a time.
        replicas: slots of RAM for what other replicas of this shard send; None without replicas.
        by_backend: the backend's reduce-scatter makes the sums (Config.grad_reduce).
        device: makes the means, also those over replicas, where ranks have devices of their own:
            `buckets` and `received` are there.
    """

    dtype: torch.dtype
    buckets: Pool | None
    received: Pool
    replicas: HostArena | None
    by_backend: bool = False
    device: DeviceMeans | None = None

    def resize(self, bucket_slots: int, received_slots: int) -> None:
        """Gives the pools other numbers of slots, of which none is taken. Raises BudgetError."""
        if self.buckets is not None:
            self.buckets.refit(max(self.most_buckets, bucket_slots), bucket_slots)
        self.received.refit(received_slots, received_slots)
        if self.device is not None:
            self.device.resize(received_slots)

    def begin_mean(
        self,
        world: ProcessGroups,
        chunk: Chunk,
        bucket: Bucket | None,
        received: torch.Tensor,
        slot: int,
        what: str,
    ) -> RankMean | DeviceMean:
        """Starts making the mean over all ranks of a chunk's gradient.

        Args:
            world: the ranks.
            chunk: whose gradient it is.
            bucket: has this rank's; None: it has none, and sends zeros.
            received: slots of `received`, of which the first is number `slot`.
            what: names the gradient in errors.

        Raises PeerError.
        """
        flat = None if bucket is None else bucket.flat
        if self.device is not None:
            computed = [] if bucket is None else bucket.computed
            return self.device.start(chunk, flat, computed, received, slot, what)
        if flat is None:
            flat = _zeros(received.numel(), self.dtype)
        return RankMean(world, flat, received, self.replicas, what, self.by_backend)

    @property
    def most_buckets(self) -> int:
        """Slots for buckets that may be taken as long as RAM is free."""
        return self.buckets.arena.slots if isinstance(self.buckets, SlotPool) else 0


@cache
def _zeros(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros that are only read and take no memory: the system maps the same page everywhere."""
    nbytes = numel * dtype.itemsize
    return torch.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE), dtype=dtype)


class BucketState(enum.Enum):
    """What a bucket's memory holds, and who may touch it."""

    FILLING = "this rank's gradients, which autograd adds"
    SENDING = "this rank's gradients, which messages to other ranks read"
    MEAN = "in this rank's shard of it the mean over the ranks, elsewhere nothing (stage 1)"


@dataclass
class Bucket:
    """A chunk's gradient as this rank computed it, flat, the whole chunk."""

    flat: torch.Tensor
    slot: int | None  # of the pool; None: the bucket is the chunk's GRAD home
    state: BucketState = BucketState.FILLING
    filled: set[ManagedParam] = field(default_factory=set)  # their gradients are in it
    # On a device: after which of its work they are.
    computed: list[Event] = field(default_factory=list)
