"""What commits have of a chunk group's state, and which chunks have changed since the last one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetero.chunks.dtypes import Dtypes
from hetero.chunks.layout import Chunk, Layout
from hetero.state.memory.file_layout import name_of
from hetero.state.memory.homes import Homes
from hetero.state.memory.scratch_space import ScratchSpace
from offload.errors import BudgetError, StoreError
from offload.memory.sizes import format_bytes
from offload.memory.tiers import StateKind

_KINDS = (StateKind.PARAM, StateKind.OPTIM_STATE)


@dataclass(frozen=True)
class CommitChunk:
    """What a commit has of a chunk.

    Attributes:
        chunk: the chunk.
        offsets: where each state kind of this rank's shard begins in the file.
        copied: of these, those that the commit copies to there, from their homes in memory.
        changed: whether the commit before has something else.
    """

    chunk: Chunk
    offsets: Mapping[StateKind, int]
    copied: Sequence[StateKind]
    changed: bool


class CommittedState:
    """Says which extents the last commit has, so that nothing writes to them.

    What has its home in the file is committed where it is: the next update, or other change, of a
    chunk that has not changed since writes to the chunk's spare extents, which are then in use
    (SpareExtents). What has its home in memory is copied to the file by each commit that finds it
    changed, to one of two extents in turn.
    """

    def __init__(
        self, layout: Layout, dtypes: Dtypes, homes: Mapping[StateKind, Homes], file: ScratchSpace
    ) -> None:
        """Nothing is committed yet."""
        self._layout, self._dtypes, self._homes, self._file = layout, dtypes, homes, file
        self._changed = {chunk.id for chunk in layout.chunks}
        # By chunk id and state kind, the offsets of two extents; the last commit has the first one,
        # unless none has copied this since it has its home in memory.
        self._copies: dict[tuple[int, StateKind], tuple[int, int]] = {}
        self._never_copied: set[tuple[int, StateKind]] = set()
        # By chunk id and state kind, where the last commit has what had its home in the file.
        self._in_place: dict[tuple[int, StateKind], int] = {}

    def has_changed(self, chunk: Chunk) -> bool:
        """Whether the chunk's state in use is no commit's, and may be changed in place."""
        return chunk.id in self._changed

    def note_change(self, chunk: Chunk) -> None:
        """The chunk's state is, or is about to be, another one than the last commit has."""
        self._changed.add(chunk.id)

    def note_undone(self, chunk: Chunk) -> None:
        """A step of the chunk was undone: the extents in use are those from before it.

        If they are the last commit's, that is what the chunk has, and they must not be written to.
        """
        in_file = [kind for kind in self._kinds(chunk) if chunk not in self._homes[kind]]
        committed = bool(in_file) and all(
            self._homes[kind].extents[chunk.id].offset == self._in_place.get((chunk.id, kind))
            for kind in in_file
        )
        if committed:
            self._changed.discard(chunk.id)
        else:
            self._changed.add(chunk.id)

    def is_in_file(self, chunk: Chunk) -> bool:
        """Whether some of what commits have of the chunk has its home in the file."""
        return any(chunk not in self._homes[kind] for kind in self._kinds(chunk))

    def _kinds(self, chunk: Chunk) -> Sequence[StateKind]:
        return _KINDS if chunk.trainable else _KINDS[:1]

    def nbytes(self, chunk: Chunk, kind: StateKind) -> int:
        """Bytes that commits have of a chunk: this rank's shard, tile by tile."""
        tile_numel = self._layout.tile_numel
        if kind is StateKind.PARAM:
            return chunk.slots * tile_numel * self._dtypes.param_bytes
        return chunk.slots * self._dtypes.optim_state_bytes(tile_numel)

    def reserve_copies(self) -> None:
        """Allocates extents for what has its home in memory, and frees those of what has left it.

        Raises BudgetError, with nothing allocated, if there is no room for them.
        """
        wanted = {
            (chunk.id, kind)
            for chunk in self._layout.chunks
            for kind in self._kinds(chunk)
            if chunk in self._homes[kind]
        }
        for chunk_id, kind in set(self._copies) - wanted:
            chunk = self._layout.chunks[chunk_id]
            self._never_copied.discard((chunk_id, kind))
            for offset in self._copies.pop((chunk_id, kind)):
                self._file.free(offset, self.nbytes(chunk, kind))
        missing = sorted(
            wanted - set(self._copies), key=lambda each: (each[0], _KINDS.index(each[1]))
        )
        sizes = [self.nbytes(self._layout.chunks[c], kind) for c, kind in missing]
        try:
            self._file.reserve(2 * sum(sizes))
        except (BudgetError, StoreError) as error:
            raise BudgetError(
                f"durable=True needs {format_bytes(2 * sum(sizes))} on NVMe for two copies of the "
                f"state in RAM, and there is no room: {error}"
            ) from None
        for (chunk_id, kind), nbytes in zip(missing, sizes, strict=True):
            chunk = self._layout.chunks[chunk_id]
            first, second = self._file.allocate(nbytes), self._file.allocate(nbytes)
            self._copies[chunk_id, kind] = first, second
            self._never_copied.add((chunk_id, kind))
            for offset in (first, second):
                self._file.name(offset, nbytes, name_of(kind, chunk))

    def begin_commit(self) -> list[CommitChunk]:
        """What the commit of the state of now has of each chunk; none has changed from here on.

        Raises BudgetError if there is no room for the copies of homes that have moved.
        """
        self.reserve_copies()
        found = []
        self._in_place.clear()
        for chunk in self._layout.chunks:
            changed = self.has_changed(chunk)
            offsets: dict[StateKind, int] = {}
            copied = []
            for kind in self._kinds(chunk):
                if chunk not in self._homes[kind]:
                    offsets[kind] = self._homes[kind].extents[chunk.id].offset
                    self._in_place[chunk.id, kind] = offsets[kind]
                    continue
                last, other = self._copies[chunk.id, kind]
                if changed or (chunk.id, kind) in self._never_copied:
                    copied.append(kind)
                    self._copies[chunk.id, kind] = last, other = other, last
                offsets[kind] = last
            found.append(CommitChunk(chunk, offsets, copied, changed))
        self._changed.clear()
        self._never_copied.clear()
        return found
