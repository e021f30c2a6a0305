"""Means over the ranks that their devices make.

Gradients are collected in buckets on the device. The devices send each other their parts, and a
kernel adds up what has come, in fp32 in the order of ranks, and rounds it once: the bits are those
of hetero/state/reduction/mean.py. With hybrid sharding they then do the same with the replicas'
devices. Of a chunk this rank's shard of the mean alone crosses the link.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from hetero.chunks.layout import Chunk
from hetero.ranks.device_group import DeviceGroup
from hetero.ranks.peers import Channel
from hetero.ranks.process_groups import ProcessGroups
from hetero.state.memory.homes import Homes
from offload.device.cuda_backend import CudaBackend
from offload.device.event_pool import Event
from offload.memory.arena import HostArena
from offload.memory.operation import Worker


class DeviceMeans:
    """Makes means in the order in which they are started, the same on all ranks."""

    def __init__(
        self,
        world: ProcessGroups,
        group: DeviceGroup,
        backend: CudaBackend,
        homes: Homes,
        zeros: torch.Tensor,
        in_ram: HostArena,
        between: torch.Tensor | None,
        by_backend: bool,
    ) -> None:
        """Nothing is sent yet. Raises HeteroError if the device's kernel cannot be compiled.

        Args:
            world: the ranks.
            group: the devices of the shard group, and of the replicas.
            backend: this rank's device.
            homes: of this rank's shards of gradients.
            zeros: as many elements of the device as the longest chunk has, which become zeros.
            in_ram: slots for means on their way home, one for each slot of what is received.
            between: memory of the device for what other replicas send, a shard of the longest
                chunk; None without replicas.
            by_backend: NCCL's reduce-scatter makes the sums, in the gradients' dtype.
        """
        backend.prepare_means()
        self._world = world
        self.group = group
        self.backend = backend
        self._homes = homes
        self.zeros = zeros.zero_()
        self._zeroed = self.record()
        self._in_ram = in_ram
        self.between = between
        self.by_backend = by_backend
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
        if flat is None:
            flat, computed = self.zeros[: received.numel()], [self._zeroed]
        computed = [*computed, self.record()]
        into: torch.Tensor | None = None
        if not self._homes.on_device(chunk):
            into = self._in_ram.view(slot, chunk.slots, received.dtype)
        return DeviceMean(self, flat, computed, received, into, what)

    def note_exchanged(self, whole_bytes: int) -> None:
        """The devices exchange so many bytes, of a whole chunk, and replicas what follows."""
        if self._world.shard is not None:
            self._world.shard.note_exchanged(whole_bytes)
        if self._world.replicas is not None:
            # What each sends the others, and then the part of which it made the mean.
            self._world.replicas.note_exchanged(2 * whole_bytes // self._world.ranks)

    def resize(self, slots: int) -> None:
        """As many slots as there are for what is received. Raises BudgetError."""
        self._in_ram.resize(slots)
        self._in_ram.commit(0, slots)

    def close(self) -> None:
        """Ends the thread, when all that was started is given to the device; idempotent."""
        self.worker.close()


class DeviceMean:
    """The mean of a flat gradient, whose parts devices send."""

    def __init__(
        self,
        means: DeviceMeans,
        flat: torch.Tensor,
        computed: Sequence[Event],
        received: torch.Tensor,
        into: torch.Tensor | None,
        what: str,
    ) -> None:
        """As DeviceMeans.start() has it; the mean comes to `into` in RAM, or stays on the device.

        A device waits for no rank that may not come: the ranks meet first.
        """
        self._means = means
        self._flat = flat
        self._computed = computed
        self._received = received
        self._mean = into
        self._what = what
        self._error: Exception | None = None
        self._has_ended = threading.Event()
        nothing = torch.zeros(1, dtype=torch.uint8)
        self._meeting = means.group.peers.begin_any(nothing, what, Channel.GRADIENTS)
        means.worker.do(self._make)

    def _make(self) -> None:
        """In the thread."""
        means = self._means
        try:
            self._meeting.wait()
            self._mean, done = means.backend.average(
                means.group.check(),
                self._flat,
                self._received,
                self._computed,
                self._mean,
                means.between,
                means.by_backend,
            )
            means.note_exchanged(self._received.nbytes)
            means.group.look_after(done, self._meeting.operation, self._what, self._has_ended.set)
        except Exception as error:
            self._error = error.with_traceback(None)
            self._has_ended.set()

    def wait(self) -> None:
        """Returns when the mean is there. Raises PeerError."""
        self._means.group.peers.wait_for(self._has_ended, self._meeting.operation, self._what)
        if self._error is not None:
            raise self._error
        self._means.group.check()

    @property
    def mean(self) -> torch.Tensor:
        """The mean over all ranks, flat, after wait()."""
        assert self._mean is not None
        return self._mean
