"""Optimizer state: the rule's states, and what completes a parameter to its fp32 master."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from hetero.chunks.dtypes import Dtypes
from hetero.chunks.layout import Chunk, Layout
from hetero.state.managed_param import ManagedParam
from hetero.state.memory import StateMemory
from offload._native import decode_state, encode_state, join_master, split_master
from offload.memory.tiers import StateKind


@dataclass(frozen=True)
class TileState:
    """One tile's optimizer state, as flat tensors of tile_numel elements.

    Attributes:
        master: for bf16 the lower 16 bits of the fp32 master, as int16; for fp16 the whole master;
            None for fp32, whose parameter is the master.
        states: the rule's states, in its order, in its state dtype. With bf16 parameters one bit of
            the last one belongs to the master (docs/formats.md). In 8 bits the bytes of their state
            blocks, as uint8.
    """

    master: torch.Tensor | None
    states: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class TilePart:
    """The elements of one parameter that lie in one tile of its chunk."""

    tile: int
    in_param: slice  # elements of the flat parameter
    in_tile: slice  # the same elements, as the tile counts

    @property
    def numel(self) -> int:
        """The number of elements."""
        return int(self.in_tile.stop - self.in_tile.start)

    def cut(self, begin: int, end: int) -> TilePart:
        """The part's elements [begin, end) alone."""
        at, in_tile = self.in_param.start, self.in_tile.start
        return TilePart(
            self.tile, slice(at + begin, at + end), slice(in_tile + begin, in_tile + end)
        )


def parts_of(managed: ManagedParam, layout: Layout, rank: int | None = None) -> Iterator[TilePart]:
    """The parameter's elements in a rank's shard (default: this rank's), cut at tile borders."""
    in_shard, in_param = managed.in_shard(layout, rank)
    numel = layout.tile_numel
    begin = in_shard.start
    shift = in_param.start - begin
    while begin < in_shard.stop:
        tile = begin // numel
        end = min((tile + 1) * numel, in_shard.stop)
        yield TilePart(
            tile,
            slice(begin + shift, end + shift),
            slice(begin - tile * numel, end - tile * numel),
        )
        begin = end


@dataclass(frozen=True, eq=False)
class TileCodec:
    """Makes masters and states of a tile's bytes, and bytes of masters and states.

    Attributes:
        tile_numel: elements of a tile.
        dtypes: of the chunk group.
    """

    tile_numel: int
    dtypes: Dtypes

    def over(self, raw: torch.Tensor) -> TileState:
        """Views of the tile's bytes `raw`, laid out as docs/formats.md says."""
        dtypes, kind = self.dtypes, self.dtypes.kind
        nbytes = kind.state_bytes(self.tile_numel)
        master_end = self.tile_numel * dtypes.master_bytes
        master_dtype = torch.int16 if dtypes.compute == "bf16" else torch.float32
        return TileState(
            raw[:master_end].view(master_dtype) if master_end else None,
            tuple(
                raw[begin : begin + nbytes].view(dtypes.torch_state)
                for begin in (kind.state_at(i, self.tile_numel) for i in range(kind.states))
            ),
        )

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
        master = optim_state.master
        if self.dtypes.compute != "bf16":
            if master is not None:
                master[where] = values
            param.copy_(values)
            return
        remainder, *carriers = self._rest_of_masters(optim_state, where)
        places, values = [param, remainder, *carriers], values.cpu().contiguous()
        # (Only of what has carries beside other bits is it needed what a device has.)
        in_ram = [p if p.is_cpu else torch.empty_like(p, device="cpu") for p in (param, remainder)]
        in_ram += [carrier.cpu() for carrier in carriers]
        split_master(self.dtypes.kind, values.data_ptr(), *_split_addresses(in_ram), values.numel())
        for place, made in zip(places, in_ram, strict=True):
            if made is not place:  # it is on a device, and the splitter is the CPU's
                place.copy_(made)

    def states(self, optim_state: TileState, where: slice) -> list[torch.Tensor]:
        """Copies of the rule's states, flat, fp32, without the master's bit in the last one."""
        if self.dtypes.state == "8bit":
            return [self._decoded(i, optim_state, where) for i in range(self.dtypes.kind.states)]
        *others, last = (state[where] for state in optim_state.states)
        carrier = self.dtypes.kind.carrier
        if carrier == "lowest":
            bits = torch.int32 if self.dtypes.state == "fp32" else torch.int16
            last = (last.view(bits) & ~1).view(last.dtype)
        elif carrier == "sign":
            last = last.abs()
        return [state.float() for state in (*others, last)]

    def set_states(
        self, optim_state: TileState, where: slice, values: Sequence[torch.Tensor]
    ) -> None:
        """Replaces the rule's states by `values`, flat, of any float dtype, rounded to nearest.

        With bf16 parameters the master may lose its bit in the last state: split() comes after.
        """
        for i, (state, new) in enumerate(zip(optim_state.states, values, strict=True)):
            if self.dtypes.state != "8bit":
                state[where] = new
                continue
            blocks = self._blocks(i, optim_state, where)
            encoded = torch.zeros(blocks.numel(), dtype=torch.uint8, device="cpu")
            new = new.to("cpu", torch.float32).contiguous()
            encode_state(self.dtypes.kind, i, new.data_ptr(), encoded.data_ptr(), new.numel())
            blocks.copy_(encoded)

    def _blocks(self, i: int, optim_state: TileState, where: slice) -> torch.Tensor:
        """The bytes of state i's state blocks for elements that begin with a block."""
        state_bytes = self.dtypes.kind.state_bytes
        begin = state_bytes(where.start)
        return optim_state.states[i][begin : begin + state_bytes(where.stop - where.start)]

    def _decoded(self, i: int, optim_state: TileState, where: slice) -> torch.Tensor:
        blocks = self._blocks(i, optim_state, where).cpu()  # the decoder is the CPU's
        values = torch.empty(where.stop - where.start, dtype=torch.float32, device="cpu")
        decode_state(self.dtypes.kind, i, blocks.data_ptr(), values.data_ptr(), values.numel())
        return values

    def _rest_of_masters(self, optim_state: TileState, where: slice) -> list[torch.Tensor]:
        """The remainders, and what has the masters' carries beside other bits, if anything has."""
        assert optim_state.master is not None
        has_carrier = self.dtypes.kind.carrier != "remainder"
        carriers = [optim_state.states[-1][where]] if has_carrier else []
        return [optim_state.master[where], *carriers]

    def join(self, param: torch.Tensor, optim_state: TileState, where: slice) -> torch.Tensor:
        """The masters of a part of a parameter, flat, fp32; joined ones are in RAM.

        Args:
            param: the part's values, flat, compute dtype; they may be a copy on another device.
            optim_state: the tile that has the rest of the masters.
            where: the part's elements in the tile.
        """
        if optim_state.master is None:
            return param.clone()
        master = optim_state.master[where]
        if self.dtypes.compute == "fp16":
            return master.clone()
        parts = (param, *self._rest_of_masters(optim_state, where))
        in_ram = [part.cpu().contiguous() for part in parts]
        values = torch.empty(param.numel(), dtype=torch.float32, device="cpu")
        join_master(self.dtypes.kind, *_split_addresses(in_ram), values.data_ptr(), values.numel())
        return values


def _split_addresses(arrays: Sequence[torch.Tensor]) -> tuple[int, int, int]:
    """Of parameters, remainders and what has the carries, if anything has."""
    param, remainder, *carriers = (array.data_ptr() for array in arrays)
    return param, remainder, carriers[0] if carriers else 0


@dataclass(frozen=True, eq=False)
class OptimizerState(TileCodec):
    """Reads and writes the optimizer state of this rank's shards, between steps.

    What has its home on DISK passes through the first of the pipeline's buffers, one tile at a
    time.

    Attributes:
        memory: has the homes, and the pipeline's buffers, which keep optimizer state, too.
        before_write: called with a chunk before its state is written.
        lock: held when an update is submitted, and in open(): the shard server's threads read, too.
    """

    memory: StateMemory
    before_write: Callable[[Chunk], None]
    lock: threading.RLock = field(default_factory=threading.RLock, init=False)

    @contextmanager
    def open(
        self, chunk: Chunk, tile: int, write: bool = False, fresh: bool = False
    ) -> Iterator[TileState | None]:
        """Brings in a tile of this rank's optimizer state for the block; None for a frozen chunk.

        `write`: it is stored when the block has ended without an error. `fresh`: it starts with
        zeros instead of what is stored. Raises NativeIoError if it cannot be read or written.
        """
        if not chunk.trainable:
            yield None
            return
        with self.open_raw(chunk, tile, write, fresh) as raw:
            yield self.over(raw)

    def empty(self) -> torch.Tensor:
        """New memory, uint8, for one tile's optimizer state."""
        return torch.empty(self._tile_bytes, dtype=torch.uint8, device="cpu")

    @property
    def _tile_bytes(self) -> int:
        return self.dtypes.optim_state_bytes(self.tile_numel)

    @contextmanager
    def open_raw(
        self, chunk: Chunk, tile: int, write: bool = False, fresh: bool = False
    ) -> Iterator[torch.Tensor]:
        """As open(), for the bytes (uint8) of a chunk that is not frozen."""
        with self.lock:
            homes, arenas = self.memory.homes[StateKind.OPTIM_STATE], self.memory.arenas
            in_file = chunk not in homes
            if write:
                self.before_write(chunk)
            if write or in_file:
                arenas.forget_read_ahead()
            begin, nbytes = tile * self._tile_bytes, self._tile_bytes
            if in_file:
                offset = homes.extents[chunk.id].offset + begin
                raw = arenas.buffers.view(0, 1, torch.uint8)[:nbytes]
            else:
                raw = homes.flat(chunk)[begin : begin + nbytes]
            if fresh:
                raw.zero_()
            elif in_file:
                self.memory.scratch_space.read(raw.data_ptr(), nbytes, offset).wait()
            yield raw
            if write and in_file:
                self.memory.scratch_space.write(raw.data_ptr(), nbytes, offset).wait()
