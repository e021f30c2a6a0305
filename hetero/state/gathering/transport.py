"""What carries the shards of an all-gather from rank to rank, once all ranks have come to it.

Between devices this rank's shard alone crosses the link to it. The shard goes to its place in the
slots of the device, and the other ranks' come there from their devices. The host gives both to the
device and goes on; what is computed with the chunk waits for it there. What every rank has whole
(stages 1 and 2) is gathered to its home: in place if that is on the device, else in slots there,
from which the other ranks' shards are copied to RAM. Homes of one chunk may be on the device of one
rank, and in RAM of another: to the others it is all the same.

Gathers to homes in RAM have one slot on the device, so the next chunk's goes up when this one's has
come down. Ranks that share a GPU gather whole homes in RAM, by gloo, and what Muon's updates
exchange; shards they read one-sided, to slots in RAM on their way to the device.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from hetero.chunks.layout import Chunk, Layout
from hetero.ranks.collectives import GatheredParts
from hetero.ranks.communicator import Communicator, Offered
from hetero.ranks.device_group import DeviceGroup
from hetero.ranks.peers import Channel
from hetero.state.memory import Homes
from offload.device.cuda_backend import CudaBackend, DeviceStreams
from offload.device.cuda_runtime import Event
from offload.errors import PeerError
from offload.memory.arena import HostArena


class GatherTransport:
    """Brings the shards of all ranks together: in RAM, by gloo, wherever they are.

    Which transport it is all ranks have decided alike.
    """

    def __init__(self, peers: Communicator) -> None:
        """Over the connections of `peers`."""
        self._peers = peers
        # What other ranks may still read, and what holds it.
        self._offered: Offered | None = None
        self._lent = ExitStack()

    def target(self, chunk: Chunk, whole: torch.Tensor | None) -> Any:
        """What gather() fills: `whole`, flat; None: what comes is not kept.

        Called as the gather is started, in the thread that computes. It has let_go(), which
        returns False if all of the chunk will come nevertheless, and follow(), as GatheredParts.
        """
        return GatheredParts(whole, self._peers.size)

    def gather(
        self,
        target: Any,
        shard: torch.Tensor | None,
        what: str,
        opened: ExitStack,
        keeps: bool,
    ) -> bool:
        """Brings the shards to `target`, which target() has made; all ranks call it.

        When it returns they are there for whatever follows the target. Other ranks may still read
        this one's. Returns False, with nothing brought, if some rank has none. Raises PeerError.

        Args:
            target: where to.
            shard: this rank's, flat; None: it has none.
            what: names the gather in errors.
            opened: keeps the shard for the caller; the transport may take that over.
            keeps: this rank may wait for other ranks while it keeps the shard.
        """
        peers, channel = self._peers, Channel.GATHERS
        offered = peers.offer(shard, what, channel)
        self.let_go()  # who has come to this gather has read for the last one
        if offered is None:
            return False
        if keeps and peers.reads_memory:
            self._lent, self._offered = opened.pop_all(), offered
        peers.gather_offered(offered, target, what, channel)
        if not keeps:
            peers.meet_readers(what, channel)
        return True

    def finish(self) -> None:
        """Until nothing is under way on a device. Raises PeerError."""

    def let_go(self) -> None:
        """All ranks have made the gathers that this rank has: none reads its shards any more."""
        self._offered = None
        self._lent.close()

    def close(self) -> None:
        """What is gathered from is freed now. Idempotent."""
        self._peers.retract()
        self.let_go()


class _OnDevice:
    """Slots of the device, until the device was told to gather."""

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

    def follow(self) -> None:
        """A tensor over the slots does, when it is made."""


class _AtHome:
    """A whole home, whose values all ranks are about to need."""

    def __init__(
        self,
        chunk: Chunk,
        home: torch.Tensor,
        computed: Event | None,
        unused: Sequence[Event],
        backend: CudaBackend,
    ) -> None:
        """As CudaBackend.gather() has it; `computed` is None of a home in RAM."""
        self.chunk = chunk
        self.home: torch.Tensor | None = home  # until the device was told to gather: it is a pin
        self.computed = computed
        self.unused = unused
        self._backend = backend
        self._done: Event | None = None
        self._wait: Callable[[], object] = lambda: None
        self.has_ended = threading.Event()

    def let_go(self) -> bool:
        """All of it will come: it begins on all ranks together, in a call that all of them make."""
        return False

    def begun(self, done: Event, wait: Callable[[], object]) -> None:
        """The device was told to gather; `wait` waits for `has_ended`, which then comes."""
        self.home, self._done, self._wait = None, done, wait

    def follow(self) -> None:
        """The device waits for what its homes get, and the host for what comes to RAM."""
        assert self._done is not None
        if self.computed is not None:
            self._backend.follow(self._done)
        else:
            self._wait()


class DeviceTransport(GatherTransport):
    """Shards come together in the memory of the device."""

    def __init__(
        self,
        group: DeviceGroup,
        backend: CudaBackend,
        layout: Layout,
        homes: Homes,
        unkept: HostArena,
    ) -> None:
        """Nothing is gathered yet.

        Args:
            group: the devices of the shard group.
            backend: this rank's device.
            layout: of the chunks.
            homes: of this rank's shards of parameters.
            unkept: slots of the device for a chunk that does not stay there: this rank gathers it
                for the others alone, or its home is in RAM.
        """
        self._group = group
        self._backend = backend
        self._shard = layout.shard
        self._homes = homes
        self._unkept = unkept

    def target(self, chunk: Chunk, whole: torch.Tensor | None) -> _OnDevice | _AtHome:
        on_device = self._homes.on_device(chunk)
        computed = self._backend.record_event() if on_device else None
        if self._homes.whole:
            assert whole is not None
            home = whole.view(torch.uint8)
            unused = self._backend.unused_after(home) if on_device else []
            return _AtHome(chunk, home, computed, unused, self._backend)
        unused = [] if whole is None else self._backend.unused_after(whole)
        return _OnDevice(chunk, whole, computed, unused)

    def gather(
        self,
        target: _OnDevice | _AtHome,
        shard: torch.Tensor | None,
        what: str,
        opened: ExitStack,
        keeps: bool,
    ) -> bool:
        streams = self._group.check()
        # No device waits for a rank that has nothing to give.
        lacking = torch.tensor([shard is None], dtype=torch.uint8)
        meeting = self._group.peers.begin_any(lacking, what, Channel.GATHERS)
        meeting.wait()
        if shard is None or bool(lacking):
            return False
        source = shard.view(torch.uint8)
        operation = meeting.operation
        if isinstance(target, _AtHome):
            done = self._gather_at_home(streams, target, source)
            ended = target.has_ended

            def wait() -> None:
                self._group.peers.wait_for(ended, operation, what)
                self._group.check()

            target.begun(done, wait)
            self._group.look_after(done, operation, what, ended.set)
        else:
            done = self._gather_in_slots(streams, target, source)
            # The shard is needed until the device has read it.
            kept = opened.pop_all()
            self._group.look_after(done, operation, what, kept.close)
        return True

    def _gather_in_slots(
        self, streams: DeviceStreams, target: _OnDevice, source: torch.Tensor
    ) -> Event:
        with target.lock:
            whole, unused = target.whole, target.unused
            if whole is None:
                whole = self._unkept.view(0, target.chunk.slots, torch.uint8)
                unused = self._backend.unused_after(whole)
            target.is_begun = True
            return self._give(streams, whole, source, target.computed, unused)

    def _gather_at_home(
        self, streams: DeviceStreams, target: _AtHome, source: torch.Tensor
    ) -> Event:
        assert target.home is not None
        whole, home, unused = target.home, None, target.unused
        if target.computed is None:
            whole, home = self._unkept.view(0, target.chunk.slots, torch.uint8), whole
            unused = self._backend.unused_after(whole)
        return self._give(streams, whole, source, target.computed, unused, home)

    def _give(
        self,
        streams: DeviceStreams,
        whole: torch.Tensor,
        source: torch.Tensor,
        computed: Event | None,
        unused: Sequence[Event],
        home: torch.Tensor | None = None,
    ) -> Event:
        """As CudaBackend.gather() has it."""
        own = whole[self._shard.range(whole.numel())]
        done = self._backend.gather(streams, whole, own, source, computed, unused, home)
        self._group.peers.note_exchanged(whole.nbytes)
        return done

    def finish(self) -> None:
        self._group.wait_all()

    def let_go(self) -> None:
        """Nothing is lent: devices have sent what others need."""

    def close(self) -> None:
        with contextlib.suppress(PeerError):  # whoever needs what failed has met it
            self.finish()
