"""First values of a chunk group's chunks, and optimizer states with zero moments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from hetero.chunk_groups.chunk_group import ChunkGroup
from hetero.chunks.layout import Chunk
from hetero.state.managed_param import ManagedParam
from hetero.state.optimizer_state import TileState, parts_of
from offload.interrupts import uninterrupted

_BLOCK_NUMEL = 1 << 20  # so many elements are asked for at a time: no budget counts a copy of them


def _nothing(managed: ManagedParam) -> None:
    pass


class FirstValues(NamedTuple):
    """Where the values of parameters are before they have a chunk.

    Attributes:
        elements: gives some of a parameter, flat; they are valid until the next call.
        prepare: is called for each parameter of a chunk before, on all ranks.
        done: is called for each of them when the chunk has the values.
    """

    elements: Callable[[ManagedParam, slice], torch.Tensor]
    prepare: Callable[[ManagedParam], object] = _nothing
    done: Callable[[ManagedParam], object] = _nothing


def fill(chunk_group: ChunkGroup, source: FirstValues) -> None:
    """Writes all parameters' values, and zero moments, to their chunks. All ranks call it."""
    members: dict[int, list[ManagedParam]] = {}
    for m in chunk_group.members:
        members.setdefault(m.chunk.id, []).append(m)
    for chunk in chunk_group.layout.chunks:
        _fill_chunk(chunk_group, chunk, members[chunk.id], source)


@uninterrupted
def _fill_chunk(
    chunk_group: ChunkGroup, chunk: Chunk, members: Sequence[ManagedParam], source: FirstValues
) -> None:
    for m in members:
        source.prepare(m)
    numel = chunk_group.layout.tile_numel
    with chunk_group.params.fill(chunk) as flat:
        for tile in range(chunk.slots):
            into = flat[tile * numel : (tile + 1) * numel]
            with chunk_group.optim_states.open(chunk, tile, write=True, fresh=True) as optim_state:
                for m in members:
                    _fill_tile(m, tile, into, chunk_group, optim_state, source)
        for m in members:
            source.done(m)
        chunk_group.params.filled(chunk)


def _fill_tile(
    managed: ManagedParam,
    tile: int,
    into: torch.Tensor,
    chunk_group: ChunkGroup,
    optim_state: TileState | None,
    source: FirstValues,
) -> None:
    """Writes a parameter's part of one tile to `into`, in the compute dtype.

    The optimizer state of the tile (None: frozen) gets what completes it to the fp32 master.
    """
    for part in parts_of(managed, chunk_group.layout):
        begin, shift = part.in_param.start, part.in_tile.start - part.in_param.start
        while part.tile == tile and begin < part.in_param.stop:
            end = min(begin + _BLOCK_NUMEL, part.in_param.stop)
            values = source.elements(managed, slice(begin, end)).float()
            where = slice(begin + shift, end + shift)
            if optim_state is None:
                into[where] = values
            else:
                chunk_group.optim_states.split(values, into[where], optim_state, where)
            begin = end
