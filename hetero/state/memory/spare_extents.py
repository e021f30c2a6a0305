"""The second extents of chunks in the scratch file, which make an update of a chunk revocable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from hetero.chunks.dtypes import Dtypes
from hetero.chunks.layout import Chunk, Layout
from hetero.state.memory.file_layout import extent_size
from hetero.state.memory.homes import Homes
from hetero.state.memory.scratch_space import ScratchSpace
from offload._native import NativeIoError
from offload.disk.backing import Extent
from offload.errors import BudgetError, StoreError
from offload.memory.tiers import StateKind


class TileOffsets(NamedTuple):
    """Where a revocable update of one tile writes, as file offsets; -1: nowhere.

    The names are StepTask's, and in its order. `saved_param` is for parameters in RAM, `param_to`
    for those in the file.
    """

    optim_state_to: int = -1
    param_to: int = -1
    saved_param: int = -1


class SpareExtents:
    """For each chunk a second extent of OPTIM_STATE and one of PARAM, beside those in use.

    An update that may have to be taken back reads the extents in use and writes the spare ones, so
    it leaves what is needed to make it again. commit() makes the spare extents those in use. Of
    parameters in RAM, which such an update changes in place, the spare extent has the old bits.
    Extents are allocated when a chunk first needs them, and kept.
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
                    f"updates of some chunks wait for optimizer.step(): their optimizer state "
                    f"needs a second place on NVMe to be updated during backward, and there is no "
                    f"room: {error}"
                ]
            )
            return False
        return True

    def _allocate(self, chunk: Chunk) -> dict[StateKind, Extent]:
        made: dict[StateKind, Extent] = {}
        try:
            for kind in (StateKind.OPTIM_STATE, StateKind.PARAM):
                size = extent_size(self._layout, self._dtypes, kind, chunk)
                offset = self._file.allocate(size.space_bytes)
                made[kind] = Extent(offset, size.transfer_bytes, chunk.slots)
        except BaseException:
            self._free(chunk, made)
            raise
        return made

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

    def targets(self, chunk: Chunk, tile: int) -> TileOffsets:
        """Where a revocable update of the tile writes; reserve() has returned True."""
        state_at, param_at = (
            self._spare[chunk.id][kind].offset + tile * self._tile_bytes[kind]
            for kind in (StateKind.OPTIM_STATE, StateKind.PARAM)
        )
        if chunk in self._params:
            return TileOffsets(optim_state_to=state_at, saved_param=param_at)
        return TileOffsets(optim_state_to=state_at, param_to=param_at)

    def sources(self, chunk: Chunk, tile: int) -> TileOffsets:
        """What the tile's update, made again, needs beside what the file has in use."""
        if chunk not in self._params:
            return TileOffsets()
        return TileOffsets(saved_param=self.targets(chunk, tile).saved_param)

    def commit(self, chunk: Chunk) -> None:
        """The chunk's update stays: what it has written is in use from now on."""
        spare = self._spare[chunk.id]
        changed = [(self._optim_states, StateKind.OPTIM_STATE)]
        if chunk not in self._params:
            changed.append((self._params, StateKind.PARAM))
        for homes, kind in changed:
            used = homes.extents[chunk.id]
            homes.extents[chunk.id] = replace(used, offset=spare[kind].offset)
            spare[kind] = replace(spare[kind], offset=used.offset)

    def restore(self, chunk: Chunk) -> None:
        """Brings the old bits of parameters in RAM back. Raises NativeIoError."""
        if chunk not in self._params:
            return
        nbytes = chunk.slots * self._tile_bytes[StateKind.PARAM]
        offset = self._spare[chunk.id][StateKind.PARAM].offset
        self._file.read(self._params.address(chunk, 0), nbytes, offset).wait()
