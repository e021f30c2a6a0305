"""The connections of a group of ranks, over which chunks and gradients go from rank to rank."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from hetero.ranks.collectives import Collective, Collectives, GatheredParts, as_bytes
from hetero.ranks.peer_memory import PartsFromPeers, connect_peer_memory
from hetero.ranks.peers import Channel

# gloo's all-gather takes more than twice as long as its all-to-all of as many bytes
# (docs/benchmarks.md), so this rank's part is sent by all-to-alls, in pieces of so many bytes.
_PIECE_BYTES = 4 << 20


class BothWays:
    """torch.distributed's work for two operations that are one; wait() as a work has it."""

    def __init__(self, *works: Any) -> None:
        self._works = works

    def wait(self, *limit: timedelta) -> None:
        """Waits for each. Raises RuntimeError if one has failed, or is not done within `limit`."""
        errors: list[RuntimeError] = []
        for work in self._works:
            try:
                work.wait(*limit)
            except RuntimeError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def is_completed(self) -> bool:
        """Whether both have ended, well or not."""
        return all(work.is_completed() for work in self._works)


class Offered(NamedTuple):
    """What this rank offers for a gather, and where the others' parts are, if memory is read."""

    part: torch.Tensor
    addresses: Sequence[int]


class Communicator(Collectives):
    """Connects this rank with the other members of one group of ranks.

    Chunks and their gradients, whose sizes are the same on all ranks, it brings from memory to
    memory where the members can read each other's, else by gloo.
    """

    def __init__(self, *connection: Any) -> None:
        """Connects the members, as Peers does with these arguments."""
        self._pieces: dict[Channel, list[torch.Tensor]] = {}
        super().__init__(*connection)
        self._memory = connect_peer_memory(self)
        if self._memory is None and self.size > 1:
            self.connect_returns(Channel.GRADIENTS, Channel.GATHERS)

    @property
    def reads_memory(self) -> bool:
        """Whether chunks and gradients are read from the members' memory; else gloo sends them."""
        return self._memory is not None

    def begin_all_to_all(
        self, into: torch.Tensor, parts: torch.Tensor, what: str, channel: Channel
    ) -> Collective | PartsFromPeers:
        """Starts sending each member its part of `parts`, and receiving this rank's parts.

        Both are flat and divided into as many equal parts as there are members, in their order.
        Whether `into` gets this rank's own part, too, is not said. Raises PeerError.
        """
        self.note_exchanged(parts.nbytes)
        if self._memory is not None:
            return self._memory.begin_all_to_all(into, parts, what, channel)
        return self._all_to_all_duplex(as_bytes(into), as_bytes(parts), what, channel)

    def _all_to_all_duplex(
        self, into: torch.Tensor, parts: torch.Tensor, what: str, channel: Channel
    ) -> Collective:
        """begin_all_to_all() by gloo: what goes to higher ranks, and what goes to lower ones, each
        over connections of its own."""
        length, own = parts.numel() // self.size, self.rank
        below, above = slice(0, own * length), slice((own + 1) * length, None)
        to_lower = [length * (peer < own) for peer in range(self.size)]
        to_higher = [length * (peer > own) for peer in range(self.size)]
        into_flat, parts_flat = into.view(-1), parts.view(-1)

        def start(up: Any) -> BothWays:
            down = self._return_groups[channel]
            return BothWays(
                up.alltoall_base(into_flat[below], parts_flat[above], to_lower, to_higher),
                down.alltoall_base(into_flat[above], parts_flat[below], to_higher, to_lower),
            )

        return self.begin(channel, what, start, into, parts)

    def gather_parts(
        self, part: torch.Tensor, parts: GatheredParts, what: str, channel: Channel
    ) -> None:
        """Puts every member's `part`, flat, into `parts`. Raises PeerError."""
        offered = self.offer(part, what, channel)
        assert offered is not None
        self.gather_offered(offered, parts, what, channel)
        self.meet_readers(what, channel)

    def offer(self, part: torch.Tensor | None, what: str, channel: Channel) -> Offered | None:
        """Comes to a gather with this rank's part, flat, on any device; None: it has none.

        Returns when all members have come: what is offered, or None if one of them has no part.
        Raises PeerError.
        """
        mine = None if part is None else as_bytes(part)
        if self._memory is None:
            lacking = torch.tensor([mine is None], dtype=torch.uint8, device="cpu")
            self.begin_any(lacking, what, channel).wait()
            return None if mine is None or lacking else Offered(mine, ())
        mine = None if mine is None else mine.cpu()
        addresses = self._memory.offer(mine, what, channel)
        return None if mine is None or not all(addresses) else Offered(mine, addresses)

    def meet_readers(self, what: str, channel: Channel) -> None:
        """Until no member reads what this one has offered. Raises PeerError."""
        if self._memory is not None:
            nothing = torch.zeros(1, dtype=torch.uint8, device="cpu")
            self.begin_any(nothing, what, channel).wait()

    def gather_offered(
        self, offered: Offered, parts: GatheredParts, what: str, channel: Channel
    ) -> None:
        """Puts what all members have offered into `parts`. Raises PeerError.

        Others may still read this rank's, until meet_readers() or the next offer() returns.
        """
        own = offered.part
        self.note_exchanged(own.nbytes * self.size)
        if self._memory is not None:
            self._memory.gather(offered.addresses, own, parts, what)
            return
        length = min(len(own), max(1, _PIECE_BYTES // self.size))
        count = 2 if length < len(own) else 1  # one is on its way while another is stored
        buffers = self._piece_buffers(channel, count, self.size * length)
        under_way: list[tuple[Collective, int, torch.Tensor]] = []

        def store_first() -> None:
            collective, begin, received = under_way.pop(0)
            collective.wait()
            parts.store(begin, received)

        for number, mine in enumerate(own.split(length)):
            if len(under_way) == count:
                store_first()
            buffer = buffers[number % count][:, : self.size * len(mine)]
            sent, received = buffer[0].view(self.size, -1), buffer[1].view(self.size, -1)
            sent.copy_(mine.expand_as(sent))
            received[self.rank].copy_(mine)
            begun = self._all_to_all_duplex(received, sent, what, channel)
            under_way.append((begun, number * length, received))
        while under_way:
            store_first()

    def retract(self) -> None:
        """Memory is freed from which others may still read: they get an error then. Idempotent."""
        if self._memory is not None:
            self._memory.retract()

    def _piece_buffers(self, channel: Channel, count: int, length: int) -> list[torch.Tensor]:
        """So many buffers for the bytes of a piece, as it is sent and as it is received.

        They are kept for the channel's next gather.
        """
        kept = self._pieces.setdefault(channel, [])
        if len(kept) < count or kept[0].shape[1] < length:
            kept[:] = [
                torch.empty(2, length, dtype=torch.uint8, device="cpu") for _ in range(count)
            ]
        return kept[:count]

    def note_exchanged(self, whole_bytes: int) -> None:
        """Counts what a rank sends, and receives, of as many bytes of all members together."""
        nbytes = whole_bytes * (self.size - 1) // self.size
        with self._lock:
            self.sent_bytes += nbytes
            self.received_bytes += nbytes

    def close(self) -> None:
        """Drops the connections."""
        if self._memory is not None:
            self._memory.close()
        super().close()
