"""A chunk of a chunk group while it is trained: its members, who uses it, and its update.

The phases of its update, and what leads from one to another (ChunkUpdates has the transitions):

    Open         parameters have their values, and backward may add gradients
                     -> Speculative   speculating(): no more gradients are expected
                     -> Submitted     submit(): step() submits an update that stays
    Speculative  an update is made with a guess of what step() will say
                     -> Open          revoke(), take_back(): a value is used, a gradient changes
                     -> Submitted     decide(): step() keeps the update, or has it made again
    Submitted    the update reads the gradient, and writes parameters and optimizer state
                     -> Done          wait_updated()
    Done         the gradient is free and home has the new values, where param.data does not point
                     -> Open          finish()

A phase is a frozen object that has what is known in that phase alone, so no other combination can
be made. A chunk also has *versions* of its state in the scratch file (chunk_versions.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from hetero.chunks.layout import Chunk
from hetero.state.managed_param import ManagedParam
from offload._native import Hyper
from offload.disk.scratch_file import Extent
from offload.memory.operation import Operation
from offload.memory.tiers import StateKind


@dataclass(frozen=True)
class Open:
    """No update has begun. `is_final`: backward adds no more gradients."""

    is_final: bool = False


@dataclass(frozen=True)
class Speculative:
    """An update of `members` is under way that can be taken back, with these `hypers` of each."""

    members: Sequence[ManagedParam]
    hypers: Sequence[Hyper]


@dataclass(frozen=True)
class Submitted:
    """An update of `members` is under way that stays.

    `is_awaited`: step() waits for it, because something has the chunk's memory in hands.
    `is_remade`: it was made before, speculatively, and reads what was there before that.
    """

    members: Sequence[ManagedParam]
    is_awaited: bool
    is_remade: bool = False


@dataclass(frozen=True)
class Done:
    """The update of `members` is made; is_awaited as before."""

    members: Sequence[ManagedParam]
    is_awaited: bool


@dataclass(eq=False)
class FileVersions:
    """What the scratch file has of a chunk beside the extents in use.

    Attributes:
        spare: by kind the second extent, which updates write that leave what they read.
        leaves_commit: the last commit has what the next update reads, so that must leave it.
        changed: whether the state in use is another one than the last commit has.
        copies: by kind, of what has its home in memory, the offsets of two extents; the last commit
            has the first one, unless none has `copied` it since it has its home in memory.
    """

    spare: dict[StateKind, Extent] = field(default_factory=dict)
    leaves_commit: bool = False
    changed: bool = True
    copies: dict[StateKind, tuple[int, int]] = field(default_factory=dict)
    copied: set[StateKind] = field(default_factory=set)


@dataclass
class UsedCopy:
    """A gathered copy of a chunk, whole and flat, and how many parameters are views of it."""

    copy: torch.Tensor
    params: int = 0


@dataclass(eq=False)
class ChunkState:
    """One chunk, as the comment at the top says.

    Attributes:
        chunk: its size and its place in the layout.
        members: its parameters, in the order of their places.
        first_key: the pipeline's name of its first tile; those of the others follow.
        update: the phase.
        versions: what the scratch file has of it.
        readers: threads that read its memory (ChunkUpdates.reading()).
        was_revoked: an update was taken back in this step.
        first_use: the order of forward's first uses in this step; None before.
        used: the gathered copy that parameters in use are views of.
        whole_gather: the gather of new values from all ranks that is under way.
        arrived: whose gradients have come in this backward, where they are homed on DISK.
    """

    chunk: Chunk
    members: Sequence[ManagedParam]
    first_key: int
    update: Open | Speculative | Submitted | Done = Open()
    versions: FileVersions = field(default_factory=FileVersions)
    readers: int = 0
    was_revoked: bool = False
    first_use: int | None = None
    used: UsedCopy | None = None
    whole_gather: Operation | None = None
    arrived: set[ManagedParam] = field(default_factory=set)

    @property
    def is_under_way(self) -> bool:
        """Whether its parameters do not have the new values of an update that stays yet."""
        return isinstance(self.update, Submitted | Done)

    @property
    def is_awaited(self) -> bool:
        """Whether step() waits for its update: something has its memory in hands."""
        return isinstance(self.update, Submitted | Done) and self.update.is_awaited


def chunk_states(chunks: Sequence[Chunk], members: Sequence[ManagedParam]) -> list[ChunkState]:
    """The states of all chunks of a chunk group, by id; `members` are all of its parameters."""
    by_id: list[list[ManagedParam]] = [[] for _ in chunks]
    for m in sorted(members, key=lambda m: m.slice.offset):
        by_id[m.chunk.id].append(m)
    made, key = list[ChunkState](), 0
    for chunk in chunks:
        made.append(ChunkState(chunk, by_id[chunk.id], key))
        key += chunk.slots
    return made
