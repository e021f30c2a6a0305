"""The members of a communicator whose devices exchange bytes by themselves.

A device that waits in a collective for a rank that has died waits for ever, and with it all that is
to be computed afterwards. So all members first meet by a common operation in RAM, and a thread
looks after every collective that a device was given: if it is in vain, it is aborted.

Gathers and means of each chunk group have an NCCL communicator of their own (means with replicas
two), because they may interleave differently on each rank. So kernels of several communicators may
be on a device at once, which NCCL allows as long as all have room (at most 32 blocks each). Their
buffers are in no budget; device_memory="auto" measures them as what is beside the arenas. After an
abort the device goes on, what it computes has no meaning, and the next common operation raises
PeerError, at the latest step() before it changes anything.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from hetero.ranks.communicator import Communicator
from hetero.ranks.peers import Channel, RankOperation
from hetero.ranks.process_groups import ProcessGroups
from hetero.ranks.start.machine import machine_id
from hetero.ranks.waiting import LOOK_S
from offload.device.backend import Backend
from offload.device.cuda_backend import CudaBackend, DeviceStreams
from offload.device.cuda_runtime import Event
from offload.errors import PeerError
from offload.interrupts import deliver_signals
from offload.memory.operation import THREAD_PREFIX, Worker

_LOOKS = 3  # in vain after another rank's failure is known: the collective may not need that rank


def can_gather_between_devices(world: ProcessGroups, backend: Backend) -> bool:
    """Whether each rank has a device of its own, and these can exchange bytes by themselves.

    The one place where it is decided what carries parameters from rank to rank: else RAM does, by
    gloo. All ranks must call it; it is the same on all. Raises PeerError.
    """
    if world.everyone is None:
        return False
    name = backend.collective_device()
    mine = b"" if name is None else machine_id() + b"/" + name.encode()
    names = world.everyone.all_gather_bytes(mine, "hetero's start")
    return all(names) and len(set(names)) == len(names)


class DeviceGroup:
    """NCCL's process groups of a shard group's members, and the thread that looks after them.

    With `replicas` there are two: of the shard group, and of the replicas of this rank's shards.
    Members must give these the same collectives, in one order.

    Attributes:
        peers: those who meet before each collective: all whose devices it may wait for.
    """

    def __init__(
        self,
        peers: Communicator,
        channel: Channel,
        backend: CudaBackend,
        shard: Communicator | None,
        replicas: Communicator | None = None,
    ) -> None:
        """Connects the members' devices. All of them must call it. Raises PeerError.

        Args:
            peers: all members, of both groups; with replicas all ranks.
            channel: that of the operations by which they meet before each collective.
            backend: this rank's device.
            shard: the shard group.
            replicas: the ranks that have the same shard as this one, if their devices exchange
                bytes, too.
        """
        self.peers = peers
        self._groups = {id(group): group for group in (peers, shard, replicas) if group is not None}
        self._runtime = backend.runtime

        def connect(members: Communicator | None) -> Any:
            if members is None:
                return None
            return members.connect_devices(channel, backend.runtime.process_group)

        self.streams: DeviceStreams | None = backend.connect(connect(shard), connect(replicas))
        self._watch = Worker("devices")
        self._ended = threading.Condition()
        self._under_way = 0
        self._failure: PeerError | None = None

    def look_after(
        self, done: Event, operation: RankOperation, what: str, on_end: Callable[[], object]
    ) -> None:
        """A collective was given to the device.

        Args:
            done: comes when the device has done it.
            operation: by which the members have met before it.
            what: names it in errors.
            on_end: is called, in another thread, when the device does not do it any more.
        """
        with self._ended:
            self._under_way += 1
        self._watch.do(partial(self._wait, done, operation, what, on_end))

    def check(self) -> DeviceStreams:
        """The streams for a collective.

        Raises PeerError if one has failed: what devices got since has no meaning.
        """
        if self._failure is not None:
            raise PeerError(*self._failure.args)
        assert self.streams is not None, "the connections are closed"
        return self.streams

    def wait_all(self) -> None:
        """Until the device has done all collectives that it was given. Raises PeerError."""
        with self._ended:
            while not self._ended.wait_for(lambda: not self._under_way, LOOK_S):
                deliver_signals()
        self.check()

    def _wait(
        self, done: Event, operation: RankOperation, what: str, on_end: Callable[[], object]
    ) -> None:
        """In the thread."""
        began_s, looks = time.monotonic(), 0
        try:
            while self._failure is None and not self._runtime.comes_within(done, LOOK_S):
                failures = self.peers.failures
                has_failed = failures.first is not None or failures.own_end is not None
                looks = looks + 1 if has_failed else 0
                waited_s = time.monotonic() - began_s
                if waited_s > self.peers.timeout_s or looks == _LOOKS:
                    why = "broken off" if has_failed else "timed out"
                    self._failure = self.peers.failure_of_all(operation, what, why, waited_s)
                    self._abort()
        except RuntimeError as error:  # the device's, which its next use meets, too
            self._failure = PeerError(f"the device failed in {what}: {error}")
        on_end()
        with self._ended:
            self._under_way -= 1
            self._ended.notify_all()

    def _abort(self) -> None:
        """The device goes on with what it has; what others sent has no meaning from now on."""
        assert self.streams is not None
        self._end_collectives(self.streams)
        for group in self._groups.values():
            group.break_off()

    @staticmethod
    def _end_collectives(streams: DeviceStreams) -> None:
        """Aborts both groups at once: what one of them waits for in the stream may be the other's,
        which does not end before its own abort."""

        def end(group: Any) -> None:
            with contextlib.suppress(RuntimeError):
                group.abort()

        groups = [group for group in (streams.group, streams.replicas) if group is not None]
        threads = [
            threading.Thread(target=end, args=[group], name=f"{THREAD_PREFIX}aborting")
            for group in groups
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def close(self) -> None:
        """Ends the thread, when nothing is under way, and the connections; idempotent.

        Other members' devices must have done what this one takes part in.
        """
        self._watch.close()
        streams, self.streams = self.streams, None
        if streams is not None and self._failure is None:
            self._end_collectives(streams)  # (shutdown() would wait for other ranks.)
