"""The parts of a chunk group that a migration changes, and what it is to move."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hetero.chunks.dtypes import Dtypes
from hetero.chunks.layout import Chunk, Layout
from hetero.planning.placement import Placement
from hetero.state.grad_reduce import GradReducer
from hetero.state.grads import Grads
from hetero.state.homes import Homes
from hetero.state.managed_param import ManagedParam
from hetero.state.optimizer_state import OptimizerState
from hetero.state.params import Params
from hetero.state.scratch_space import ScratchSpace
from hetero.state.slot_arenas import SlotArenas
from offload._native import StepPipeline
from offload.cache.slot_cache import SlotCache
from offload.device.backend import Backend, Updater
from offload.device.grad_offload import GradOffload
from offload.device.home_copy import HomeCopier
from offload.disk.backing import Extent
from offload.errors import HeteroError
from offload.memory.tiers import Tier


class StateKind(enum.Enum):
    """What of a chunk has a home; the values are Placement's names."""

    PARAM = "param"
    GRAD = "grad"
    OPTIM_STATE = "optim_state"


class InUseError(HeteroError):
    """Something that would have to move is in use; it may be free later."""


@dataclass(frozen=True)
class Move:
    """One kind of state of one chunk gets another home."""

    state_kind: StateKind
    chunk: Chunk
    of: Tier
    to: Tier


def moves_between(layout: Layout, before: Placement, after: Placement) -> list[Move]:
    """What moves."""
    moves = []
    for state_kind in StateKind:
        old, new = getattr(before, state_kind.value), getattr(after, state_kind.value)
        moves += [
            Move(state_kind, chunk, old[chunk.id], new[chunk.id])
            for chunk in layout.chunks
            if old[chunk.id] is not new[chunk.id]
        ]
    return moves


class Clearable(Protocol):
    """A cache of copies, or what fills one."""

    def clear(self) -> None: ...
    def refit(self) -> None: ...


class PipelineUser(Protocol):
    """Who needs to know of a new pipeline."""

    def use(self, pipeline: StepPipeline) -> None: ...


@dataclass(frozen=True)
class Link:
    """What there is beside RAM if DEVICE has memory of its own."""

    backend: Backend
    home_copier: HomeCopier
    grad_offload: GradOffload
    updater: Updater | None


@dataclass(frozen=True)
class Movable:
    """The parts of a chunk group that migrations change, as its builder has made them."""

    layout: Layout
    dtypes: Dtypes
    members: Sequence[ManagedParam]
    homes: Mapping[StateKind, Homes]
    extents: Mapping[StateKind, dict[int, Extent]]  # of what is on DISK
    file: ScratchSpace
    pools: SlotArenas
    params: Params
    grads: Grads
    optim_states: OptimizerState
    caches: Sequence[Clearable]  # of parameters, the nearest to compute first
    grad_cache: Clearable
    gathered_cache: SlotCache | None  # the one whose slots for every day the placement counts
    pipeline_users: Sequence[PipelineUser]
    grad_reducer: GradReducer | None
    link: Link | None
