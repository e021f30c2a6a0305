"""All-gathers between the devices of the ranks: this rank's shard alone crosses the link to it.

The shard goes to its place in the slots of the device, and the other ranks' come there from their
devices. The host gives both to the device and goes on; what is computed with the chunk waits for
it there.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from contextlib import ExitStack

import torch

from hetero.chunks.layout import Chunk, Layout
from hetero.ranks.communicator import Communicator
from hetero.ranks.device_group import DeviceGroup
from hetero.ranks.peers import Channel
from hetero.state.gathering.all_gather import Gathering
from hetero.state.memory.homes import Homes
from offload.device.cuda_backend import CudaBackend
from offload.device.event_pool import Event
from offload.device.fetch_queue import FetchQueue
from offload.errors import PeerError
from offload.memory.arena import HostArena
from offload.memory.operation import Operation


class _OnDevice:
    """GatherTarget: slots of the device, until the device was told to gather."""

    def __init__(
        self,
        chunk: Chunk,
        whole: torch.Tensor | None,
        computed: Event | None,
        unused: Sequence[Event],
    ) -> None:
        """As CudaBackend.gather() has it."""
        self.chunk = chunk
        self.whole = whole
        self.computed = computed
        self.unused = unused
        self.is_begun = False
        self.lock = threading.Lock()  # guards `whole` and `is_begun`

    def let_go(self) -> bool:
        """What was begun is ordered before whatever uses the slots next."""
        with self.lock:
            if not self.is_begun:
                self.whole = None
            return not self.is_begun


class DeviceTransport:
    """Shards come together in the memory of the device."""

    def __init__(
        self,
        peers: Communicator,
        group: DeviceGroup,
        backend: CudaBackend,
        layout: Layout,
        homes: Homes,
        unkept: HostArena,
    ) -> None:
        """Nothing is gathered yet.

        Args:
            peers: the ranks of the shard group.
            group: their devices.
            backend: this rank's device.
            layout: of the chunks.
            homes: of this rank's shards of parameters.
            unkept: slots of the device for a chunk that this rank gathers for the others alone.
        """
        self._peers = peers
        self._group = group
        self._backend = backend
        self._shard = layout.shard
        self._homes = homes
        self._unkept = unkept

    def target(self, chunk: Chunk, whole: torch.Tensor | None) -> _OnDevice:
        on_device = self._homes.on_device(chunk)
        computed = self._backend.record_event() if on_device else None
        unused = [] if whole is None else self._backend.unused_after(whole)
        return _OnDevice(chunk, whole, computed, unused)

    def gather(
        self,
        target: _OnDevice,
        shard: torch.Tensor | None,
        what: str,
        opened: ExitStack,
        keeps: bool,
    ) -> None:
        streams = self._group.check()
        # No device waits for a rank that has nothing to give.
        lacking = torch.tensor([shard is None], dtype=torch.uint8)
        meeting = self._peers.begin_any(lacking, what, Channel.GATHERS)
        meeting.wait()
        if shard is None or bool(lacking):
            return
        with target.lock:
            whole, unused = target.whole, target.unused
            if whole is None:
                whole = self._unkept.view(0, target.chunk.slots, torch.uint8)
                unused = self._backend.unused_after(whole)
            own = whole[self._shard.range(whole.numel())]
            source = shard.view(torch.uint8)
            done = self._backend.gather(streams, whole, own, source, target.computed, unused)
            target.is_begun = True
        self._peers.note_exchanged(whole.nbytes)
        # The shard is needed until the device has read it.
        kept = opened.pop_all()
        self._group.look_after(done, meeting.operation, what, kept.close)

    def finish(self) -> None:
        self._group.wait_all()

    def close(self) -> None:
        with contextlib.suppress(PeerError):  # whoever needs what failed has met it
            self.finish()


class DeviceGathers:
    """Fills slots of the device, with all ranks or one-sided: the Backing of a cache there."""

    def __init__(
        self, gathering: Gathering, arena: HostArena, layout: Layout, fetches: FetchQueue
    ) -> None:
        """
        Args:
            gathering: its stream gathers to the device.
            arena: the device's slots.
            layout: of the chunks.
            fetches: brings what is read one-sided, through RAM.
        """
        self._gathering = gathering
        self._arena = arena
        self._layout = layout
        self._fetches = fetches

    def read(self, chunk: int, slot: int) -> Operation:
        """Starts bringing a chunk to the slots from `slot` on, with all ranks if expected."""
        if not self._gathering.take_expected(chunk):
            return self._fetches.read(chunk, slot)
        found = self._layout.chunks[chunk]
        whole = self._arena.view(slot, found.slots, torch.uint8)
        alone = self._fetches.read
        return self._gathering.stream.start(found, whole, lambda: alone(chunk, slot).wait())

    def write(self, chunk: int, slot: int) -> Operation:
        """Not used: gathered copies are never changed."""
        raise AssertionError("gathered copies are never written")
