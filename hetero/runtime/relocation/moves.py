"""Which homes a new placement moves."""

from __future__ import annotations

from dataclasses import dataclass

from hetero.chunks.layout import Chunk, Layout
from hetero.planning.placement import Placement
from offload.errors import HeteroError
from offload.memory.tiers import StateKind, Tier


class InUseError(HeteroError):
    """Something that would have to move is in use; it may be free later."""


@dataclass(frozen=True)
class Move:
    """One kind of state of one chunk gets a home on another tier."""

    state_kind: StateKind
    chunk: Chunk
    of: Tier
    to: Tier


def moves_between(layout: Layout, before: Placement, after: Placement) -> list[Move]:
    """The kinds of state whose tier differs between two placements, chunk by chunk."""
    moves = []
    for state_kind in StateKind:
        old, new = getattr(before, state_kind.value), getattr(after, state_kind.value)
        moves += [
            Move(state_kind, chunk, old[chunk.id], new[chunk.id])
            for chunk in layout.chunks
            if old[chunk.id] is not new[chunk.id]
        ]
    return moves
