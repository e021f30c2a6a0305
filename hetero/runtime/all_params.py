"""The parameters of all chunk groups: each use goes to the chunk group that has the chunk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Protocol

import torch

from hetero.chunk_groups.chunk_group import ChunkGroup
from hetero.chunks.layout import Chunk
from hetero.state.managed_param import ManagedParam


class UpdateGuard(Protocol):
    """Knows the chunks that are updated while backward runs, which must not be used then."""

    @property
    def changing_homes(self) -> Mapping[int, Chunk]:
        """The chunks whose homes compute uses, and updates change during backward, by address."""

    def check_use(self, managed: ManagedParam) -> None:
        """Raises HeteroError for an updated parameter, whose value is needed before step()."""

    def check_saved(self, chunk: Chunk) -> None:
        """Raises StaleGraphError if backward needs what it saved of an updated chunk."""


class AllParams:
    """Gives parameters their values, whichever chunk group they are in."""

    def __init__(self, chunk_groups: Sequence[ChunkGroup], guard: UpdateGuard) -> None:
        """`chunk_groups` may grow."""
        self._chunk_groups = chunk_groups
        self._guard = guard

    @property
    def gathers(self) -> bool:
        """Whether some parameters are gathered."""
        return any(chunk_group.params.gathers for chunk_group in self._chunk_groups)

    def is_resident(self, chunk: Chunk) -> bool:
        """Whether the whole chunk's home is where compute happens, which uses it in place."""
        return self._chunk_groups[chunk.group_index].params.is_resident(chunk)

    def flat(self, chunk: Chunk) -> torch.Tensor:
        """The chunk's parameters now, whole and flat; unless resident a pin on a gathered copy."""
        return self._chunk_groups[chunk.group_index].params.flat(chunk)

    @contextmanager
    def present(self, members: Iterable[ManagedParam]) -> Iterator[None]:
        """Inside the block the parameters have their values, in the compute dtype.

        All are released in the end, also if one could not be acquired, or was changed in place.

        Raises:
            HeteroError: one was updated during backward, or its gathered copy was changed in place.
            BudgetError: pins leave no room.
            PeerError, NativeIoError: values could not be brought.
        """
        with ExitStack() as acquired:
            for managed in members:
                params = self._chunk_groups[managed.chunk.group_index].params
                self._guard.check_use(managed)
                params.acquire(managed)
                acquired.callback(params.release, managed)
            yield

    def settle(self) -> None:
        """Waits until nothing that was asked of other ranks is under way."""
        for chunk_group in self._chunk_groups:
            chunk_group.params.settle()

    def pinned_copies(self) -> int:
        """Gathered copies that some tensor views now."""
        return sum(chunk_group.params.pinned_copies() for chunk_group in self._chunk_groups)
