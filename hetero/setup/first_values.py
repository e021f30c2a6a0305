"""First values of a chunk group's chunks, and optimizer states with zero moments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from hetero.chunk_groups.chunk_group import ChunkGroup
from hetero.chunks.layout import Chunk, Layout
from hetero.state.managed_param import ManagedParam
from hetero.state.optimizer_state import TilePart, TileState, parts_of
from offload.interrupts import uninterrupted


class FirstValues:
    """Where the values of parameters are before they have a chunk."""

    def prepare(self, members: Sequence[ManagedParam], layout: Layout) -> None:
        """Called before blocks() of a chunk's parameters, `members`, on all ranks."""

    def blocks(self, managed: ManagedParam, wanted: slice) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields the elements `wanted` of the flat parameter.

        Yields:
            (first element, values as a flat fp32 tensor); a tensor is valid until the next one.
        """
        raise NotImplementedError

    def done(self, managed: ManagedParam) -> None:
        """The chunk has the parameter's values."""


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
    layout = chunk_group.layout
    source.prepare(members, layout)
    numel = layout.tile_numel
    with chunk_group.params.fill(chunk) as flat:
        for tile in range(chunk.slots):
            into = flat[tile * numel : (tile + 1) * numel]
            with chunk_group.optim_states.open(chunk, tile, write=True, fresh=True) as optim_state:
                for m in members:
                    for part in parts_of(m, layout):
                        if part.tile == tile:
                            _fill_part(m, part, into, chunk_group, optim_state, source)
        for m in members:
            source.done(m)
        chunk_group.params.filled(chunk)


def _fill_part(
    managed: ManagedParam,
    part: TilePart,
    into: torch.Tensor,
    chunk_group: ChunkGroup,
    optim_state: TileState | None,
    source: FirstValues,
) -> None:
    """Writes one part's values to `into`, a tile of this rank's shard in the compute dtype.

    The optimizer state of the tile (None: frozen) gets what completes them to the fp32 master.
    """
    shift = part.in_tile.start - part.in_param.start
    for begin, values in source.blocks(managed, part.in_param):
        where = slice(begin + shift, begin + shift + values.numel())
        if optim_state is None:
            into[where] = values
        else:
            chunk_group.optim_states.split(values, into[where], optim_state, where)
