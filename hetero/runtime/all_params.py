"""The parameters of all chunk groups: each use goes to the chunk group that has the chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hetero.chunk_groups.chunk_group import ChunkGroup
from hetero.chunks.layout import Chunk
from hetero.state.managed_param import ManagedParam
from hetero.state.params import SavedView
from offload.errors import StaleGraphError


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that autograd saved and is no view of a gathered copy.

    With hooks nobody else checks its version. `chunk`: it is of a home that is used in place.
    """

    tensor: torch.Tensor
    version: int
    chunk: Chunk | None = None


class AllParams:
    """Brings parameters in and lets them go, whichever chunk group they are in."""

    def __init__(self, chunk_groups: Sequence[ChunkGroup]) -> None:
        self._chunk_groups = chunk_groups  # may grow
        # By address: homes that are used in place and may be updated while backward runs.
        self._updated_in_backward: dict[int, Chunk] = {}

    def follow_homes(self, chunk_group: ChunkGroup) -> None:
        """The chunk group's homes are where they are now: it is new, or some have moved."""
        if not chunk_group.updates.overlap.in_backward:
            return
        homes = self._updated_in_backward
        mine = chunk_group.layout.chunks[0].chunk_group
        for address in [at for at, chunk in homes.items() if chunk.chunk_group == mine]:
            del homes[address]
        for chunk in chunk_group.layout.chunks:
            if chunk.trainable and chunk_group.params.is_resident(chunk):
                address = chunk_group.params.flat(chunk).untyped_storage().data_ptr()
                homes[address] = chunk

    @property
    def gathers(self) -> bool:
        """Whether some parameters are gathered."""
        return any(chunk_group.params.gathers for chunk_group in self._chunk_groups)

    @property
    def packs(self) -> bool:
        """Whether pack() and unpack() are needed."""
        return self.gathers or bool(self._updated_in_backward)

    def is_resident(self, chunk: Chunk) -> bool:
        """Whether the whole chunk's home is in RAM, where compute uses it in place."""
        return self._chunk_groups[chunk.chunk_group].params.is_resident(chunk)

    def flat(self, chunk: Chunk) -> torch.Tensor:
        """The chunk's parameters now, flat; unless resident a pin on a gathered copy."""
        return self._chunk_groups[chunk.chunk_group].params.flat(chunk)

    def acquire(self, managed: ManagedParam) -> None:
        """Makes the parameter present until as many release() calls."""
        self._chunk_groups[managed.chunk.chunk_group].params.acquire(managed)

    def release(self, managed: ManagedParam) -> None:
        """Undoes one acquire()."""
        self._chunk_groups[managed.chunk.chunk_group].params.release(managed)

    def is_in_place(self, managed: ManagedParam) -> bool:
        """Whether the parameter is where it belongs between steps: at home, or absent."""
        return self._chunk_groups[managed.chunk.chunk_group].params.is_in_place(managed)

    def settle(self) -> None:
        """Until nothing that was asked of other ranks is under way."""
        for chunk_group in self._chunk_groups:
            chunk_group.params.settle()

    def pack(self, tensor: torch.Tensor) -> SavedTensor | SavedView:
        """What autograd keeps for `tensor`: of a view of a gathered copy, how to remake it."""
        if tensor.layout is torch.strided:
            for chunk_group in self._chunk_groups:
                view = chunk_group.params.pack(tensor)
                if view is not None:
                    return view
            if self._updated_in_backward:
                address = tensor.untyped_storage().data_ptr()
                chunk = self._updated_in_backward.get(address)
                return SavedTensor(tensor, tensor._version, chunk)
        return SavedTensor(tensor, tensor._version)

    def unpack(self, saved: SavedTensor | SavedView) -> torch.Tensor:
        """The tensor that was packed. Raises StaleGraphError if it was changed since."""
        if isinstance(saved, SavedView):
            return self._chunk_groups[saved.chunk.chunk_group].params.unpack(saved)
        if saved.chunk is not None:
            self._chunk_groups[saved.chunk.chunk_group].updates.require_unchanged(saved.chunk)
        if saved.tensor._version != saved.version:
            raise StaleGraphError(
                f"a tensor of shape {tuple(saved.tensor.shape)} that backward needs was "
                f"modified by an inplace operation (it is at version "
                f"{saved.tensor._version}, expected {saved.version})"
            )
        return saved.tensor

    def pinned_copies(self) -> int:
        """Gathered copies that some tensor views now."""
        return sum(chunk_group.params.pinned_copies() for chunk_group in self._chunk_groups)
