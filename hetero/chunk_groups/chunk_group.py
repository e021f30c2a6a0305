"""A chunk group: parameters of one compute dtype, and all that keeps, moves and updates them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch

from hetero.activations.limits import ActivationLimits
from hetero.chunk_groups.update_tasks import UpdateTasks
from hetero.chunks.layout import Chunk
from hetero.config import Config
from hetero.planning.group_plans import ChunkGroupPlan
from hetero.planning.placement import Placement, SlotBytes
from hetero.ranks.process_groups import ProcessGroups
from hetero.ranks.shard_server import RequestKind, ShardServer
from hetero.state.chunk_access import ChunkAccess
from hetero.state.chunk_updates import ChunkUpdates
from hetero.state.gathering.all_gather import Gathering
from hetero.state.grads import Grads, LossScale
from hetero.state.managed_param import ManagedParam
from hetero.state.memory.homes import Homes, SlotArenas
from hetero.state.memory.scratch_space import DiskParts, ScratchSpace, StateFiles
from hetero.state.optimizer_state import OptimizerState, TileState, parts_of
from hetero.state.reduction.grad_reduce import GradReducer
from hetero.state.unmanaged_params import UnmanagedParams
from offload._native import StepPipeline
from offload.cache.slot_cache import UseOrder
from offload.device.backend import Backend
from offload.device.grad_offload import GradOffload
from offload.device.home_copy import HomeCopier
from offload.device.updater import Updater
from offload.memory.ledger import Ledger
from offload.memory.process_memory import ProcessExcess
from offload.memory.tiers import StateKind


@dataclass(frozen=True)
class Shared:
    """What all chunk groups of an engine share.

    `notes` are lines for the user, to append to; `unmanaged` charges what no chunk group has;
    `state_files` those of a durable state, else None;
    `activations` what is left to activations, or None if autograd keeps them; `excess` by how much
    the process is too large, or None if it has no limit.
    """

    config: Config
    backend: Backend
    ledger: Ledger
    notes: list[str]
    loss_scale: LossScale
    unmanaged: UnmanagedParams
    state_files: StateFiles | None = None
    activations: ActivationLimits | None = None
    excess: ProcessExcess | None = None


@dataclass(frozen=True)
class StateMemory:
    """The memory and the file that hold this rank's part of a chunk group's state.

    `arenas` has the slots for copies, and the pipeline over its buffers.
    """

    homes: Mapping[StateKind, Homes]
    scratch_space: ScratchSpace
    arenas: SlotArenas


@dataclass(frozen=True)
class RankParts:
    """What exists only with several ranks; `gathering` only if they share chunks.

    `servers` are for the ranks of the shard group, and for replicas whose devices are waited for.
    """

    grad_reducer: GradReducer
    gathering: Gathering | None
    servers: Sequence[ShardServer]


@dataclass(frozen=True)
class DeviceParts:
    """What exists only if DEVICE has memory of its own; `updater` if the CPU cannot use that."""

    backend: Backend
    home_copier: HomeCopier
    grad_offload: GradOffload
    updater: Updater | None


@dataclass(eq=False, repr=False, kw_only=True)
class ChunkGroup:
    """Parameters that are laid out together, with their homes, slots, file and connections.

    An engine has one for the parameters in its compute dtype, another for those that stay in fp32,
    and one for each set of parameters that is added after initialize(). They share the ledger
    alone: chunk ids, slots and messages belong to one chunk group. build_chunk_group() makes it.

    Attributes:
        plan: dtypes, layout and first placement.
        members: the parameters, chunk by chunk; `memory` holds their state.
        params, grads, optim_states: read and change each kind of state; `update_tasks` updates all.
        updates: the states of chunks in the optimizer step: uses of a chunk wait for its update.
        world: the ranks, over connections that this chunk group alone uses.
        ranks: None for one rank.
        device: None if compute happens in RAM.
        resources: what close() closes, in the reverse order of its making.
        trained_numel: elements of the parameters that are trained.
    """

    plan: ChunkGroupPlan
    members: Sequence[ManagedParam]
    memory: StateMemory
    params: ChunkAccess
    grads: Grads
    optim_states: OptimizerState
    updates: ChunkUpdates
    update_tasks: UpdateTasks
    world: ProcessGroups
    ranks: RankParts | None
    device: DeviceParts | None
    resources: ExitStack

    def __post_init__(self) -> None:
        self.layout, self.dtypes = self.plan.layout, self.plan.dtypes
        self.placement: Placement = self.plan.placement
        self.reduce_at_end = self.plan.spec.reduce_at_end
        self.trained_numel = sum(m.numel for m in self.members if m.chunk.trainable)

    @property
    def order(self) -> UseOrder:
        """The learned order in which steps gather chunks."""
        return self.params.copies.order

    @property
    def pipeline(self) -> StepPipeline:
        """The native pipeline that updates; homes that move get the chunk group a new one."""
        return self.memory.arenas.pipeline

    @property
    def disk(self) -> DiskParts | None:
        """The file and its I/O engine; None until something is homed on DISK."""
        return self.memory.scratch_space.parts

    @property
    def wait_s(self) -> float:
        """Seconds for which compute has waited for transfers so far."""
        waited = self.params.wait_s + self.grads.wait_s + self.update_wait_s
        return waited if self.ranks is None else waited + self.ranks.grad_reducer.means.wait_s

    @property
    def update_wait_s(self) -> float:
        """Seconds for which updates, and changes for saves and commits, have been waited for."""
        return self.updates.wait_s + self.updates.versions.snapshots.wait_s

    def note_placement(self, placement: Placement) -> None:
        """Homes and slots are now where `placement` says."""
        self.placement = placement

    def placement_if_reducing_at_end(self) -> Placement:
        """The placement with room for whole gradients until the end of backward."""
        shard, made = self.layout.shard, self.placement
        if self.reduce_at_end or self.ranks is None or not shard.grads:
            return made
        slots = sum(c.slots for c in self.layout.chunks if c.trainable)
        more = max(0, slots - made.bucket_slots)
        more_bytes = more * SlotBytes.of(self.layout, self.dtypes).bucket
        made = replace(made, bucket_slots=made.bucket_slots + more)
        if self.plan.spec.averages_on_device:
            return replace(made, device_bytes=made.device_bytes + more_bytes)
        return replace(made, host_bytes=made.host_bytes + more_bytes)

    def begin_reducing_at_end(self) -> None:
        """Keeps gradients whole until the end of backward from now on; idempotent.

        Raises BudgetError if there is no room for them, with nothing changed.
        """
        if not self.reduce_at_end:
            placement = self.placement_if_reducing_at_end()
            more_slots = placement.bucket_slots - self.placement.bucket_slots
            if self.ranks is not None:
                self.ranks.grad_reducer.means.reserve(more_slots)
            self.placement, self.reduce_at_end = placement, True
            self.resources.enter_context(self.no_sync())

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside the block gradients are only added up on each rank."""
        return nullcontext() if self.ranks is None else self.ranks.grad_reducer.no_sync()

    def commit(self) -> None:
        """Charges the rest of the planned RAM to the ledger, once the parameters have values.

        Afterwards what a budget has beyond the bytes in use is free for other chunk groups.
        """
        self.memory.homes[StateKind.GRAD].commit_all()

    def keep_written(self, managed: ManagedParam, values: torch.Tensor | None) -> None:
        """Makes `values`, which user code has written outside of gathered(modifier_rank=...), those
        of the parameter; None: they are at home already. For one rank.

        The master keeps the bits below the compute dtype, because nobody can tell any more which
        elements were written (with fp16, whose master is whole, those are written that the master
        does not round to). Raises what bringing them home raises.
        """
        if values is None:
            self.updates.versions.begin_write(managed.chunk)
        else:
            self.params.keep_written(managed, values)
            with self.optim_states.lock:  # the pipeline may keep the parameter, too
                self.memory.arenas.forget_read_ahead()
        if self.dtypes.compute == "fp16" and managed.chunk.trainable:
            with self.params.shard(managed.chunk) as shard:
                self._write_masters(managed, shard)
        managed.writes.note()

    def _write_masters(self, managed: ManagedParam, shard: torch.Tensor) -> None:
        for part in parts_of(managed, self.layout):
            with self.optim_states.open(managed.chunk, part.tile, write=True) as optim_state:
                assert optim_state is not None
                assert optim_state.master is not None
                master = optim_state.master[part.in_tile]
                begin = part.tile * self.layout.tile_numel
                values = shard[begin:][part.in_tile].to(master.device)
                written = master.to(values.dtype) != values
                master[written] = values[written].float()

    def fail_waiting_ranks(self, why: str) -> None:
        """Tells the ranks that wait for values of this one that these will not come, and why."""
        self.params.updates.versions.end(why)

    def answer_until_left(self) -> None:
        """Answers other ranks until they ask for nothing any more; this one does not, either."""
        for server in () if self.ranks is None else self.ranks.servers:
            server.close()

    def close(self) -> None:
        """Frees memory, file and threads; idempotent."""
        self.params.close()
        self.resources.close()

    @contextmanager
    def open_optim_state(self, chunk: Chunk, tile: int, rank: int) -> Iterator[TileState | None]:
        """The optimizer state of one tile of `rank`'s shard, for reading inside the block.

        It is None for a frozen chunk. Another rank's is a copy.
        """
        if rank == self.layout.shard.rank or not chunk.trainable:
            with self.optim_states.open(chunk, tile) as optim_state:
                yield optim_state
            return
        assert self.ranks is not None
        assert self.ranks.gathering is not None
        raw, server = self.optim_states.empty(), self.ranks.gathering.server
        server.request(RequestKind.OPTIM_STATE, chunk, tile, rank, raw).wait()
        yield self.optim_states.over(raw)
