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


class _DeviceTarget:
    """Memory for a chunk until the device was told to gather: slots there, or a whole home, whose
    values all ranks are about to need."""

    def __init__(
        self,
        chunk: Chunk,
        whole: torch.Tensor | None,
        computed: Event | None,
        unused: Sequence[Event],
        is_home: bool,
    ) -> None:
        """As CudaBackend.gather() has it; `computed` is None of a home in RAM."""
        self.chunk = chunk
        self.whole = whole  # flat bytes; a pin of a home
        self.computed = computed
        self.unused = unused
        self.is_home = is_home
        self.lock = threading.Lock()  # guards `whole` and what follows
        self._comes = is_home
        self._follow: Callable[[], object] = lambda: None

    def let_go(self) -> bool:
        """Returns False if all of it will come: a home's gather begins on all ranks together, in a
        call that all of them make, and any that was begun is ordered before whatever uses the slots
        next."""
        with self.lock:
            if not self._comes:
                self.whole = None
            return not self._comes

    def begun(self, follow: Callable[[], object]) -> None:
        """The device was told to gather; what follow() is to do."""
        self.whole, self._comes, self._follow = None, True, follow

    def follow(self) -> None:
        """The device waits for what its homes get, and the host for what comes to RAM. (A tensor
        over slots follows when it is made.)"""
        self._follow()


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

    def target(self, chunk: Chunk, whole: torch.Tensor | None) -> _DeviceTarget:
        on_device, is_home = self._homes.on_device(chunk), self._homes.whole
        computed = self._backend.record_event() if on_device else None
        to = None if whole is None else whole.view(torch.uint8)
        unused: Sequence[Event] = []
        if to is not None and (on_device or not is_home):
            unused = self._backend.unused_after(to)
        return _DeviceTarget(chunk, to, computed, unused, is_home)

    def gather(
        self,
        target: _DeviceTarget,
        shard: torch.Tensor | None,
        what: str,
        opened: ExitStack,
        keeps: bool,
    ) -> bool:
        streams = self._group.check()
        # No device waits for a rank that has nothing to give.
        lacking = torch.tensor([shard is None], dtype=torch.uint8, device="cpu")
        meeting = self._group.peers.begin_any(lacking, what, Channel.GATHERS)
        meeting.wait()
        if shard is None or bool(lacking):
            return False
        operation, ended = meeting.operation, threading.Event()

        def wait() -> None:
            self._group.peers.wait_for(ended, operation, what)
            self._group.check()

        with target.lock:
            done = self._give(streams, target, shard.view(torch.uint8))
            if not target.is_home:
                target.begun(lambda: None)
            elif target.computed is None:
                target.begun(wait)
            else:
                runtime = self._backend.runtime
                target.begun(lambda: runtime.wait(runtime.current_stream(), done))
        at_end: Callable[[], object] = ended.set
        if not target.is_home:  # the shard is needed until the device has read it
            at_end = opened.pop_all().close
        self._group.look_after(done, operation, what, at_end)
        return True

    def _give(self, streams: DeviceStreams, target: _DeviceTarget, source: torch.Tensor) -> Event:
        """As CudaBackend.gather() has it; the target's lock is held."""
        whole, home, unused = target.whole, None, target.unused
        if target.is_home and target.computed is None:
            whole, home = None, whole
        if whole is None:
            whole = self._unkept.view(0, target.chunk.slots, torch.uint8)
            unused = self._backend.unused_after(whole)
        own = whole[self._shard.range(whole.numel())]
        done = self._backend.gather(streams, whole, own, source, target.computed, unused, home)
        self._group.peers.note_exchanged(whole.nbytes)
        return done

    def finish(self) -> None:
        self._group.wait_all()

    def let_go(self) -> None:
        """Nothing is lent: devices have sent what others need."""

    def close(self) -> None:
        with contextlib.suppress(PeerError):  # whoever needs what failed has met it
            self.finish()
