"""One rank of many in this process: collectives of torch's fake process group, counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore

import hetero.ranks.communicator
import hetero.ranks.process_groups
from hetero.ranks.communicator import Communicator
from hetero.ranks.peers import Channel, Peers
from hetero.ranks.shard_server import ShardServer
from hetero.state.gathering import all_gather
from tests.support.waiting import PATIENCE_S


class CountedGroup:
    """A fake process group whose calls, and the bytes of their larger tensor, are counted.

    Of an all-to-all it counts the bytes that it sends.
    """

    def __init__(self, counts: Counts, channel: Channel, rank: int, size: int) -> None:
        self._counts, self._channel = counts, channel
        self._group = FakeProcessGroup._create_internal(rank, size)

    def __getattr__(self, name: str) -> Any:
        call: Callable[..., Any] = getattr(self._group, name)

        def counted(*args: Any) -> Any:
            tensors = [t for arg in args for t in (arg if isinstance(arg, list) else [arg])]
            nbytes = max(t.nbytes for t in tensors if isinstance(t, torch.Tensor))
            self._counts.calls[self._channel] += 1
            self._counts.nbytes[self._channel] += nbytes
            return call(*args)

        return counted

    def alltoall_base(self, into: torch.Tensor, parts: torch.Tensor, *_: Any) -> Any:
        """(torch's refuses those that only receive.)"""
        self._counts.calls[self._channel] += 1
        self._counts.nbytes[self._channel] += parts.nbytes
        into.zero_()
        return SimpleNamespace(wait=lambda *_: None, is_completed=lambda: True)

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        self._counts.messages += 1
        return SimpleNamespace(wait=lambda *_: None)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        """An answer comes at once."""
        self._counts.messages += 1
        return SimpleNamespace(wait=lambda *_: None)


class Counts:
    """Calls and bytes by channel, and messages from rank to rank."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.calls: Counter[Channel] = Counter()
        self.nbytes: Counter[Channel] = Counter()
        self.messages = 0


@contextmanager
def fake_world(size: int) -> Iterator[Counts]:
    """Inside the block this process is rank 0 of `size`; the others are not there.

    No thread waits for their requests, and construction brings no values of theirs.
    """
    counts = Counts()

    @contextmanager
    def meet(*_: Any) -> Iterator[Any]:
        yield SimpleNamespace(name="fake", store=dist.HashStore(), look=lambda: None)

    def connect(self: Peers, channels: Iterable[Channel], *_: Any) -> dict[Channel, CountedGroup]:
        return {
            channel: CountedGroup(counts, channel, self.rank, self.size) for channel in channels
        }

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        with (
            patch.object(hetero.ranks.process_groups, "meet", meet),
            patch.object(Peers, "_connect", connect),
            patch.object(Communicator, "exchange", lambda *_: None),
            # Ranks of other machines, as most of many are.
            patch.object(hetero.ranks.communicator, "connect_peer_memory", lambda _: None),
            patch.object(ShardServer, "_answer_all", lambda *_: None),
            # What is slow here is no reason to tell others that this rank waits.
            patch.object(all_gather, "SOON_S", PATIENCE_S),
            patch.object(all_gather, "LOOK_S", PATIENCE_S),
        ):
            yield counts
    finally:
        dist.destroy_process_group()
