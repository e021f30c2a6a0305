"""Means of gradients over the ranks of a shard group and over its replicas."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hetero.chunks.dtypes import check_dtype
from hetero.ranks.collectives import Collective
from hetero.ranks.communicator import Communicator
from hetero.ranks.messages import GatheredParts
from hetero.ranks.peer_memory import PartsFromPeers
from hetero.ranks.peers import Channel
from hetero.ranks.process_groups import ProcessGroups
from offload import _native
from offload.memory.arena import HostArena


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
        replica_arena: HostArena | None,
        what: str,
        by_backend: bool = False,
    ) -> None:
        """Starts sending each rank of the shard group its part of `flat`.

        No tensor may be used otherwise until the mean has been made.

        Args:
            world: the ranks.
            flat: this rank's gradient, whole; zeros if it has none. It is not written to.
            received: memory of as many elements for the parts that ranks send to this one.
            replica_arena: holds what other replicas send; None without replicas.
            what: names the gradient in errors.
            by_backend: the shard group's sum is the backend's reduce-scatter, in the dtype of
                `flat` and an order of its own.
        """
        self._by_backend = by_backend
        self._world = world
        self._replica_arena = replica_arena
        self._flat = flat
        self._received = received
        self._what = what
        self._sending: Collective | PartsFromPeers | None = None
        shard = world.shard
        if shard is not None and by_backend:
            own = received.chunk(shard.size)[0]
            self._sending = shard.begin_reduce_scatter(own, flat, what, Channel.GRADIENTS)
        elif shard is not None:
            self._sending = shard.begin_all_to_all(received, flat, what, Channel.GRADIENTS)

    def wait(self) -> None:
        """Returns when all parts have been sent and received. Raises PeerError."""
        if self._sending is not None:
            self._sending.wait()

    def compute(self, into: torch.Tensor) -> None:
        """Makes the mean, after wait(); all replicas of a shard must do so.

        It goes to `into`, flat, of the length of a part; that may be this rank's part of `flat`, or
        of `received`. Raises PeerError.
        """
        if self._world.shard is None:
            into.copy_(self._flat)
        elif self._by_backend:
            size = self._world.shard.size
            torch.div(self._received.chunk(size)[0], size, out=into)
        else:
            _average(self._world.shard, self._received, self._flat, into)
        if self._replica_arena is not None:
            average_over_replicas(self._world, self._replica_arena, into, self._what)

    def compute_parts(self, into: torch.Tensor, parts: Sequence[slice]) -> list[float] | None:
        """compute() for some elements of this rank's part of the gradient; others have no meaning.

        Args:
            into: where the mean goes, as compute() says.
            parts: ranges of elements that do not overlap.

        Returns:
            The sum of squares of each of `parts`, taken in the same pass over memory; None with
            replicas, from which most of the mean comes then, and if the backend has summed.

        Raises:
            PeerError: another rank failed, or did not come.
        """
        if self._world.replicas is not None or self._by_backend:
            self.compute(into)
            return None
        assert self._world.shard is not None
        return _native.mean_and_sums(
            check_dtype(str(into.dtype), "dtype"),
            _addresses(self._world.shard, self._received, self._flat),
            into.data_ptr(),
            [(part.start, part.stop - part.start) for part in parts],
        )


def average_over_replicas(
    world: ProcessGroups, arena: HostArena, into: torch.Tensor, what: str
) -> None:
    """Makes of a shard group's mean that of all ranks; all replicas of the shard must call it.

    Args:
        world: the ranks.
        arena: holds what other replicas send.
        into: the mean of this rank's shard group, flat and in RAM, which becomes that of all.
        what: names the gradient in errors.

    Raises PeerError.
    """
    replicas = world.replicas
    assert replicas is not None
    received = arena.view(0, arena.slots, into.dtype)[: into.numel()]
    replicas.begin_all_to_all(received, into, what, Channel.GRADIENTS).wait()
    own = into.chunk(replicas.size)[replicas.rank]
    _average(replicas, received, into, own)
    parts = GatheredParts(into, replicas.size)
    replicas.gather_parts(own, parts, what, Channel.GRADIENTS)


def _average(
    group: Communicator, received: torch.Tensor, flat: torch.Tensor, into: torch.Tensor
) -> None:
    """Writes the mean of the parts of all members of `group` to `into`."""
    addresses = _addresses(group, received, flat)
    _native.mean(check_dtype(str(into.dtype), "dtype"), addresses, into.data_ptr(), into.numel())


def _addresses(group: Communicator, received: torch.Tensor, flat: torch.Tensor) -> list[int]:
    """Where the members' parts are, in the members' order: this rank's own in `flat`."""
    part_bytes = received.nbytes // group.size
    return [
        (flat if peer == group.rank else received).data_ptr() + peer * part_bytes
        for peer in range(group.size)
    ]
