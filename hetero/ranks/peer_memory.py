"""Other ranks' memory, read where it lies, by ranks whose processes run on one machine.

Linux copies from one process to another (process_vm_readv): once, where a socket takes the bytes in
packets, in and out. The ranks lend each other memory, all for the same operation, and it is theirs
again when all have read what they need; only those two moments go through gloo. That all have read
what was lent for a gather shows in the next gather, to which a rank comes when it has.

A rank that closes its engine frees what it has lent, perhaps while another one still reads. Each
rank therefore has a *mark*, a random number, which it overwrites before it frees anything. Who has
read looks at the mark: if it is still there, all that was read before it was the owner's.

At their start the ranks try it, by a random number in each other's memory. If one of them cannot
read one other, all send by gloo. Where Yama lets only ancestors read a process (ptrace_scope 1),
which that try shows, a rank permits processes of the same user to read it, and takes that back when
it closes its engine, or at once if it does not help.
"""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import NamedTuple

import torch

from hetero.ranks.collectives import Collectives, GatheredParts, as_bytes
from hetero.ranks.peers import Channel
from hetero.ranks.start.machine import boot_id
from hetero.ranks.waiting import WaitingJob
from offload import _native
from offload.memory.operation import Worker


def connect_peer_memory(peers: Collectives) -> PeerMemory | None:
    """The members' memory; None on all of them unless each can read that of each other one.

    They cannot if they run on several machines, in containers that do not see each other's
    processes, where the system forbids it, or if HETERO_PEER_MEMORY is 0 in the environment of one
    of them. All members must call it. Raises PeerError.
    """
    what = "looking for ranks of this machine"
    mark = torch.tensor([1 + secrets.randbits(62)], device="cpu")
    mine = torch.tensor([_place(), os.getpid(), mark.data_ptr(), int(mark)], device="cpu")
    found = peers.all_gather(mine, what)
    processes = [Process(*numbers) for numbers in found[:, 1:].tolist()]
    memory = PeerMemory(peers, mark, processes)

    def every(holds: bool) -> bool:
        return not peers.any(torch.tensor([not holds], dtype=torch.uint8, device="cpu"), what)

    def every_one_reads() -> bool:
        return every(all(map(memory.lends, range(peers.size))))

    is_wanted = os.environ.get("HETERO_PEER_MEMORY") != "0"
    if not every(is_wanted and bool(found[:, 0].eq(mine[0]).all())):
        return None
    if every_one_reads():
        return memory
    memory.permit()
    if every(True) and every_one_reads():  # the first: when all have permitted it
        return memory
    memory.withdraw()
    return None


def _place() -> int:
    """A number of this boot of this machine, and of the processes that this one can see."""
    place = f"{boot_id()} {os.stat('/proc/self/ns/pid').st_ino}"
    return int.from_bytes(blake2b(place.encode(), digest_size=7).digest(), "little")


_PIECE_BYTES = 4 << 20  # on its way to a device


class Process(NamedTuple):
    """A member's process: its number in the system, and its mark, by address and value."""

    pid: int
    mark_address: int
    mark: int


# Those for which others may read this process's memory.
_permitting: weakref.WeakSet[PeerMemory] = weakref.WeakSet()


class PeerMemory:
    """Memory that the members of a group lend each other."""

    def __init__(
        self, peers: Collectives, mark: torch.Tensor, processes: Sequence[Process]
    ) -> None:
        """`mark` is this rank's own, int64; `processes` are the members'."""
        self._peers = peers
        self._mark = mark
        self._processes = processes
        self._worker = Worker("peer-memory")
        self._last: PartsFromPeers | None = None

    def lends(self, peer: int) -> bool:
        """Whether a member's memory can be read, and it has freed nothing of what it has lent."""
        found = torch.zeros(1, dtype=torch.int64, device="cpu")
        try:
            self._copy(peer, self._processes[peer].mark_address, found)
        except OSError:
            return False
        return int(found) == self._processes[peer].mark

    def permit(self) -> None:
        """Lets the members read this process's memory where Linux permits that to ancestors alone.

        It can be permitted to all processes of the user only.
        """
        _permitting.add(self)
        _native.permit_peers_to_read(True)

    def withdraw(self) -> None:
        """Takes that back, when no other group needs it; idempotent."""
        if self in _permitting:
            _permitting.discard(self)
            if not _permitting:
                _native.permit_peers_to_read(False)

    def retract(self) -> None:
        """What this rank has lent is freed now: who has not read it yet gets an error."""
        self._mark.zero_()

    def gather(
        self, addresses: Sequence[int], part: torch.Tensor, parts: GatheredParts, what: str
    ) -> None:
        """Puts every member's part into `parts`: it is at its address, and this rank's is `part`.

        Raises PeerError.
        """
        with parts.lock:
            if parts.rows is None:
                return
            own = parts.rows[self._peers.rank]
            if own.data_ptr() != part.data_ptr():
                own.copy_(part)
            self._read(addresses, list(parts.rows), 0, what)

    def begin_all_to_all(
        self, into: torch.Tensor, parts: torch.Tensor, what: str, channel: Channel
    ) -> PartsFromPeers:
        """As Communicator.begin_all_to_all(), in a thread; this rank's own part is left out.

        What goes wrong, wait() of what this returns raises.
        """
        rows = list(as_bytes(into).view(self._peers.size, -1))
        lent = as_bytes(parts)

        def exchange() -> None:
            with self._lent(lent, what, channel) as addresses:
                self._read(addresses, rows, self._peers.rank * len(rows[0]), what)

        self._last = PartsFromPeers(self._peers, exchange)
        self._worker.do(self._last.job.run)
        return self._last

    @contextmanager
    def _lent(self, memory: torch.Tensor, what: str, channel: Channel) -> Iterator[list[int]]:
        """Inside the block all members may read each other's `memory`, at these addresses."""
        yield self.offer(memory, what, channel)
        nothing = torch.zeros(1, dtype=torch.uint8, device="cpu")
        self._peers.begin_any(nothing, what, channel).wait()  # all have read

    def offer(self, memory: torch.Tensor | None, what: str, channel: Channel) -> list[int]:
        """The addresses of all members' `memory`, when all have come; 0 of one that has none."""
        mine = torch.tensor([0 if memory is None else memory.data_ptr()], device="cpu")
        addresses = mine.new_empty(self._peers.size)
        self._peers.begin(
            channel, what, lambda g: g._allgather_base(addresses, mine), addresses, mine
        ).wait()
        return addresses.tolist()

    def _read(
        self, addresses: Sequence[int], rows: list[torch.Tensor], offset: int, what: str
    ) -> None:
        """Fills the rows of the other members by what each has at its address, `offset` further."""
        size, rank = self._peers.size, self._peers.rank
        for distance in range(1, size):  # so that not all read from the same one
            peer = (rank + distance) % size
            try:
                self._copy(peer, addresses[peer] + offset, rows[peer])
            except OSError as error:
                raise self._peers.failure(peer, what, str(error)) from error
            if not self.lends(peer):
                raise self._peers.failure(peer, what, "it has freed what it lent")

    def _copy(self, peer: int, address: int, into: torch.Tensor) -> None:
        pid = self._processes[peer].pid
        if into.device.type == "cpu":
            _native.read_peer_memory(pid, address, into.data_ptr(), into.nbytes)
            return
        # A home on a device that ranks share: Linux copies to RAM alone.
        piece = torch.empty(min(into.nbytes, _PIECE_BYTES), dtype=torch.uint8, device="cpu")
        for part in as_bytes(into).split(_PIECE_BYTES):
            _native.read_peer_memory(pid, address, piece.data_ptr(), part.nbytes)
            part.copy_(piece[: part.nbytes])
            address += part.nbytes

    def close(self) -> None:
        """Ends the thread; what it is in, other ranks may not take part in any more."""
        self.retract()
        if self._last is not None and not self._last.job.has_ended:
            self._peers.break_off()
        self._worker.close()
        self.withdraw()


class PartsFromPeers:
    """Parts that other members lend this one, on their way."""

    def __init__(self, peers: Collectives, exchange: Callable[[], None]) -> None:
        """`exchange` brings them; `job` calls it."""
        self._peers = peers
        self.job = WaitingJob(exchange)

    def wait(self) -> None:
        """Returns when all members have what they need of each other. Raises PeerError."""
        self._peers.wait_for_job(self.job)
