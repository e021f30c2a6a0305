"""First values of a bank's chunks, and records with zero moments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from hetero.chunk_groups.chunk_group import Bank
from hetero.chunks.layout import Chunk, Layout
from hetero.state.managed_param import ManagedParam
from hetero.state.optimizer_state import Part, Record, parts_of


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


def fill(bank: Bank, source: Source) -> None:
    """Moves every parameter of the bank to its chunk. All ranks must do so."""
    members: dict[int, list[ManagedParam]] = {}
    for m in bank.members:
        members.setdefault(m.chunk.id, []).append(m)
    for chunk in bank.layout.chunks:
        _fill_chunk(bank, chunk, members[chunk.id], source)


def _fill_chunk(bank: Bank, chunk: Chunk, members: Sequence[ManagedParam], source: Source) -> None:
    # A function of its own so that the lease on one chunk ends before the next is made.
    layout = bank.layout
    source.prepare(members, layout)
    flat = bank.params.fill(chunk)
    numel = layout.piece_numel
    for piece in range(chunk.slots):
        into = flat[piece * numel : (piece + 1) * numel]
        with bank.records.open(chunk, piece, write=True, fresh=True) as record:
            for m in members:
                for part in parts_of(m, layout):
                    if part.piece == piece:
                        _fill_part(m, part, into, bank, record, source)
    for m in members:
        source.done(m)
    bank.params.filled(chunk)


def _fill_part(
    managed: ManagedParam,
    part: Part,
    into: torch.Tensor,
    bank: Bank,
    record: Record | None,
    source: Source,
) -> None:
    """Writes one part's values to the piece `into` and, if it is trained, to its record."""
    shift = part.in_piece.start - part.in_param.start
    for begin, values in source.blocks(managed, part.in_param):
        where = slice(begin + shift, begin + shift + values.numel())
        if record is None:
            into[where] = values
        else:
            bank.records.split(values, into[where], record, where)
