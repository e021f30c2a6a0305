"""From a plan to a chunk group: its memory, what accesses its state, and its connections.

What fills the slots of gathered copies (this rank's homes, the file, other ranks) is decided in one
place, `_ChunkGroupBuilder._make_copies`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

import torch

from hetero.chunk_groups.chunk_group import ChunkGroup, DeviceParts, RankParts, Shared, StateMemory
from hetero.chunk_groups.muon_directions import MuonDirections
from hetero.chunk_groups.update_tasks import UpdatePass, UpdateTasks
from hetero.planning.group_plans import ChunkGroupPlan
from hetero.planning.placement import SlotBytes, link_buffers
from hetero.ranks.communicator import Communicator
from hetero.ranks.device_group import DeviceGroup
from hetero.ranks.peers import Channel
from hetero.ranks.process_groups import ProcessGroups
from hetero.ranks.shard_server import ShardServer, Versions
from hetero.state.chunk_access import ChunkAccess, CopyCache, CopyCaches, ParamUpdates
from hetero.state.chunk_state import chunk_states
from hetero.state.chunk_updates import ChunkUpdates, OwnShards
from hetero.state.chunk_versions import ChunkVersions, CommittedState
from hetero.state.gathering.agreed_gathers import AgreedGathers
from hetero.state.gathering.all_gather import DeviceGathers, Gathering, GatherStream
from hetero.state.gathering.transport import DeviceTransport, GatherTransport
from hetero.state.grads import Grads
from hetero.state.managed_param import ManagedParam
from hetero.state.memory.homes import Homes, SlotArenas, extent_size, map_file, name_of
from hetero.state.memory.scratch_space import ScratchSpace
from hetero.state.optimizer_state import OptimizerState
from hetero.state.reduction.grad_reduce import GradReducer
from hetero.state.reduction.means import DeviceMeans, MeanMemory, ReduceBuffers
from offload._native import UpdateKind
from offload.cache.slot_cache import (
    SharedCache,
    SharedWriteBackCache,
    SlotCache,
    UseOrder,
    WriteBackCache,
)
from offload.device.cuda_backend import CudaBackend
from offload.device.fetch_queue import FetchQueue
from offload.device.grad_offload import GradOffload
from offload.device.home_copy import HomeCopier
from offload.device.updater import Updater
from offload.disk.scratch_file import Backing, FileBacking
from offload.memory.arena import HostArena
from offload.memory.slot_pool import DevicePool, SlotPool
from offload.memory.tiers import Account, StateKind, Tier


@dataclass
class GradReducerBuilder:
    """Makes one chunk group's reducer; `resources` close what belongs to it."""

    plan: ChunkGroupPlan
    shared: Shared
    world: ProcessGroups
    resources: ExitStack

    def build(
        self, grads: Grads, trained: Sequence[ManagedParam], grad_offload: GradOffload | None
    ) -> GradReducer:
        """The reducer in front of `grads`, which are of the `trained` parameters.

        `grad_offload` brings gradients from a DEVICE to RAM. All ranks must call it. Raises
        BudgetError, and PeerError.
        """
        layout, placement = self.plan.layout, self.plan.placement
        bucket_bytes = SlotBytes.of(layout, self.plan.dtypes).bucket

        def arena(slots: int, nbytes: int = bucket_bytes) -> HostArena:
            # (Gradients come to buckets from the device.)
            made = self.shared.backend.host_arena(slots, nbytes, self.shared.ledger, Account.BUCKET)
            self.resources.callback(made.close)  # also if there is no room for its slots
            return made

        dtype, received = self.plan.dtypes.torch_reduce, placement.receive_slots
        if self.plan.spec.averages_on_device and placement.longest_trained:
            device_buckets: DevicePool | None = None
            in_ram: HostArena | None = None
            if layout.shard.grads:
                grad_offload = None
                device_buckets = DevicePool(self._device_buckets, placement.bucket_slots)
                in_ram = arena(received, bucket_bytes // layout.shard.ranks)
                in_ram.commit(0, received)
            buffers = ReduceBuffers(
                dtype,
                device_buckets,
                DevicePool(self._device_buckets, received),
                None,
                device=self._make_device_means(grads, in_ram),
            )
        else:
            between_replicas: HostArena | None = None
            if self.world.replicas is not None and placement.longest_trained:
                between_replicas = arena(
                    placement.longest_trained, bucket_bytes // layout.shard.ranks
                )
                between_replicas.commit(0, placement.longest_trained)
            buckets: SlotPool | None = None
            if layout.shard.grads:
                trained_slots = sum(c.slots for c in layout.chunks if c.trainable)
                slots = placement.bucket_slots
                buckets = SlotPool(arena(max(trained_slots, slots)), slots)
            pool = SlotPool(arena(received), received)
            buffers = ReduceBuffers(dtype, buckets, pool, between_replicas)
        grad_reducer = GradReducer(
            layout,
            trained,
            self.world,
            buffers,
            grads,
            self.shared.loss_scale,
            grad_offload,
        )
        if self.plan.spec.reduce_at_end:
            self.resources.enter_context(grad_reducer.no_sync())
        return grad_reducer

    def _device_buckets(self, slots: int, shards: bool = False) -> HostArena:
        """Slots of the device for whole gradients, or for this rank's `shards` of them."""
        nbytes = SlotBytes.of(self.plan.layout, self.plan.dtypes).bucket
        if shards:
            nbytes //= self.plan.layout.shard.ranks
        made = self.shared.backend.arena(slots, nbytes, self.shared.ledger, Account.BUCKET)
        self.resources.callback(made.close)
        return made

    def _make_device_means(self, grads: Grads, in_ram: HostArena | None) -> DeviceMeans:
        assert isinstance(self.shared.backend, CudaBackend)
        assert self.world.everyone is not None
        shard, replicas = self.world.shard, self.world.replicas
        group = DeviceGroup(
            self.world.everyone, Channel.GRADIENTS, self.shared.backend, shard, replicas
        )
        self.resources.callback(group.close)
        longest, dtype = self.plan.placement.longest_trained, self.plan.dtypes.torch_reduce
        between: torch.Tensor | None = None
        if replicas is not None:
            between = self._device_buckets(longest, shards=True).view(0, longest, dtype)
        spare = self._device_buckets(longest).view(0, longest, dtype)
        means = DeviceMeans(
            self.world,
            group,
            self.shared.backend,
            grads.homes,
            self.plan.layout.shard,
            MeanMemory(spare, in_ram, between),
        )
        self.resources.callback(means.close)
        return means


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
        self._trained = [m for m in self.members if m.chunk.trainable]
        self._servers: list[ShardServer] = []

    def build(self, first_number: Mapping[int, int], spare_bytes: int) -> ChunkGroup:
        """All parts, in the order in which they need each other."""
        memory = self._make_memory(spare_bytes)
        homes, arenas, file = memory.homes, memory.arenas, memory.scratch_space
        device = self._make_device_parts(file)
        grad_offload = None if device is None else device.grad_offload
        updater = None if device is None else device.updater
        overlap = self.shared.config.debugging.overlap
        chunks = chunk_states(self._layout.chunks, self.members)
        committed: CommittedState | None = None
        if file.is_durable:
            committed = CommittedState(self._layout, self._dtypes, homes, file, chunks)
            committed.reserve_copies()
        versions = ChunkVersions(self._layout, self._dtypes, homes, file, arenas, chunks, committed)
        if file.is_durable:
            versions.reserve_all()
        updates = ChunkUpdates(chunks, homes, arenas, versions, overlap)
        optim_states = OptimizerState(
            self._layout.tile_numel,
            self._dtypes,
            updater,
            homes[StateKind.OPTIM_STATE],
            arenas,
            file,
            versions.begin_write,
        )
        grads = Grads(
            self._layout,
            self._dtypes,
            homes[StateKind.GRAD],
            lambda before_write: self._file_cache(
                memory, arenas.grads, StateKind.GRAD, UseOrder(), before_write=before_write
            ),
            updates,
            grad_offload if self.world.everyone is None else None,
            updater,
        )
        params, gathering = self._make_params(memory, updates, optim_states)
        ranks: RankParts | None = None
        if self.world.everyone is not None:
            builder = GradReducerBuilder(self.plan, self.shared, self.world, self.resources)
            grad_reducer = builder.build(grads, self._trained, grad_offload)
            ranks = RankParts(grad_reducer, gathering, self._servers)
        return ChunkGroup(
            plan=self.plan,
            members=self.members,
            memory=memory,
            params=params,
            grads=grads,
            optim_states=optim_states,
            updates=updates,
            update_tasks=self._make_update_tasks(homes, grads, updates, first_number),
            world=self.world,
            ranks=ranks,
            device=device,
            resources=self.resources.pop_all(),
        )

    def _make_update_tasks(
        self,
        homes: Mapping[StateKind, Homes],
        grads: Grads,
        updates: ChunkUpdates,
        first_number: Mapping[int, int],
    ) -> UpdateTasks:
        directions = None
        if len(self._dtypes.passes) > 1:
            shard = self.world.shard
            directions = MuonDirections(self._layout, shard, self._backend.device)
        passes = [UpdatePass(kind, self._updater(kind)) for kind in self._dtypes.passes]
        return UpdateTasks(self._layout, homes, grads, updates, first_number, passes, directions)

    def _updater(self, kind: UpdateKind) -> Updater | None:
        """Of what is at home on a DEVICE, unless the CPU can update that."""
        if not self._backend.separate:
            return None
        updater = self._backend.updater(kind, self._layout.tile_numel)
        if updater is not None and Tier.DEVICE in self._placement.param:
            updater.prepare()
        return updater

    # Memory

    def _make_memory(self, spare_bytes: int) -> StateMemory:
        layout, placement, dtypes, ledger = (
            self._layout,
            self._placement,
            self._dtypes,
            self._ledger,
        )
        file = ScratchSpace(
            self.shared.config,
            ledger,
            self.shared.notes,
            self.resources,
            self.shared.state_files,
            layout.chunks[0].group_index,
        )
        file_map = map_file(layout, placement, dtypes)
        if file_map.nbytes:
            file.allocate(file_map.nbytes)
            for kind, extents in file_map.extents.items():
                for chunk_id, extent in extents.items():
                    chunk = layout.chunks[chunk_id]
                    nbytes = extent_size(layout, dtypes, kind, chunk).space_bytes
                    file.name(extent.offset, nbytes, name_of(kind, chunk))
        homes = {}
        for kind in StateKind:
            tiers, extents = getattr(placement, kind.value), file_map.extents[kind]
            homes[kind] = Homes(layout, dtypes, kind, tiers, extents, ledger, self._backend)
            self.resources.callback(homes[kind].close)
        arenas = SlotArenas(layout, dtypes, self._backend, ledger, file, self.resources)
        arenas.allocate(placement, spare_bytes)
        return StateMemory(homes, file, arenas)

    def _make_device_parts(self, file: ScratchSpace) -> DeviceParts | None:
        if not self._backend.separate:
            return None
        sizes = link_buffers(self._layout, self._dtypes)
        buffers = self._backend.host_arena(*sizes, self._ledger, Account.LINK)
        self.resources.callback(buffers.close)
        buffers.commit(0, buffers.slots)
        grad_offload = GradOffload(
            self._backend, self._ledger, self._placement.grad_offload_bytes, buffers
        )
        self.resources.callback(grad_offload.close)
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
            self.resources.callback(made.close)
            return made

        if self.world.replicas is not None and self.plan.spec.averages_on_device:
            # They ask for nothing. A device does not see that a rank is gone; this does.
            serve(self.world.replicas)
        if peers is not None:
            transport = self._make_transport(peers, homes, arenas)
            server = serve(peers)
            stream = GatherStream(peers, server, shards, versions, transport)
            self.resources.callback(stream.close)
            in_ram = arenas.staged if self._backend.separate else arenas.gathered
            gathering = Gathering(self._layout, server, shards, stream, in_ram, dtype)
        copies = self._make_copies(arenas, homes, shard_cache, shards, gathering, order)
        prefetch = config.debugging.prefetch
        agreed: AgreedGathers | None = None
        if gathering is not None and not homes.whole:
            agreed = AgreedGathers(
                self._layout, gathering, homes.is_resident, copies.cache, prefetch
            )
            self.world.while_waiting.add(agreed)
        led = ParamUpdates(homes, copies, updates, versions, gathering)
        params = ChunkAccess(homes, copies, updates, led, gathering, agreed, prefetch)
        return params, gathering

    def _make_transport(
        self, peers: Communicator, homes: Homes, arenas: SlotArenas
    ) -> GatherTransport:
        """What carries parameters from rank to rank, as all ranks have decided alike."""
        if not self._layout.shard.between_devices:
            return GatherTransport(peers)
        assert isinstance(self._backend, CudaBackend)
        group = DeviceGroup(peers, Channel.GATHERS, self._backend, peers)
        self.resources.callback(group.close)  # after the shard server: all ranks are done then
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
        drops: tuple[Callable[[int], object], ...] = ()
        if not self._backend.separate:
            cache: SlotCache = shard_cache
            if gathering is not None:
                limit = self._placement.gathered_slots
                cache = self._cache(SlotCache, arenas.gathered, gathering, order, limit)
                caches, drops = (cache,), (cache.drop,)
        else:
            in_ram: SharedCache = shards.slots
            if gathering is not None:
                in_ram = SharedCache(self._cache(SlotCache, arenas.staged, gathering, order), dtype)
                caches, drops = (in_ram,), (in_ram.drop,)

            chunks = layout.chunks

            def whole_home(chunk: int) -> torch.Tensor | None:
                found = chunks[chunk]
                return homes.flat(found) if homes.whole and found in homes else None

            fetches = FetchQueue(
                arenas.gathered,
                self._backend,
                whole_home,
                in_ram,
                {c.id: c.used_numel * self._dtypes.param_bytes for c in chunks},
                common=gathering,
            )
            self.resources.callback(fetches.close)
            backing: Backing = fetches
            if gathering is not None and layout.shard.params and layout.shard.between_devices:
                backing = DeviceGathers(gathering, arenas.gathered, layout, fetches)
            cache = self._cache(SlotCache, arenas.gathered, backing, order)
            caches = (cache, fetches, *caches)
            drops = (cache.drop, fetches.wait_home_read, *drops)
        return CopyCaches(
            arena=arenas.gathered,
            cache=cache,
            order=order,
            dtype=dtype,
            clearable=(*caches, shards.slots),
            drops=drops,
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
        made = kind(arena, backing, runs, order, names.__getitem__, limit)
        self.resources.callback(made.close)
        return made
