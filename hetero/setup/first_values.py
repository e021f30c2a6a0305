"""First values of a chunk group's chunks, and optimizer states with zero moments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from hetero.chunk_groups.chunk_group import ChunkGroup
from hetero.chunks.layout import Chunk, Layout
from hetero.state.managed_param import ManagedParam
from hetero.state.optimizer_state import Part, TileState, parts_of


class Source(Protocol):
    """Where parameters are before they have a chunk."""

    def prepare(self, members: Sequence[ManagedParam], layout: Layout) -> None:
        """This rank's parts of a chunk's parameters will be asked for. All ranks do so."""

    def blocks(self, managed: ManagedParam, wanted: slice) -> Iterator[tuple[int, torch.Tensor]]:
        """Elements `wanted` of the flat parameter.

        As (first element, flat fp32 tensor) blocks; a block is valid until the next one.
        """

    def done(self, managed: ManagedParam) -> None:
        """The parameter has found its home."""


def fill(chunk_group: ChunkGroup, source: Source) -> None:
    """Moves every parameter of the chunk group to its chunk. All ranks must do so."""
    members: dict[int, list[ManagedParam]] = {}
    for m in chunk_group.members:
        members.setdefault(m.chunk.id, []).append(m)
    for chunk in chunk_group.layout.chunks:
        _fill_chunk(chunk_group, chunk, members[chunk.id], source)


def _fill_chunk(
    chunk_group: ChunkGroup, chunk: Chunk, members: Sequence[ManagedParam], source: Source
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
    part: Part,
    into: torch.Tensor,
    chunk_group: ChunkGroup,
    optim_state: TileState | None,
    source: Source,
) -> None:
    """Writes one part's values to the tile `into` and, if it is trained, to its optimizer state."""
    shift = part.in_tile.start - part.in_param.start
    for begin, values in source.blocks(managed, part.in_param):
        where = slice(begin + shift, begin + shift + values.numel())
        if optim_state is None:
            into[where] = values
        else:
            chunk_group.optim_states.split(values, into[where], optim_state, where)
