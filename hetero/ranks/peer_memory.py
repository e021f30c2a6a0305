"""Other ranks' memory, read where it lies, by ranks whose processes run on one machine.

Linux copies from one process to another (process_vm_readv): once, where a socket takes the bytes in
packets, in and out. The ranks lend each other memory, all for the same operation, and it is theirs
again when all have read what they need; only those two moments go through gloo.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

import torch

from hetero.ranks.collectives import Collectives
from hetero.ranks.gathered_parts import GatheredParts
from hetero.ranks.messages import as_bytes
from hetero.ranks.peers import Channel
from hetero.ranks.waiting import Job
from offload import _native
from offload.memory.operation import Worker


def connect_peer_memory(peers: Collectives) -> PeerMemory | None:
    """The members' memory; None on all of them unless each can read that of each other one.

    They cannot if they run on several machines, in containers that do not see each other's
    processes, or where the system forbids it. All members must call it. Raises PeerError.
    """
    _native.permit_peers_to_read()
    what = "looking for ranks of this machine"
    secret = torch.tensor([secrets.randbits(62)])
    mine = torch.tensor([_place(), os.getpid(), secret.data_ptr(), int(secret)])
    found = peers.all_gather(mine, what)
    memory = PeerMemory(peers, found[:, 1].tolist())
    can_read = bool(found[:, 0].eq(mine[0]).all()) and all(
        memory.has(peer, address, number)
        for peer, (_, _, address, number) in enumerate(found.tolist())
    )
    if peers.any(torch.tensor([not can_read], dtype=torch.uint8), what):
        return None
    return memory


def _place() -> int:
    """A number of this boot of this machine, and of the processes that this one can see."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    visible = os.stat("/proc/self/ns/pid").st_ino
    return int.from_bytes(blake2b(boot + str(visible).encode(), digest_size=7).digest(), "little")


class PeerMemory:
    """Memory that the members of a group lend each other."""

    def __init__(self, peers: Collectives, processes: list[int]) -> None:
        """`processes` are the members' numbers in the system."""
        self._peers = peers
        self._processes = processes
        self._worker = Worker("peer-memory")
        self._last: PartsFromPeers | None = None

    def has(self, peer: int, address: int, number: int) -> bool:
        """Whether an int64 at an address of a member's can be read, and is `number`."""
        found = torch.zeros(1, dtype=torch.int64)
        try:
            self._copy(peer, address, found)
        except OSError:
            return False
        return int(found) == number

    def gather(self, part: torch.Tensor, parts: GatheredParts, what: str, channel: Channel) -> None:
        """Puts every member's `part`, flat bytes, into `parts`. Raises PeerError."""
        with self._lent(part, what, channel) as addresses, parts.lock:
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
        mine = torch.tensor([memory.data_ptr()])
        addresses = mine.new_empty(self._peers.size)
        self._peers.begin(
            channel, what, lambda g: g._allgather_base(addresses, mine), addresses, mine, memory
        ).wait()
        yield addresses.tolist()
        nothing = torch.zeros(1, dtype=torch.uint8)
        self._peers.begin_any(nothing, what, channel).wait()  # all have read

    def _read(self, addresses: list[int], rows: list[torch.Tensor], offset: int, what: str) -> None:
        """Fills the rows of the other members by what each has at its address, `offset` further."""
        size, rank = self._peers.size, self._peers.rank
        for distance in range(1, size):  # so that not all read from the same one
            peer = (rank + distance) % size
            try:
                self._copy(peer, addresses[peer] + offset, rows[peer])
            except OSError as error:
                raise self._peers.failure(peer, what, str(error)) from error

    def _copy(self, peer: int, address: int, into: torch.Tensor) -> None:
        _native.read_peer_memory(self._processes[peer], address, into.data_ptr(), into.nbytes)

    def close(self) -> None:
        """Ends the thread; what it is in, other ranks may not take part in any more."""
        if self._last is not None and not self._last.job.has_ended:
            self._peers.break_off()
        self._worker.close()


class PartsFromPeers:
    """Parts that other members lend this one, on their way."""

    def __init__(self, peers: Collectives, exchange: Callable[[], None]) -> None:
        """`exchange` brings them; `job` calls it."""
        self._peers = peers
        self.job = Job(exchange)

    def wait(self) -> None:
        """Returns when all members have what they need of each other. Raises PeerError."""
        self._peers.wait_for_job(self.job)
