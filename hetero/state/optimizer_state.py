"""Optimizer state: the rule's states, and what completes a parameter to its fp32 master."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hetero.chunks.dtypes import Dtypes
from hetero.chunks.layout import Chunk, Layout
from hetero.state.chunk_updates import ChunkUpdates
from hetero.state.managed_param import ManagedParam
from hetero.state.memory.homes import Homes
from hetero.state.memory.slot_arenas import SlotArenas
from offload._native import Location, join_master, split_master
from offload.device.updater import Updater
from offload.disk.backing import Extent, FileTransfers


@dataclass(frozen=True)
class TileState:
    """One tile's optimizer state, as flat tensors of tile_numel elements.

    Attributes:
        master: for bf16 the lower 16 bits of the fp32 master, as int16; for fp16 the whole master;
            None for fp32, whose parameter is the master.
        states: the rule's states, in its order, in its state dtype. With bf16 parameters one bit of
            the last one belongs to the master (docs/formats.md).
    """

    master: torch.Tensor | None
    states: tuple[torch.Tensor, ...]

    @classmethod
    def over(cls, raw: torch.Tensor, tile_numel: int, dtypes: Dtypes) -> TileState:
        """Views of a tile's bytes (uint8), which are [master | state 0 | state 1]."""
        master_end = tile_numel * dtypes.master_bytes
        master_dtype = torch.int16 if dtypes.compute == "bf16" else torch.float32
        return cls(
            raw[:master_end].view(master_dtype) if master_end else None,
            tuple(raw[master_end:].view(dtypes.torch_state).split(tile_numel)),
        )


@dataclass(frozen=True)
class Part:
    """The elements of one parameter that lie in one tile of its chunk."""

    tile: int
    in_param: slice  # elements of the flat parameter
    in_tile: slice  # the same elements, as the tile counts

    @property
    def numel(self) -> int:
        """The number of elements."""
        return int(self.in_tile.stop - self.in_tile.start)


def parts_of(managed: ManagedParam, layout: Layout, rank: int | None = None) -> Iterator[Part]:
    """The parameter's elements in a rank's shard (default: this rank's), cut at tile borders."""
    in_shard, in_param = managed.in_shard(layout, rank)
    numel = layout.tile_numel
    begin = in_shard.start
    shift = in_param.start - begin
    while begin < in_shard.stop:
        tile = begin // numel
        end = min((tile + 1) * numel, in_shard.stop)
        yield Part(
            tile,
            slice(begin + shift, end + shift),
            slice(begin - tile * numel, end - tile * numel),
        )
        begin = end


class OptimizerState:
    """Reads and writes the optimizer state of this rank's shards, between steps.

    What has its home on DISK passes through the first of the pipeline's buffers, one tile at a
    time.
    """

    def __init__(
        self,
        tile_numel: int,
        dtypes: Dtypes,
        homes: Homes,
        extents: dict[int, Extent],
        arenas: SlotArenas,
        transfers: FileTransfers,
        updates: ChunkUpdates,
        updater: Updater | None = None,
    ) -> None:
        """Reads and writes nothing yet.

        Args:
            tile_numel: elements per tile.
            dtypes: the chunk group's.
            homes: of OPTIM_STATE in memory.
            extents: by chunk id, of OPTIM_STATE on DISK.
            arenas: have the pipeline and its buffers.
            transfers: read and write the scratch file.
            updates: the chunk group's updates, which keep optimizer state in the buffers.
            updater: splits and joins masters on a DEVICE whose memory the CPU does not reach.
        """
        self._updater = updater
        self._tile_numel = tile_numel
        self._dtypes = dtypes
        self._kind = dtypes.kind
        self._tile_bytes = tile_numel * dtypes.optim_state_bytes
        self._homes = homes
        self._extents = extents
        self._arenas = arenas
        self._transfers = transfers
        self._updates = updates
        # The shard server's threads read optimizer state too: submitting, and open(), hold this.
        self.lock = threading.RLock()

    def in_file(self, chunk: Chunk) -> bool:
        """Whether the home of the chunk's optimizer state is on DISK."""
        return chunk not in self._homes

    def location(self, chunk: Chunk, tile: int) -> Location:
        """The place of the tile's optimizer state, for the step pipeline."""
        if chunk in self._homes:
            return Location(self._homes.address(chunk, tile))
        return Location(file_offset=self._offset(chunk, tile))

    def address(self, chunk: Chunk, tile: int) -> int:
        """The address of the tile's optimizer state, if its home is in memory."""
        return self._homes.address(chunk, tile)

    def _offset(self, chunk: Chunk, tile: int) -> int:
        return self._extents[chunk.id].offset + tile * self._tile_bytes

    @contextmanager
    def open(
        self, chunk: Chunk, tile: int, write: bool = False, fresh: bool = False
    ) -> Iterator[TileState | None]:
        """Brings in one tile's optimizer state for the length of the block.

        Args:
            chunk: the chunk; a frozen one has no optimizer state, so the block gets None.
            tile: number of the tile in this rank's shard.
            write: store it when the block has ended without an error.
            fresh: start with zeros instead of what is stored.

        Raises:
            NativeIoError: it cannot be read or written.
        """
        if not chunk.trainable:
            yield None
            return
        with self.open_raw(chunk, tile, write, fresh) as raw:
            yield self.over(raw)

    def over(self, raw: torch.Tensor) -> TileState:
        """Views of the tile's bytes `raw`."""
        return TileState.over(raw, self._tile_numel, self._dtypes)

    def empty(self) -> torch.Tensor:
        """New memory, uint8, for one tile's optimizer state."""
        return torch.empty(self._tile_bytes, dtype=torch.uint8)

    @contextmanager
    def open_raw(
        self, chunk: Chunk, tile: int, write: bool = False, fresh: bool = False
    ) -> Iterator[torch.Tensor]:
        """As open(), for the bytes (uint8) of a chunk that is not frozen."""
        with self.lock:
            if write or chunk not in self._homes:
                self._updates.forget()
            if chunk in self._homes:
                begin = tile * self._tile_bytes
                raw = self._homes.flat(chunk)[begin : begin + self._tile_bytes]
                if fresh:
                    raw.zero_()
                yield raw
            else:
                with self._in_buffer(chunk, tile, write, fresh) as raw:
                    yield raw

    @contextmanager
    def _in_buffer(
        self, chunk: Chunk, tile: int, write: bool, fresh: bool
    ) -> Iterator[torch.Tensor]:
        raw = self._arenas.buffers.view(0, 1, torch.uint8)[: self._tile_bytes]
        offset = self._offset(chunk, tile)
        if fresh:
            raw.zero_()
        else:
            self._transfers.read(raw.data_ptr(), self._tile_bytes, offset).wait()
        yield raw
        if write:
            self._transfers.write(raw.data_ptr(), self._tile_bytes, offset).wait()

    def split(
        self, values: torch.Tensor, param: torch.Tensor, optim_state: TileState, where: slice
    ) -> None:
        """Writes fp32 values as parameters and masters.

        Args:
            values: masters, flat, fp32.
            param: becomes their rounding; flat, compute dtype.
            optim_state: the tile that has the rest of the masters.
            where: the values' elements in the tile.
        """
        if self._dtypes.compute == "fp32":
            param.copy_(values)
        elif self._dtypes.compute == "fp16":
            assert optim_state.master is not None
            optim_state.master[where] = values
            param.copy_(values)
        else:
            assert optim_state.master is not None
            values = values.to(param.device).contiguous()
            carrier = optim_state.states[-1][where]
            if param.device.type != "cpu":
                assert self._updater is not None
                self._updater.split(values, param, optim_state.master[where], carrier)
                return
            split_master(
                self._kind,
                values.data_ptr(),
                param.data_ptr(),
                optim_state.master[where].data_ptr(),
                carrier.data_ptr(),
                values.numel(),
            )

    def states(self, optim_state: TileState, where: slice) -> list[torch.Tensor]:
        """Copies of the rule's states, flat, fp32, without the master's bit in the last one.

        Args:
            optim_state: the tile.
            where: the elements to copy.
        """
        *others, last = (state[where] for state in optim_state.states)
        if self._dtypes.compute == "bf16":
            if self._dtypes.rule == "lion":
                bits = torch.int32 if self._dtypes.state == "fp32" else torch.int16
                last = (last.view(bits) & ~1).view(last.dtype)
            else:
                last = last.abs()
        return [state.float() for state in (*others, last)]

    def join(self, param: torch.Tensor, optim_state: TileState, where: slice) -> torch.Tensor:
        """The masters of a part of a parameter, flat, fp32, on the optimizer state's device.

        Args:
            param: the part's values, flat, compute dtype; they may be a copy on another device.
            optim_state: the tile that has the rest of the masters.
            where: the part's elements in the tile.
        """
        if self._dtypes.compute == "fp32":
            return param.clone()
        assert optim_state.master is not None
        if self._dtypes.compute == "fp16":
            return optim_state.master[where].clone()
        master, carrier = optim_state.master[where], optim_state.states[-1][where]
        param = param.to(master.device).contiguous()
        values = torch.empty(param.numel(), dtype=torch.float32, device=master.device)
        if master.device.type != "cpu":
            assert self._updater is not None
            self._updater.join(param, master, carrier, values)
            return values
        join_master(
            self._kind,
            param.data_ptr(),
            master.data_ptr(),
            carrier.data_ptr(),
            values.data_ptr(),
            values.numel(),
        )
        return values
