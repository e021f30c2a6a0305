"""Reads tiles of this rank's shards from their homes, in any thread, beside training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import torch

from hetero.chunk_groups.chunk_group import ChunkGroup
from hetero.chunks.layout import Chunk
from hetero.state.memory import Homes
from hetero.state.optimizer_state import TileState
from offload._native import IoOp, NativeIoError
from offload.memory.arena import HostArena
from offload.memory.ledger import Ledger
from offload.memory.sizes import PAGE_BYTES, round_up
from offload.memory.tiers import Account, StateKind

_BUFFERS = 3  # tiles: one is used, two are read ahead


@dataclass(frozen=True)
class HomeTile:
    """A tile as its homes have it: parameters in the compute dtype, flat, and optimizer state (None
    of a frozen chunk). On the CPU; views of homes, or of a buffer that the next tiles overwrite."""

    number: int
    values: torch.Tensor
    optim_state: TileState | None


class HomeTiles:
    """Reads tiles past the copies that compute uses and the step pipeline's buffers.

    Nothing may change a chunk while it is read: a Snapshot says so to training. What only buffers
    of the pipeline have is written first. Tiles in the file are read ahead into a few buffers of
    its own, which no budget counts.
    """

    def __init__(self, chunk_group: ChunkGroup, states: bool = True) -> None:
        """Takes memory for buffers if something of the chunk group is on DISK.

        `states`: False: parameters alone are read, as if all chunks were frozen.
        """
        self._chunk_group = chunk_group
        self._homes = chunk_group.memory.homes
        kinds = [StateKind.OPTIM_STATE, StateKind.PARAM] if states else [StateKind.PARAM]
        self._tile_bytes = {kind: chunk_group.memory.tile_bytes[kind] for kind in kinds}
        self._resources = ExitStack()
        self._arena: HostArena | None = None
        self._free = list(range(_BUFFERS))
        # By chunk id and tile: the buffer, and what is read into it.
        self._started: dict[tuple[int, int], tuple[int | None, list[IoOp]]] = {}
        if chunk_group.disk is not None:
            slot_bytes = round_up(sum(self._tile_bytes.values()), PAGE_BYTES)
            self._arena = HostArena(_BUFFERS, slot_bytes, Ledger({}), Account.BUFFER)
            self._arena.commit_all()
            self._resources.callback(self._arena.close)
            chunk_group.disk.io.register(self._arena.memory)
            self._resources.callback(chunk_group.disk.io.unregister, self._arena.memory)

    def close(self) -> None:
        """Frees the buffers, when nothing is read any more; idempotent."""
        for started in list(self._started):
            self._forget(started)
        self._resources.close()

    def expect(self, chunk: Chunk) -> None:
        """The chunk is read next but one: as much of it as there are buffers is read ahead."""
        for tile in range(chunk.slots):
            if not self._free:
                return
            self._start(chunk, tile)

    def read(self, chunk: Chunk) -> Iterator[HomeTile]:
        """The tiles of this rank's shard of a chunk, in order.

        Raises what an update of the chunk met, NativeIoError if the file cannot be read.
        """
        for tile in range(chunk.slots):
            self._start(chunk, tile)
            if tile + 1 < chunk.slots and self._free:
                self._start(chunk, tile + 1)
            slot, reads = self._started.pop((chunk.id, tile))
            try:
                for each in reads:
                    each.wait()
                yield self._tile(chunk, tile, slot)
            finally:
                if slot is not None:
                    self._free.append(slot)

    def _in_file(self, chunk: Chunk, kind: StateKind) -> bool:
        if kind is StateKind.OPTIM_STATE and not chunk.trainable:
            return False
        return chunk not in self._homes[kind]

    def _start(self, chunk: Chunk, tile: int) -> None:
        """Starts reading what the file has of a tile, unless that was done."""
        if (chunk.id, tile) in self._started:
            return
        kinds = [kind for kind in self._tile_bytes if self._in_file(chunk, kind)]
        updates = self._chunk_group.updates
        updates.wait_computed(chunk)
        updates.arenas.pipeline.flush(updates.chunks[chunk.id].first_key + tile)
        slot = self._take_slot() if kinds else None
        reads: list[IoOp] = []
        self._started[chunk.id, tile] = slot, reads
        for kind in kinds:
            disk = self._chunk_group.disk
            assert disk is not None
            assert self._arena is not None
            assert slot is not None
            nbytes, extent = self._tile_bytes[kind], self._homes[kind].extents[chunk.id]
            # (Of parameters the last page that is used is the last one that was written.)
            size = min(nbytes, extent.nbytes - tile * nbytes)
            if size > 0:
                address = self._arena.address(slot) + self._begin(kind)
                offset = extent.offset + tile * nbytes
                reads.append(disk.transfers.read(address, size, offset))

    def _take_slot(self) -> int:
        if not self._free:  # another chunk was expected, and this one is needed first
            self._forget(next(iter(self._started)))
        return self._free.pop()

    def _forget(self, started: tuple[int, int]) -> None:
        slot, reads = self._started.pop(started)
        for each in reads:
            with suppress(NativeIoError):
                each.wait()
        if slot is not None:
            self._free.append(slot)

    def _begin(self, kind: StateKind) -> int:
        """Where a kind's bytes begin in a buffer."""
        return (
            0 if kind is StateKind.OPTIM_STATE else self._tile_bytes.get(StateKind.OPTIM_STATE, 0)
        )

    def _tile(self, chunk: Chunk, tile: int, slot: int | None) -> HomeTile:
        values = self._bytes(chunk, tile, slot, StateKind.PARAM)
        optim_state: TileState | None = None
        if chunk.trainable and StateKind.OPTIM_STATE in self._tile_bytes:
            raw = self._bytes(chunk, tile, slot, StateKind.OPTIM_STATE)
            optim_state = self._chunk_group.optim_states.over(raw)
        return HomeTile(tile, values.view(self._chunk_group.dtypes.torch_compute), optim_state)

    def _bytes(self, chunk: Chunk, tile: int, slot: int | None, kind: StateKind) -> torch.Tensor:
        homes: Homes = self._homes[kind]
        nbytes = self._tile_bytes[kind]
        if self._in_file(chunk, kind):
            assert self._arena is not None
            assert slot is not None
            buffer = self._arena.view(slot, 1, torch.uint8)
            return buffer[self._begin(kind) : self._begin(kind) + nbytes]
        shard = homes.shard(chunk).view(torch.uint8)
        return shard[tile * nbytes : (tile + 1) * nbytes].cpu()
