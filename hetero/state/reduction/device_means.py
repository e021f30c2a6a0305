"""Means over the ranks that their devices make.

Gradients are collected in buckets on the device, or are in whole homes (stage 1), of which those in
RAM are copied to the device when it is their turn. The devices send each other their parts, and a
kernel adds up what has come, in fp32 in the order of ranks, and rounds it once: the bits are those
of hetero/state/reduction/mean.py. With hybrid sharding they then do the same with the replicas'
devices. Of a bucket this rank's shard of the mean alone crosses the link.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hetero.chunks.layout import Chunk, Shard
from hetero.ranks.device_group import DeviceGroup
from hetero.ranks.peers import Channel
from hetero.ranks.process_groups import ProcessGroups
from hetero.state.memory.homes import Homes
from offload.device.cuda_backend import CudaBackend, MeanTask
from offload.device.cuda_runtime import Event
from offload.memory.arena import HostArena
from offload.memory.operation import Worker


@dataclass(frozen=True)
class MeanMemory:
    """Memory for means, beside the buckets and what is received.

    Attributes:
        spare: on the device, as many elements as the longest chunk has. They become zeros, which
            are sent where a rank has no gradient; or, where homes of gradients are whole (stage 1)
            and so have zeros, they are for what is sent from RAM.
        in_ram: slots for means on their way home, one for each slot of what is received; None if
            homes are whole, to which means come at once.
        between: on the device, for what other replicas send, a shard of the longest chunk; None
            without replicas.
    """

    spare: torch.Tensor
    in_ram: HostArena | None
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
        by_backend: bool,
    ) -> None:
        """Nothing is sent yet. Raises HeteroError if the device's kernel cannot be compiled.

        Args:
            world: the ranks.
            group: the devices of the shard group, and of the replicas.
            backend: this rank's device.
            homes: of this rank's gradients.
            shard: this rank's part of a chunk.
            memory: on the device, and in RAM.
            by_backend: NCCL's reduce-scatter makes the sums, in the gradients' dtype.
        """
        backend.prepare_means()
        self._world = world
        self.group = group
        self.backend = backend
        self._homes = homes
        self._shard = shard
        self._memory = memory
        if memory.in_ram is not None:
            memory.spare.zero_()
        self._zeroed = self.record()
        self._by_backend = by_backend
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
            flat: this rank's, whole; None: it has none, and sends zeros. A whole home gets the mean
                in this rank's part of it.
            computed: the events after which other streams than the current one have made it.
            received: memory of as many elements for what other ranks send; the current stream may
                have work with it.
            slot: the number of the first slot that `received` is in.
            what: names the gradient in errors.
        """
        memory, on_device = self._memory, self._homes.on_device(chunk)
        computed = [*computed, self.record()]
        part = self._shard.numel(received.numel())
        mean, sent, in_ram = received[:part], None, None
        if memory.in_ram is None:
            assert flat is not None
            own = flat[self._shard.range(flat.numel())]
            if on_device:
                mean = own
            else:
                sent, in_ram = memory.spare[: flat.numel()], own
        else:
            if flat is None:
                flat, computed = memory.spare[: received.numel()], [self._zeroed, computed[-1]]
            if not on_device:
                in_ram = memory.in_ram.view(slot, chunk.slots, received.dtype)
        between = None if memory.between is None else memory.between[:part]
        task = MeanTask(flat, received, mean, sent, between, in_ram, self._by_backend)
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
        if self._memory.in_ram is not None:
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
        nothing = torch.zeros(1, dtype=torch.uint8)
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
