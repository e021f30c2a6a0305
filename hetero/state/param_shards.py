"""This rank's shards of PARAM at home: in RAM, or on DISK behind slots."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hetero.chunks.layout import Chunk
from hetero.state.chunk_updates import ChunkUpdates
from hetero.state.memory.homes import Homes
from offload.device.shared_cache import SharedCache


class ParamShards:
    """Reads and writes the values of this rank's shards. Several threads may use it at once."""

    def __init__(self, homes: Homes, slots: SharedCache | None, updates: ChunkUpdates) -> None:
        """Access to the shards of one chunk group.

        Args:
            homes: those that are at home in RAM or on DEVICE.
            slots: copies of those on DISK. With one rank a shard is the whole chunk, and the slots
                are those of gathered copies.
            updates: the updates under way, which other ranks' reads wait for.
        """
        self._homes = homes
        self._slots = slots
        self._updates = updates

    @contextmanager
    def open(self, chunk: Chunk) -> Iterator[torch.Tensor]:
        """The shard's values, flat, inside the block; waits for the update that makes them.

        Raises what the update met, BudgetError if there is no room, NativeIoError if the shard
        cannot be read.
        """
        self._updates.wait_computed(chunk)
        if chunk in self._homes:
            yield self._homes.shard(chunk)
            return
        assert self._slots is not None
        with self._slots.open(chunk.id) as shard:
            yield shard

    @contextmanager
    def fill(self, chunk: Chunk) -> Iterator[torch.Tensor]:
        """Flat memory for new values of the whole shard; call filled() in the block when they are
        there. Raises BudgetError if there is no room."""
        if chunk in self._homes:
            yield self._homes.shard(chunk)
            return
        assert self._slots is not None
        with self._slots.fill(chunk.id) as shard:
            yield shard

    def filled(self, chunk: Chunk) -> None:
        """The values that fill() or open() gave were changed; returns when they are home."""
        if chunk not in self._homes:
            assert self._slots is not None
            self._slots.changed(chunk.id)

    def invalidate(self, chunk: Chunk) -> None:
        """The optimizer is about to write new values to the shard's home."""
        if chunk not in self._homes:
            assert self._slots is not None
            self._slots.drop(chunk.id)
