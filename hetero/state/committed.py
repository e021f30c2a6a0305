"""What commits have of a chunk group's state, and which chunks have changed since the last one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetero.chunks.dtypes import Dtypes
from hetero.chunks.layout import Chunk, Layout
from hetero.state.chunk_state import ChunkState
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
    (ChunkVersions). What has its home in memory is copied to the file by each commit that finds it
    changed, to one of two extents in turn.
    """

    def __init__(
        self,
        layout: Layout,
        dtypes: Dtypes,
        homes: Mapping[StateKind, Homes],
        file: ScratchSpace,
        chunks: Sequence[ChunkState],
    ) -> None:
        """Nothing is committed yet."""
        self._layout, self._dtypes, self._homes, self._file = layout, dtypes, homes, file
        self._chunks = chunks

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
        missing: list[tuple[ChunkState, StateKind, int]] = []
        for state in self._chunks:
            chunk, versions = state.chunk, state.versions
            wanted = [kind for kind in self._kinds(chunk) if chunk in self._homes[kind]]
            for kind in set(versions.copies) - set(wanted):
                versions.copied.discard(kind)
                for offset in versions.copies.pop(kind):
                    self._file.free(offset, self.nbytes(chunk, kind))
            missing += [
                (state, kind, self.nbytes(chunk, kind))
                for kind in wanted
                if kind not in versions.copies
            ]
        needed_bytes = 2 * sum(nbytes for _, _, nbytes in missing)
        try:
            self._file.reserve(needed_bytes)
        except (BudgetError, StoreError) as error:
            raise BudgetError(
                f"durable=True needs {format_bytes(needed_bytes)} on NVMe for two copies of the "
                f"state in RAM, and there is no room: {error}"
            ) from None
        for state, kind, nbytes in missing:
            first, second = self._file.allocate(nbytes), self._file.allocate(nbytes)
            state.versions.copies[kind] = first, second
            for offset in (first, second):
                self._file.name(offset, nbytes, name_of(kind, state.chunk))

    def begin_commit(self) -> list[CommitChunk]:
        """What the commit of the state of now has of each chunk; none has changed from here on.

        Raises BudgetError if there is no room for the copies of homes that have moved.
        """
        self.reserve_copies()
        found = []
        for state in self._chunks:
            chunk, versions = state.chunk, state.versions
            offsets: dict[StateKind, int] = {}
            copied = []
            for kind in self._kinds(chunk):
                if chunk not in self._homes[kind]:
                    offsets[kind] = self._homes[kind].extents[chunk.id].offset
                    continue
                last, other = versions.copies[kind]
                if versions.changed or kind not in versions.copied:
                    copied.append(kind)
                    versions.copied.add(kind)
                    versions.copies[kind] = last, other = other, last
                offsets[kind] = last
            found.append(CommitChunk(chunk, offsets, copied, versions.changed))
            versions.changed = False
        return found
