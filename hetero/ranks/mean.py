"""Means of gradients over the ranks of a shard group and over its replicas."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hetero.chunks.dtypes import check_dtype
from hetero.ranks.messages import AllToAll, Channel, Communicator
from hetero.ranks.process_groups import ProcessGroups
from offload import _native
from offload.memory.arena import HostArena


class RankMean:
    """The mean of a flat gradient over all ranks; each rank of a shard group gets its part.

    A reduce-scatter over the shard group, then, with hybrid sharding, an all-reduce of the part
    over the replicas. Sums are made in fp32 in the order of the ranks and rounded once, so they do
    not depend on the network, and fp16 gradients do not overflow on the way to their mean.
    """

    def __init__(
        self,
        world: ProcessGroups,
        flat: torch.Tensor | None,
        received: torch.Tensor,
        replica_arena: HostArena | None,
        what: str,
    ) -> None:
        """Starts sending each rank of the shard group its part of `flat`.

        No tensor may be used otherwise until the mean has been made.

        Args:
            world: the ranks.
            flat: this rank's gradient, whole; None: this rank has none, and zeros are sent.
            received: memory of as many elements for the parts that other ranks send to this one.
            replica_arena: holds what other replicas send; None without replicas.
            what: names the gradient in errors.
        """
        self._world = world
        self._replica_arena = replica_arena
        self._parts = _parts(world.shard, flat, received)
        self._received = received
        self._what = what
        self._sending: AllToAll | None = None
        if world.shard is not None:
            self._sending = _send_parts(world.shard, self._parts, received, what)

    def wait(self) -> None:
        """Returns when all parts have been sent and received. Raises PeerError."""
        if self._sending is not None:
            self._sending.wait()

    def compute(self) -> torch.Tensor:
        """Makes the mean, after wait(); all replicas of a shard must do so.

        Returns this rank's part of the mean, flat, in the memory of its part of the gradient, or of
        `received` if this rank had none. Raises PeerError.
        """
        mean = _average(self._world.shard, self._parts, self._received)
        replicas, arena = self._world.replicas, self._replica_arena
        if replicas is None:
            return mean
        assert arena is not None
        received = arena.view(0, arena.slots, mean.dtype)[: mean.numel()]
        parts = _parts(replicas, mean, received)
        _send_parts(replicas, parts, received, self._what).wait()
        own = _average(replicas, parts, received)
        replicas.all_to_all([own] * replicas.size, parts, self._what, Channel.GRADIENTS).wait()
        return mean

    def compute_parts(self, parts: Sequence[slice]) -> list[float] | None:
        """compute() for some elements of this rank's part of the gradient; others have no meaning.

        Args:
            parts: ranges of elements that do not overlap.

        Returns:
            The sum of squares of each of `parts`, taken in the same pass over memory; None with
            replicas, from which most of the mean comes then.

        Raises:
            PeerError: another rank failed, or did not come.
        """
        if self._world.replicas is not None:
            self.compute()
            return None
        assert self._world.shard is not None
        own, addresses = _summands(self._world.shard, self._parts, self._received)
        return _native.mean_and_sums(
            check_dtype(str(own.dtype), "dtype"),
            addresses,
            own.data_ptr(),
            [(part.start, part.stop - part.start) for part in parts],
        )


def _parts(
    group: Communicator | None, flat: torch.Tensor | None, received: torch.Tensor
) -> list[torch.Tensor]:
    """What each rank of `group` gets of `flat`; without one, the same zeros.

    This rank's own part is also where the mean is going to be.
    """
    if flat is not None:
        return [flat] if group is None else list(flat.chunk(group.size))
    own = received if group is None else received.chunk(group.size)[group.rank]
    own.zero_()
    return [own] * (1 if group is None else group.size)


def _send_parts(
    group: Communicator, parts: Sequence[torch.Tensor], received: torch.Tensor, what: str
) -> AllToAll:
    return group.all_to_all(parts, received.chunk(group.size), what, Channel.GRADIENTS)


def _average(
    group: Communicator | None, parts: Sequence[torch.Tensor], received: torch.Tensor
) -> torch.Tensor:
    """The mean of this rank's part over `group`, written to the place of that part."""
    if group is None:
        return parts[0]
    own, addresses = _summands(group, parts, received)
    _native.mean(check_dtype(str(own.dtype), "dtype"), addresses, own.data_ptr(), own.numel())
    return own


def _summands(
    group: Communicator, parts: Sequence[torch.Tensor], received: torch.Tensor
) -> tuple[torch.Tensor, list[int]]:
    """This rank's part, and the addresses of all ranks' versions of it, in the ranks' order."""
    own, others = parts[group.rank], received.chunk(group.size)
    summands = [own if peer == group.rank else others[peer] for peer in range(group.size)]
    return own, [summand.data_ptr() for summand in summands]
