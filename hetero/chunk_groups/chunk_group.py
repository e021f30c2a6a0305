"""A chunk group: parameters of one compute dtype, and all that keeps, moves and updates them; it is
made of a plan: its memory, what accesses its state, and its connections.

What fills the slots of gathered copies (this rank's homes, the file, other ranks) is decided in one
place, `_ChunkGroupBuilder._make_copies`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import torch

from hetero.activations.limits import ActivationLimits
from hetero.chunk_groups.muon_directions import MuonDirections
from hetero.chunk_groups.update_tasks import UpdatePass, UpdateTasks
from hetero.chunks.layout import Chunk
from hetero.config import Config
from hetero.planning.group_plans import ChunkGroupPlan
from hetero.planning.placement import Placement, SlotBytes, link_buffers
from hetero.ranks.communicator import Communicator
from hetero.ranks.device_group import DeviceGroup
from hetero.ranks.peers import Channel
from hetero.ranks.process_groups import ProcessGroups
from hetero.ranks.shard_server import RequestKind, ShardServer, Versions
from hetero.state.chunk_access import ChunkAccess, CopyCache, CopyCaches, ParamUpdates
from hetero.state.chunk_updates import ChunkUpdates, ChunkVersions, OwnShards, chunk_states
from hetero.state.gathering.agreed_gathers import AgreedGathers
from hetero.state.gathering.all_gather import Gathering
from hetero.state.gathering.transport import DeviceTransport, GatherTransport
from hetero.state.grads import Grads, LossScale
from hetero.state.managed_param import ManagedParam
from hetero.state.memory import DiskParts, Homes, ScratchSpace, SlotArenas, StateMemory
from hetero.state.optimizer_state import OptimizerState, TileState, parts_of
from hetero.state.reduction.grad_reduce import GradReducer
from hetero.state.reduction.means import DeviceMeans, MeanMemory, ReduceBuffers
from hetero.state.state_files import StateFiles
from hetero.state.unmanaged_params import UnmanagedParams
from offload._native import StepPipeline, UpdateKind
from offload.cache.slot_cache import (
    Backing,
    FileBacking,
    SharedCache,
    SharedWriteBackCache,
    SlotCache,
    UseOrder,
    WriteBackCache,
)
from offload.device.backend import Backend
from offload.device.cuda_backend import CudaBackend
from offload.device.fetch_queue import FetchQueue
from offload.device.grad_offload import GradOffload
from offload.device.home_copy import HomeCopier
from offload.device.updater import Updater
from offload.memory.arena import HostArena
from offload.memory.ledger import Ledger
from offload.memory.process_memory import ProcessExcess
from offload.memory.slot_pool import SlotPool
from offload.memory.tiers import Account, StateKind, Tier


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
        task_bytes: bytes that a task of the pipeline moves for its update, in the mean.
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
        self.trained_numel = sum(m.numel for m in self.members if m.chunk.trainable)
        tasks = sum(c.slots for c in self.layout.chunks if c.trainable) * len(self.dtypes.passes)
        update_bytes = self.trained_numel / self.layout.shard.ranks * self.dtypes.update_bytes
        self.task_bytes = update_bytes / max(1, tasks)

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

        The master keeps the bits below the compute dtype where it then rounds to the value, because
        nobody can tell any more which elements were written. (So does the split of bf16 by itself;
        with fp16, whose master is whole, follow_written() writes the others.) Raises what bringing
        them home raises.
        """
        if values is None:
            self.updates.versions.begin_write(managed.chunk)
        else:
            self.params.keep_written(managed, values)
            with self.optim_states.lock:  # the pipeline may keep the parameter, too
                self.memory.arenas.forget_read_ahead()
        managed.writes.passed_master = self.dtypes.compute == "fp16" and managed.chunk.trainable
        managed.writes.note()

    def follow_written(self, managed: ManagedParam) -> None:
        """Makes values that keep_written() got masters, where those round to others.

        Called when a step, or a reader, needs masters, wherever the values are: of several writes
        until then the last one counts.
        """
        with self.params.shard(managed.chunk) as shard:
            self._write_masters(managed, shard)
        managed.writes.passed_master = False

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


class _Closable(Protocol):
    def close(self) -> None: ...


_Part = TypeVar("_Part", bound=_Closable)
_Cache = TypeVar("_Cache", bound=SlotCache)


def build_chunk_group(
    plan: ChunkGroupPlan,
    params: Mapping[int, torch.nn.Parameter],
    first_number: Mapping[int, int],
    shared: Shared,
    world: ProcessGroups,
    spare_bytes: int,
) -> ChunkGroup:
    """Takes what `plan` says from the budgets. All ranks must do so; there are no values yet.

    Args:
        plan: the layout and the placement.
        params: the parameters, and perhaps others, by the index of their ParamSpec.
        first_number: by the same index, the number of a parameter's first element in the model.
        shared: the engine's configuration, device and budgets.
        world: the ranks, over connections for this chunk group alone.
        spare_bytes: RAM that no plan counts on: gathered copies may use it while it is free.

    Raises:
        BudgetError, StoreError, NativeIoError: with nothing taken.
    """
    dtype, device = plan.dtypes.torch_compute, shared.backend.device
    members = [
        ManagedParam(params[s.param.index], chunk, s, dtype, device)
        for chunk in plan.layout.chunks
        for s in chunk.slices
    ]
    with ExitStack() as resources:
        builder = _ChunkGroupBuilder(plan, members, shared, world, resources)
        return builder.build(first_number, spare_bytes)


@dataclass
class _ChunkGroupBuilder:
    """Makes the parts of one chunk group; each is closed by `resources` if a later one fails."""

    plan: ChunkGroupPlan
    members: list[ManagedParam]
    shared: Shared
    world: ProcessGroups
    resources: ExitStack

    def __post_init__(self) -> None:
        self._layout, self._placement = self.plan.layout, self.plan.placement
        self._dtypes = self.plan.dtypes
        self._backend, self._ledger = self.shared.backend, self.shared.ledger
        self._servers: list[ShardServer] = []

    def build(self, first_number: Mapping[int, int], spare_bytes: int) -> ChunkGroup:
        """All parts, in the order in which they need each other."""
        memory = self._make_memory(spare_bytes)
        homes = memory.homes
        device = self._make_device_parts(memory.scratch_space)
        grad_offload = None if device is None else device.grad_offload
        updater = None if device is None else device.updater
        overlap = self.shared.config.debugging.overlap_updates
        chunks = chunk_states(self._layout.chunks, self.members)
        versions = ChunkVersions(memory, chunks)
        updates = ChunkUpdates(memory, chunks, versions, overlap)
        optim_states = OptimizerState(
            self._layout.tile_numel, self._dtypes, memory, versions.begin_write
        )
        grads = Grads(
            self._layout,
            self._dtypes,
            homes[StateKind.GRAD],
            lambda before_write: self._file_cache(
                memory, memory.arenas.grads, StateKind.GRAD, UseOrder(), before_write=before_write
            ),
            updates,
            grad_offload if self.world.everyone is None else None,
            updater,
        )
        params, gathering = self._make_params(memory, updates, optim_states)
        ranks: RankParts | None = None
        if self.world.everyone is not None:
            grad_reducer = self._make_grad_reducer(grads, grad_offload)
            ranks = RankParts(grad_reducer, gathering, self._servers)
        return ChunkGroup(
            plan=self.plan,
            members=self.members,
            memory=memory,
            params=params,
            grads=grads,
            optim_states=optim_states,
            updates=updates,
            update_tasks=self._make_update_tasks(memory, grads, updates, first_number),
            world=self.world,
            ranks=ranks,
            device=device,
            resources=self.resources.pop_all(),
        )

    def _make_update_tasks(
        self,
        memory: StateMemory,
        grads: Grads,
        updates: ChunkUpdates,
        first_number: Mapping[int, int],
    ) -> UpdateTasks:
        directions = None
        if len(self._dtypes.passes) > 1:
            shard = self.world.shard
            directions = MuonDirections(self._layout, shard, self._backend.device)
        passes = [UpdatePass(kind, self._updater(kind)) for kind in self._dtypes.passes]
        return UpdateTasks(memory, grads, updates, first_number, passes, directions)

    def _updater(self, kind: UpdateKind) -> Updater | None:
        """Of what is at home on a DEVICE, unless the CPU can update that."""
        if not self._backend.separate:
            return None
        updater = self._backend.updater(kind, self._layout.tile_numel)
        if updater is not None and Tier.DEVICE in self._placement.param:
            updater.prepare()
        return updater

    def _owned(self, part: _Part) -> _Part:
        """The part, which is closed in the end, or if a later one cannot be made."""
        return self.resources.enter_context(closing(part))

    # Memory

    def _make_memory(self, spare_bytes: int) -> StateMemory:
        file = ScratchSpace(
            self.shared.config,
            self._ledger,
            self.shared.notes,
            self.resources,
            self.shared.state_files,
            self._layout.chunks[0].group_index,
        )
        memory = StateMemory(self.plan, self._backend, self._ledger, file, self.resources)
        memory.arenas.allocate(self._placement, spare_bytes)
        return memory

    def _make_device_parts(self, file: ScratchSpace) -> DeviceParts | None:
        if not self._backend.separate:
            return None
        sizes = link_buffers(self._layout, self._dtypes)
        buffers = self._owned(self._backend.host_arena(*sizes, self._ledger, Account.LINK))
        buffers.commit_all()
        limit_bytes = self._placement.grad_offload_bytes
        grad_offload = self._owned(GradOffload(self._backend, self._ledger, limit_bytes, buffers))
        home_copier = HomeCopier(self._backend, buffers, file)
        updater = self._updater(self._dtypes.kind)
        return DeviceParts(self._backend, home_copier, grad_offload, updater)

    # Copies of parameters

    def _make_params(
        self, memory: StateMemory, updates: ChunkUpdates, optim_states: OptimizerState
    ) -> tuple[ChunkAccess, Gathering | None]:
        homes, arenas = memory.homes[StateKind.PARAM], memory.arenas
        order, versions = UseOrder(), Versions(len(self._layout.chunks))
        dtype = self._dtypes.torch_compute
        shard_cache = self._file_cache(
            memory,
            arenas.gathered if arenas.read_in_place else arenas.shards,
            StateKind.PARAM,
            order,
            before_read=updates.wait_written,
        )
        # Shards on their way to ranks may take all the room for a while.
        peers, config = self.world.shard, self.shared.config
        patience_s = 0.0 if peers is None else config.rank_timeout_s
        shards = OwnShards(homes, SharedWriteBackCache(shard_cache, dtype, patience_s), updates)
        gathering: Gathering | None = None

        def serve(ranks: Communicator) -> ShardServer:
            made = ShardServer(ranks, self._layout, versions, shards.open, optim_states.open_raw)
            self._servers.insert(0, made)  # closed in the reverse order, as all else
            return self._owned(made)

        if self.world.replicas is not None and self.plan.spec.averages_on_device:
            # They ask for nothing. A device does not see that a rank is gone; this does.
            serve(self.world.replicas)
        if peers is not None:
            transport = self._make_transport(peers, homes, arenas)
            server = serve(peers)
            in_ram = arenas.staged if self._backend.separate else arenas.gathered
            gathering = self._owned(
                Gathering(self._layout, server, shards, versions, transport, in_ram, dtype)
            )
        copies = self._make_copies(arenas, homes, shard_cache, shards, gathering, order)
        prefetch = config.debugging.prefetch
        agreed: AgreedGathers | None = None
        by_ram = self._backend.separate and not self._layout.shard.between_devices
        # (Through RAM to a device: who needs a chunk reads it when there is room.)
        if gathering is not None and not homes.whole and not by_ram:
            agreed = AgreedGathers(
                self._layout, gathering, homes.is_resident, copies.cache, prefetch
            )
            self.world.while_waiting.add(agreed)
        seen = None if self.world.everyone is None else versions
        led = ParamUpdates(homes, copies, updates, seen, gathering, self._backend.lead_threads)
        params = ChunkAccess(homes, copies, updates, led, gathering, agreed, prefetch)
        return params, gathering

    def _make_transport(
        self, peers: Communicator, homes: Homes, arenas: SlotArenas
    ) -> GatherTransport:
        """What carries parameters from rank to rank, as all ranks have decided alike."""
        if not self._layout.shard.between_devices:
            return GatherTransport(peers)
        assert isinstance(self._backend, CudaBackend)
        # Closed after the shard server: all ranks are done then.
        group = self._owned(DeviceGroup(peers, Channel.GATHERS, self._backend, peers))
        return DeviceTransport(group, self._backend, self._layout, homes, arenas.unkept)

    def _make_copies(
        self,
        arenas: SlotArenas,
        homes: Homes,
        shard_cache: SlotCache,
        shards: OwnShards,
        gathering: Gathering | None,
        order: UseOrder,
    ) -> CopyCaches:
        """The copies that compute uses, and what fills their slots.

        If compute happens in RAM, the file fills them (one rank), or all ranks' shards do; if not,
        they are copied from RAM, where the file or the ranks bring the chunks, or the ranks'
        devices fill them.
        """
        dtype, layout = self._dtypes.torch_compute, self._layout
        caches: tuple[CopyCache, ...] = ()
        if not self._backend.separate:
            cache: SlotCache = shard_cache
            if gathering is not None:
                limit = self._placement.gathered_slots
                cache = self._cache(SlotCache, arenas.gathered, gathering, order, limit)
                caches = (cache,)
        else:
            in_ram: SharedCache = shards.slots
            if gathering is not None:
                in_ram = SharedCache(self._cache(SlotCache, arenas.staged, gathering, order), dtype)
                caches = (in_ram,)

            chunks = layout.chunks

            def whole_home(chunk: int) -> torch.Tensor | None:
                found = chunks[chunk]
                return homes.flat(found) if homes.whole and found in homes else None

            fetches = self._owned(
                FetchQueue(
                    arenas.gathered,
                    self._backend,
                    whole_home,
                    in_ram,
                    {c.id: c.used_numel * self._dtypes.param_bytes for c in chunks},
                )
            )
            cache = self._cache(SlotCache, arenas.gathered, fetches, order)
            caches = (cache, fetches, *caches)
        return CopyCaches(
            arena=arenas.gathered,
            cache=cache,
            order=order,
            dtype=dtype,
            whole=caches,
            shards=shards,
            has_soft_limit=gathering is not None and not self._backend.separate,
        )

    def _file_cache(
        self,
        memory: StateMemory,
        arena: HostArena,
        state_kind: StateKind,
        order: UseOrder,
        before_read: Callable[[int], object] | None = None,
        before_write: Callable[[int], object] | None = None,
    ) -> WriteBackCache:
        extents = memory.homes[state_kind].extents
        backing = FileBacking(arena, memory.scratch_space, extents, before_read, before_write)
        return self._cache(WriteBackCache, arena, backing, order)

    def _cache(
        self,
        kind: type[_Cache],
        arena: HostArena,
        backing: Backing,
        order: UseOrder,
        limit: int | None = None,
    ) -> _Cache:
        chunks = self._layout.chunks
        names = [f"the chunk of {c.name}" for c in chunks]
        runs = {c.id: c.slots for c in chunks}
        return self._owned(kind(arena, backing, runs, order, names.__getitem__, limit))

    # Means over the ranks

    def _make_grad_reducer(self, grads: Grads, grad_offload: GradOffload | None) -> GradReducer:
        """The reducer in front of `grads`; `grad_offload` brings them from a DEVICE to RAM.

        All ranks must call it. Raises BudgetError, and PeerError.
        """
        layout, placement = self._layout, self._placement
        slot_bytes = SlotBytes.of(layout, self._dtypes).bucket
        shard_bytes = slot_bytes // layout.shard.ranks
        dtype, received = self._dtypes.torch_reduce, placement.receive_slots
        on_device = bool(self.plan.spec.averages_on_device and placement.longest_trained)
        make = self._backend.arena if on_device else self._backend.host_arena
        pool = partial(SlotPool, lambda n: make(n, slot_bytes, self._ledger, Account.BUCKET))
        buckets = self._owned(pool(placement.bucket_slots))
        received_pool = self._owned(pool(received))
        of_shards = partial(self._bucket_arena, self._backend.host_arena, shard_bytes)
        between_replicas: HostArena | None = None
        means: DeviceMeans | None = None
        if on_device:
            grad_offload = None
            in_ram = of_shards(received)
            in_ram.commit_all()
            means = self._make_device_means(grads, in_ram, slot_bytes, shard_bytes)
        elif self.world.replicas is not None and placement.longest_trained:
            between_replicas = of_shards(placement.longest_trained)
            between_replicas.commit_all()
        buffers = ReduceBuffers(dtype, buckets, received_pool, between_replicas, means)
        trained = [m for m in self.members if m.chunk.trainable]
        loss_scale = self.shared.loss_scale
        made = GradReducer(layout, trained, self.world, buffers, grads, loss_scale, grad_offload)
        if self.plan.spec.reduce_at_end:
            self.resources.enter_context(made.no_sync())
        return made

    def _bucket_arena(
        self, make: Callable[..., HostArena], slot_bytes: int, slots: int
    ) -> HostArena:
        """So many slots, where `make` makes them, for gradients or this rank's shards of them."""
        return self._owned(make(slots, slot_bytes, self._ledger, Account.BUCKET))

    def _make_device_means(
        self, grads: Grads, in_ram: HostArena, slot_bytes: int, shard_bytes: int
    ) -> DeviceMeans:
        assert isinstance(self._backend, CudaBackend)
        assert self.world.everyone is not None
        shard, replicas = self.world.shard, self.world.replicas
        group = self._owned(
            DeviceGroup(self.world.everyone, Channel.GRADIENTS, self._backend, shard, replicas)
        )
        longest, dtype = self._placement.longest_trained, self._dtypes.torch_reduce
        make = self._backend.arena
        between: torch.Tensor | None = None
        if replicas is not None:
            between = self._bucket_arena(make, shard_bytes, longest).view(0, longest, dtype)
        zeros = self._bucket_arena(make, slot_bytes, longest).view(0, longest, dtype)
        memory = MeanMemory(zeros, in_ram, between)
        return self._owned(
            DeviceMeans(self.world, group, self._backend, grads.homes, self._layout.shard, memory)
        )
