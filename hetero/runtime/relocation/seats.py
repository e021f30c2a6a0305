"""Where the parameters of a chunk group point while homes move."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hetero.chunk_groups.chunk_group import ChunkGroup
from hetero.chunks.layout import Chunk
from hetero.runtime.relocation.moves import InUseError
from hetero.state.managed_param import ManagedParam


class Seats:
    """Parameters whose home is where compute happens are views of it, the others are absent."""

    def __init__(self, chunk_group: ChunkGroup) -> None:
        self._params = chunk_group.params
        self._unseated: dict[int, Chunk] = {}  # made absent, to see who else looks
        # Not those that another chunk group has by now: they do not point here any more.
        self._members: dict[int, list[ManagedParam]] = {c.id: [] for c in chunk_group.layout.chunks}
        for managed in chunk_group.members:
            if not managed.replaced:
                self._members[managed.chunk.id].append(managed)

    def require_in_place(self, chunk: Chunk) -> None:
        """Raises InUseError if the user has put other values where the chunk's belong."""
        for m in self._members[chunk.id]:
            if m.changed_unnoticed or not self._params.is_in_place(m):
                raise InUseError(
                    f"{m.name} cannot get another home: it was moved, or changed in place, outside "
                    f"of hetero.gathered(..., modifier_rank=0)"
                )

    def leave(self, chunk: Chunk) -> bool:
        """Makes the chunk's parameters absent; whether no graph has saved one itself."""
        if not self._params.is_resident(chunk):
            return True
        self._unseated[chunk.id] = chunk
        members = self._members[chunk.id]
        for m in members:
            m.param.data = m.absent
        return not any(map(_in_a_graph, members))

    def come_back(self) -> None:
        """Nothing has moved; idempotent."""
        for chunk in self._unseated.values():
            self._seat(chunk)
        self._unseated.clear()

    def take(self, chunks: Iterable[Chunk]) -> None:
        """They have moved: their parameters point to where they are used now."""
        for chunk in chunks:
            self._seat(chunk)
            for m in self._members[chunk.id]:
                # As after a change: a backward that finds the parameter itself, not a view, among
                # what was saved then fails, instead of reading what is not there.
                torch.autograd.graph.increment_version(m.param)
                m.note_change()

    def _seat(self, chunk: Chunk) -> None:
        resident = self._params.is_resident(chunk)
        for m in self._members[chunk.id]:
            m.param.data = m.part_of(self._params.flat(chunk)) if resident else m.absent


def _in_a_graph(managed: ManagedParam) -> bool:
    """Whether autograd has saved the parameter itself: nobody can see that in what it views.

    Besides the graph, Python refers to it, and the node that accumulates its gradient, which the
    engine keeps. (Where torch does not count, such a backward fails by the version instead.)
    """
    count = getattr(managed.param, "_use_count", None)
    return count is not None and count() > (2 if managed.chunk.trainable else 1)
