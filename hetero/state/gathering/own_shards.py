"""This rank's shards of PARAM at home: in RAM, or on DISK behind slots."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch

from hetero.chunks.layout import Chunk
from hetero.state.chunk_updates import ChunkUpdates
from hetero.state.memory.homes import Homes
from offload.cache.shared_cache import SharedWriteBackCache


@dataclass(frozen=True, eq=False)
class OwnShards:
    """Reads and writes the values of this rank's shards. Several threads may use it at once.

    `slots` are for copies of those on DISK. With one rank a shard is the whole chunk, and the slots
    are those of gathered copies. Reads wait for `updates`, other ranks' too.
    """

    homes: Homes
    slots: SharedWriteBackCache
    updates: ChunkUpdates

    @contextmanager
    def open(self, chunk: Chunk) -> Iterator[torch.Tensor]:
        """The shard's values, flat, inside the block; waits for the update that makes them.

        A speculative one is taken back, and none begins that would write to what is read.

        Raises what the update met, BudgetError if there is no room, NativeIoError if the shard
        cannot be read.
        """
        if chunk in self.homes:
            with self.updates.reading(chunk):
                self.updates.wait_computed(chunk)
                yield self.homes.shard(chunk)
        else:
            self.wait_computed(chunk)
            with self.slots.open(chunk.id) as shard:
                yield shard

    def wait_computed(self, chunk: Chunk) -> None:
        """Until the update that makes the shard's values is made; a speculative one is taken back.

        Raises what the update met.
        """
        self.updates.revoke(chunk)
        self.updates.wait_computed(chunk)

    def fill(self, chunk: Chunk) -> AbstractContextManager[torch.Tensor]:
        """Flat memory for new values of the whole shard; call filled() in the block when they are
        there. Raises BudgetError if there is no room."""
        if chunk in self.homes:
            return nullcontext(self.homes.shard(chunk))
        return self.slots.fill(chunk.id)

    def filled(self, chunk: Chunk) -> None:
        """The values that fill() or open() gave were changed; returns when they are home."""
        if chunk not in self.homes:
            self.slots.changed(chunk.id)

    def invalidate(self, chunk: Chunk) -> None:
        """The optimizer is about to write new values to the shard's home."""
        if chunk not in self.homes:
            self.slots.drop(chunk.id)
