"""The second extents of chunks in the scratch file, which make updates of chunks revocable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from hetero.chunks.dtypes import Dtypes
from hetero.chunks.layout import Chunk, Layout
from hetero.state.memory.file_layout import extent_size, name_of
from hetero.state.memory.homes import Homes
from hetero.state.memory.scratch_space import ScratchSpace
from offload._native import NativeIoError
from offload.disk.backing import Extent
from offload.errors import BudgetError, StoreError
from offload.memory.arena import HostArena
from offload.memory.ledger import Ledger
from offload.memory.sizes import format_bytes
from offload.memory.tiers import Account, StateKind


class TileOffsets(NamedTuple):
    """Where an update of one tile writes that leaves what it reads, as file offsets; -1: nowhere.

    The names are StepTask's, and in its order. `saved_param` is for the old bits of parameters in
    RAM, `param_to` for those in the file.
    """

    optim_state_to: int = -1
    param_to: int = -1
    saved_param: int = -1


class SpareExtents:
    """For each chunk a second extent of OPTIM_STATE and one of PARAM, beside those in use.

    An update that may have to be taken back reads the extents in use and writes the spare ones, so
    it leaves what is needed to make it again. swap() makes the spare extents those in use. Of what
    is in RAM, which such an update changes in place, the spare extents have the old bits: those of
    parameters are written with the update, and save() writes all where optimizer state is in RAM,
    too. Extents are allocated when a chunk first needs them, and kept.
    """

    def __init__(
        self,
        layout: Layout,
        dtypes: Dtypes,
        homes: Mapping[StateKind, Homes],
        file: ScratchSpace,
    ) -> None:
        """Allocates nothing yet."""
        self._layout, self._dtypes, self._file = layout, dtypes, file
        self._params, self._optim_states = homes[StateKind.PARAM], homes[StateKind.OPTIM_STATE]
        self._kinds = [(homes[kind], kind) for kind in (StateKind.OPTIM_STATE, StateKind.PARAM)]
        self._tile_bytes = {
            StateKind.PARAM: layout.tile_numel * dtypes.param_bytes,
            StateKind.OPTIM_STATE: dtypes.optim_state_bytes(layout.tile_numel),
        }
        self._spare: dict[int, dict[StateKind, Extent]] = {}  # by chunk id
        self._is_full = False

    def suit(self, chunk: Chunk) -> bool:
        """Whether an update of the chunk can be taken back with them, because its optimizer state
        is in the file, and its parameters are there or in RAM."""
        return chunk not in self._optim_states and not self._params.on_device(chunk)

    def can_keep(self, chunk: Chunk) -> bool:
        """Whether they can have what any update of the chunk changes."""
        in_file = chunk not in self._params
        return self.suit(chunk) or not (in_file or self._params.on_device(chunk))

    def reserve_all(self, option: str) -> None:
        """Allocates the extents of all chunks that are trained, which `option` needs.

        Raises BudgetError, with nothing allocated, if there is no room for them.
        """
        trained = [chunk for chunk in self._layout.chunks if chunk.trainable]
        nbytes = sum(
            extent_size(self._layout, self._dtypes, kind, chunk).space_bytes
            for chunk in trained
            for kind in (StateKind.OPTIM_STATE, StateKind.PARAM)
        )
        try:
            self._file.reserve(nbytes)
        except (BudgetError, StoreError, NativeIoError) as error:
            raise BudgetError(
                f"{option} needs {format_bytes(nbytes)} on NVMe for the state from before a step, "
                f"beside the state itself, and there is no room: {error}"
            ) from None
        for chunk in trained:
            self._spare[chunk.id] = self._allocate(chunk)

    def reserve(self, chunk: Chunk) -> bool:
        """Allocates the chunk's extents, unless it has them; returns whether there is room."""
        if chunk.id in self._spare:
            return True
        if self._is_full:
            return False
        try:
            self._spare[chunk.id] = self._allocate(chunk)
        except (BudgetError, StoreError, NativeIoError) as error:
            self._is_full = True
            self._file.note(
                [
                    f"updates of some chunks wait for optimizer.step(), and steps cannot be undone "
                    f"that change them: either needs a second place on NVMe for their state, and "
                    f"there is no room: {error}"
                ]
            )
            return False
        return True

    def _allocate(self, chunk: Chunk) -> dict[StateKind, Extent]:
        made: dict[StateKind, Extent] = {}
        try:
            for _, kind in self._kinds_of(chunk):
                size = extent_size(self._layout, self._dtypes, kind, chunk)
                offset = self._file.allocate(size.space_bytes)
                made[kind] = Extent(offset, size.transfer_bytes, chunk.slots)
                self._file.name(offset, size.space_bytes, name_of(kind, chunk))
        except BaseException:
            self._free(chunk, made)
            raise
        return made

    def _tile_offset(self, chunk: Chunk, kind: StateKind, tile: int) -> int:
        return self._spare[chunk.id][kind].offset + tile * self._tile_bytes[kind]

    def _free(self, chunk: Chunk, extents: Mapping[StateKind, Extent]) -> None:
        for kind, extent in extents.items():
            size = extent_size(self._layout, self._dtypes, kind, chunk)
            self._file.free(extent.offset, size.space_bytes)

    def free_all(self) -> None:
        """Gives all of them back to the file, for homes that are about to move."""
        for chunk_id, extents in self._spare.items():
            self._free(self._layout.chunks[chunk_id], extents)
        self._spare.clear()
        self._is_full = False

    def save(self, chunk: Chunk) -> None:
        """Writes parameters and optimizer state that are in RAM, before an update changes them.

        Raises NativeIoError.
        """
        writes = [
            self._file.write(homes.address(chunk, 0), nbytes, offset)
            for homes, nbytes, offset in self._in_ram(chunk)
        ]
        for write in writes:
            write.wait()

    def _in_ram(self, chunk: Chunk) -> list[tuple[Homes, int, int]]:
        """Of each kind that is in RAM its homes, its bytes, and where the spare extent begins."""
        return [
            (homes, chunk.slots * self._tile_bytes[kind], self._spare[chunk.id][kind].offset)
            for homes, kind in self._kinds
            if chunk in homes
        ]

    def targets(self, chunk: Chunk, tile: int, revocable: bool = True) -> TileOffsets:
        """Where an update of the tile writes that leaves what it reads.

        `revocable`: the old bits of parameters in RAM are kept, too, so that restore() brings all
        back. reserve() has returned True.
        """
        state_at = param_at = saved_at = -1
        if chunk not in self._optim_states:
            state_at = self._tile_offset(chunk, StateKind.OPTIM_STATE, tile)
        if chunk not in self._params:
            param_at = self._tile_offset(chunk, StateKind.PARAM, tile)
        elif revocable:
            saved_at = self._tile_offset(chunk, StateKind.PARAM, tile)
        return TileOffsets(state_at, param_at, saved_at)

    def sources(self, chunk: Chunk, tile: int) -> TileOffsets:
        """What the tile's update, made again, needs beside what the file has in use."""
        if chunk not in self._params:
            return TileOffsets()
        return TileOffsets(saved_param=self.targets(chunk, tile).saved_param)

    def swap(self, chunk: Chunk) -> None:
        """The chunk's update stays: what it has written is in use from now on.

        Called once more, with restore(), it brings back what was in use before.
        """
        spare = self._spare[chunk.id]
        for homes, kind in self._in_file(chunk):
            used = homes.extents[chunk.id]
            homes.extents[chunk.id] = replace(used, offset=spare[kind].offset)
            spare[kind] = replace(spare[kind], offset=used.offset)

    def _kinds_of(self, chunk: Chunk) -> list[tuple[Homes, StateKind]]:
        return self._kinds if chunk.trainable else self._kinds[1:]

    def _in_file(self, chunk: Chunk) -> list[tuple[Homes, StateKind]]:
        return [(homes, kind) for homes, kind in self._kinds_of(chunk) if chunk not in homes]

    def copy(self, chunk: Chunk) -> None:
        """Copies what the extents in use have to the spare ones, without what was never written.

        Raises NativeIoError.
        """
        nbytes = max(self._tile_bytes.values())
        buffer = HostArena(1, nbytes, Ledger({}), Account.BUFFER)  # which no budget counts
        try:
            buffer.commit(0, 1)
            for homes, kind in self._in_file(chunk):
                extent = homes.extents[chunk.id]
                for begin in range(0, extent.nbytes, nbytes):
                    size = min(nbytes, extent.nbytes - begin)
                    address = buffer.address(0)
                    self._file.read(address, size, extent.offset + begin).wait()
                    to = self._spare[chunk.id][kind].offset + begin
                    self._file.write(address, size, to).wait()
        finally:
            buffer.close()

    def restore(self, chunk: Chunk) -> None:
        """Brings the old bits of what is in RAM back. Raises NativeIoError."""
        reads = [
            self._file.read(homes.address(chunk, 0), nbytes, offset)
            for homes, nbytes, offset in self._in_ram(chunk)
        ]
        for read in reads:
            read.wait()
