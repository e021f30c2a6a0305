"""Means of gradients over the ranks of a shard group and over its replicas, and their memory.

Gradients wait in buckets until they are averaged. Where devices make means, buckets are on the
device. The devices send each other their parts, and a kernel adds up what has come, in fp32 in the
order of ranks, and rounds it once: the bits are those of RankMean. With hybrid sharding they then
do the same with the replicas' devices. Of a bucket this rank's shard of the mean alone crosses the
link.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import torch

from hetero.chunks.dtypes import check_dtype
from hetero.chunks.layout import Chunk, Shard
from hetero.ranks.collectives import Collective, GatheredParts
from hetero.ranks.communicator import Communicator
from hetero.ranks.device_group import DeviceGroup
from hetero.ranks.peer_memory import PartsFromPeers
from hetero.ranks.peers import Channel
from hetero.ranks.process_groups import ProcessGroups
from hetero.state.managed_param import ManagedParam
from hetero.state.memory import Homes
from offload import _native
from offload.device.cuda_backend import CudaBackend, MeanTask
from offload.device.cuda_runtime import Event
from offload.memory.arena import HostArena
from offload.memory.operation import Worker
from offload.memory.slot_pool import SlotPool


class RankMean:
    """The mean of a flat gradient over all ranks; each rank of a shard group gets its part.

    With hybrid sharding it is hierarchical: first over the shard group, the ranks of a node, then
    between the replicas of the part, of which each sends as much as one rank of another node needs.
    Each is an all-to-all of parts, and a sum of the received parts in fp32 in the order of the
    ranks, rounded once: as many bytes as a reduce-scatter needs, the same bits on every network,
    and fp16 gradients do not overflow on the way to their mean.
    """

    def __init__(
        self,
        world: ProcessGroups,
        flat: torch.Tensor,
        received: torch.Tensor,
        into: torch.Tensor,
        replica_arena: HostArena | None,
        what: str,
    ) -> None:
        """Starts sending each rank of the shard group its part of `flat`.

        No tensor may be used otherwise until the mean has been made.

        Args:
            world: the ranks.
            flat: this rank's gradient, whole; zeros if it has none. It is not written to.
            received: memory of as many elements for the parts that ranks send to this one.
            into: gets the mean: this rank's part of `flat`, or of `received`.
            replica_arena: holds what other replicas send; None without replicas.
            what: names the gradient in errors.
        """
        self._world = world
        self._replica_arena = replica_arena
        self._flat = flat
        self._received = received
        self._into = into
        self._what = what
        self._sending: Collective | PartsFromPeers | None = None
        shard = world.shard
        if shard is not None:
            self._sending = shard.begin_all_to_all(received, flat, what, Channel.GRADIENTS)

    def wait(self) -> None:
        """Returns when all parts have been sent and received. Raises PeerError."""
        if self._sending is not None:
            self._sending.wait()

    def take(self) -> torch.Tensor:
        """Makes the mean over all ranks, flat, after wait(); all replicas of a shard must do so.

        Once. Raises PeerError.
        """
        if self._world.shard is None:
            self._into.copy_(self._flat)
        else:
            _average(self._world.shard, self._received, self._flat, self._into)
        if self._replica_arena is not None:
            self._average_over_replicas(self._replica_arena)
        return self._into

    def _average_over_replicas(self, arena: HostArena) -> None:
        """Makes of the shard group's mean that of all ranks; `arena` holds what replicas send."""
        replicas, into = self._world.replicas, self._into
        assert replicas is not None
        received = arena.view(0, arena.slots, into.dtype)[: into.numel()]
        replicas.begin_all_to_all(received, into, self._what, Channel.GRADIENTS).wait()
        own = into.chunk(replicas.size)[replicas.rank]
        _average(replicas, received, into, own)
        parts = GatheredParts(into, replicas.size)
        replicas.gather_parts(own, parts, self._what, Channel.GRADIENTS)


def _average(
    group: Communicator, received: torch.Tensor, flat: torch.Tensor, into: torch.Tensor
) -> None:
    """Writes the mean of the parts of all members of `group` to `into`; its own is in `flat`."""
    part_bytes = received.nbytes // group.size
    addresses = [
        (flat if peer == group.rank else received).data_ptr() + peer * part_bytes
        for peer in range(group.size)
    ]
    _native.mean(check_dtype(str(into.dtype), "dtype"), addresses, into.data_ptr(), into.numel())


@dataclass(frozen=True)
class MeanMemory:
    """Memory for means, beside the buckets and what is received.

    Attributes:
        zeros: on the device, as many elements as the longest chunk has: what a rank without a
            gradient sends. DeviceMeans writes the zeros.
        in_ram: slots for means on their way home, one for each slot of what is received.
        between: on the device, for what other replicas send, a shard of the longest chunk; None
            without replicas.
    """

    zeros: torch.Tensor
    in_ram: HostArena
    between: torch.Tensor | None


class DeviceMeans:
    """Makes means in the order in which they are started, the same on all ranks."""

    def __init__(
        self,
        world: ProcessGroups,
        group: DeviceGroup,
        backend: CudaBackend,
        homes: Homes,
        shard: Shard,
        memory: MeanMemory,
    ) -> None:
        """Nothing is sent yet.

        Args:
            world: the ranks.
            group: the devices of the shard group, and of the replicas.
            backend: this rank's device.
            homes: of this rank's gradients.
            shard: this rank's part of a chunk.
            memory: on the device, and in RAM.
        """
        self._world = world
        self.group = group
        self.backend = backend
        self._homes = homes
        self._shard = shard
        self._memory = memory
        memory.zeros.zero_()
        self._zeroed = self.record()
        self.worker = Worker("means")

    def record(self) -> Event:
        """An event after which the device has made what the calling thread has given to it."""
        return self.backend.record_event()

    def start(
        self,
        chunk: Chunk,
        flat: torch.Tensor | None,
        computed: Sequence[Event],
        received: torch.Tensor,
        slot: int,
        what: str,
    ) -> DeviceMean:
        """Starts making the chunk's mean.

        Args:
            chunk: whose gradient it is.
            flat: this rank's, whole; None: it has none, and sends zeros.
            computed: the events after which other streams than the current one have made it.
            received: memory of as many elements for what other ranks send; the current stream may
                have work with it.
            slot: the number of the first slot that `received` is in.
            what: names the gradient in errors.
        """
        memory, in_ram = self._memory, None
        computed = [*computed, self.record()]
        part = self._shard.numel(received.numel())
        if flat is None:
            flat, computed = memory.zeros[: received.numel()], [self._zeroed, computed[-1]]
        if not self._homes.on_device(chunk):
            in_ram = memory.in_ram.view(slot, chunk.slots, received.dtype)
        between = None if memory.between is None else memory.between[:part]
        task = MeanTask(flat, received, received[:part], between, in_ram)
        return DeviceMean(self, task, computed, what)

    def note_exchanged(self, whole_bytes: int) -> None:
        """The devices exchange so many bytes, of a whole chunk, and replicas what follows."""
        if self._world.shard is not None:
            self._world.shard.note_exchanged(whole_bytes)
        if self._world.replicas is not None:
            # What each sends the others, and then the part of which it made the mean.
            self._world.replicas.note_exchanged(2 * whole_bytes // self._world.ranks)

    def resize(self, slots: int) -> None:
        """As many slots as there are for what is received. Raises BudgetError."""
        self._memory.in_ram.resize(slots)
        self._memory.in_ram.commit(0, slots)

    def close(self) -> None:
        """Ends the thread, when all that was started is given to the device; idempotent."""
        self.worker.close()


class DeviceMean:
    """The mean of a flat gradient, whose parts devices send."""

    def __init__(
        self, means: DeviceMeans, task: MeanTask, computed: Sequence[Event], what: str
    ) -> None:
        """As DeviceMeans.start() has it.

        A device waits for no rank that may not come: the ranks meet first.
        """
        self._means = means
        # Until the device has got it: it may pin a home.
        self._task: MeanTask | None = task
        self._mean: torch.Tensor | None = task.mean if task.in_ram is None else task.in_ram
        self._computed = computed
        self._what = what
        self._error: Exception | None = None
        self._has_ended = threading.Event()
        nothing = torch.zeros(1, dtype=torch.uint8, device="cpu")
        self._meeting = means.group.peers.begin_any(nothing, what, Channel.GRADIENTS)
        means.worker.do(self._make)

    def _make(self) -> None:
        """In the thread."""
        means = self._means
        try:
            self._meeting.wait()
            done = self._give()
            means.group.look_after(done, self._meeting.operation, self._what, self._has_ended.set)
        except Exception as error:
            self._error = error.with_traceback(None)
            self._has_ended.set()

    def _give(self) -> Event:
        means, task, self._task = self._means, self._task, None
        assert task is not None
        means.note_exchanged(task.received.nbytes)
        return means.backend.average(means.group.check(), task, self._computed)

    def wait(self) -> None:
        """Returns when the mean is there. Raises PeerError."""
        self._means.group.peers.wait_for(self._has_ended, self._meeting.operation, self._what)
        if self._error is not None:
            raise self._error
        self._means.group.check()

    def take(self) -> torch.Tensor:
        """The mean over all ranks, flat, after wait(); once."""
        mean, self._mean = self._mean, None
        assert mean is not None
        return mean


@dataclass(frozen=True)
class ReduceBuffers:
    """Memory in which gradients are while they become means; all of it in `dtype`.

    It is in RAM, or where compute happens (hetero/state/reduction/means.py).

    Attributes:
        dtype: of gradients on their way between ranks.
        buckets: slots for buckets.
        received: slots for what other ranks of the shard group send, one whole chunk at a time.
        replicas: slots of RAM for what other replicas of this shard send; None without replicas.
        device: makes the means, also those over replicas, where ranks have devices of their own:
            `buckets` and `received` are there.
    """

    dtype: torch.dtype
    buckets: SlotPool
    received: SlotPool
    replicas: HostArena | None
    device: DeviceMeans | None = None

    def resize(self, bucket_slots: int, received_slots: int) -> None:
        """Gives the pools other numbers of slots, of which none is taken. Raises BudgetError."""
        self.buckets.refit(bucket_slots)
        self.received.refit(received_slots)
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
        whole = received if flat is None else flat  # memory that nobody needs afterwards
        into = whole if world.shard is None else whole.chunk(world.shard.size)[world.shard.rank]
        if flat is None:
            flat = _zeros(received.numel(), self.dtype)
        return RankMean(world, flat, received, into, self.replicas, what)


@cache
def _zeros(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros that are only read and take no memory: the system maps the same page everywhere."""
    nbytes = numel * dtype.itemsize
    return torch.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE), dtype=dtype)


@dataclass
class Bucket:
    """A chunk's gradient as this rank computed it, flat, the whole chunk.

    It gets what autograd adds, until it is sent: then messages to other ranks read it.
    """

    flat: torch.Tensor
    slot: int  # of the pool
    filled: set[ManagedParam] = field(default_factory=set)  # their gradients are in it
    # On a device: after which of its work they are.
    computed: list[Event] = field(default_factory=list)
