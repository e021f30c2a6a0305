"""From a plan to a chunk group: its memory, what accesses its state, and its connections.

What fills the slots of gathered copies (this rank's homes, the file, other ranks) is decided in one
place, `_ChunkGroupBuilder._make_copies`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from hetero.chunk_groups.chunk_group import (
    ChunkGroup,
    DeviceParts,
    RankParts,
    StateAccess,
    StateMemory,
)
from hetero.chunk_groups.update_tasks import Stepper
from hetero.config import Config
from hetero.planning.group_plans import ChunkGroupPlan
from hetero.planning.placement import SlotBytes, link_bytes
from hetero.ranks.process_groups import ProcessGroups
from hetero.ranks.shard_server import ShardServer, Versions
from hetero.state.all_gather import Gathering
from hetero.state.chunk_updates import ChunkUpdates
from hetero.state.grad_buckets import ReduceBuffers
from hetero.state.grad_reduce import GradReducer
from hetero.state.grads import Grads
from hetero.state.loss_scale import LossScale
from hetero.state.managed_param import ManagedParam
from hetero.state.memory.file_layout import map_file
from hetero.state.memory.homes import HomeFormat, Homes
from hetero.state.memory.scratch_space import ScratchSpace
from hetero.state.memory.slot_arenas import SlotArenas
from hetero.state.optimizer_state import OptimizerState
from hetero.state.param_shards import ParamShards
from hetero.state.params import CopyCache, ParamCopies, Params
from offload.cache.slot_cache import SlotCache
from offload.cache.use_order import UseOrder
from offload.device.backend import Backend
from offload.device.fetch_queue import FetchQueue
from offload.device.grad_offload import BUFFERS, GradOffload
from offload.device.home_copy import HomeCopier
from offload.device.shared_cache import SharedCache
from offload.disk.backing import Backing, FileBacking
from offload.memory.arena import HostArena
from offload.memory.ledger import Ledger
from offload.memory.slot_pool import SlotPool
from offload.memory.tiers import Account, StateKind, Tier


@dataclass(frozen=True)
class Shared:
    """What all chunk groups of an engine share; `notes` are lines for the user, to append to."""

    config: Config
    backend: Backend
    ledger: Ledger
    notes: list[str]
    loss_scale: LossScale


def build_chunk_group(
    plan: ChunkGroupPlan,
    members: Sequence[ManagedParam],
    first_number: Mapping[int, int],
    shared: Shared,
    world: ProcessGroups,
    spare_bytes: int,
) -> ChunkGroup:
    """Takes what `plan` says from the budgets. All ranks must do so; there are no values yet.

    Args:
        plan: the layout and the placement.
        members: its parameters, chunk by chunk.
        first_number: by a parameter's index, the number of its first element in the model.
        shared: the engine's configuration, device and budgets.
        world: the ranks, over connections for this chunk group alone.
        spare_bytes: RAM that no plan counts on: gathered copies may use it while it is free.

    Raises:
        BudgetError, StoreError, NativeIoError: with nothing taken.
    """
    with ExitStack() as resources:
        builder = _ChunkGroupBuilder(
            plan, members, first_number, shared, world, spare_bytes, resources
        )
        return builder.build()


class _ChunkGroupBuilder:
    """Makes the parts of one chunk group; each is closed by `resources` if a later one fails."""

    def __init__(
        self,
        plan: ChunkGroupPlan,
        members: Sequence[ManagedParam],
        first_number: Mapping[int, int],
        shared: Shared,
        world: ProcessGroups,
        spare_bytes: int,
        resources: ExitStack,
    ) -> None:
        self._plan = plan
        self._layout, self._placement, self._dtypes = plan.layout, plan.placement, plan.dtypes
        self._slot = SlotBytes.of(plan.layout, plan.dtypes)
        self._members = members
        self._first_number = first_number
        self._config, self._backend = shared.config, shared.backend
        self._ledger, self._notes = shared.ledger, shared.notes
        self._loss_scale = shared.loss_scale
        self._world = world
        self._spare_bytes = spare_bytes
        self._resources = resources

    def build(self) -> ChunkGroup:
        """All parts, in the order in which they need each other."""
        memory = self._make_memory()
        device = self._make_device_parts(memory.file)
        access, ranks = self._make_access(memory, device)
        return ChunkGroup(
            self._plan,
            self._members,
            memory,
            access,
            self._world,
            ranks,
            device,
            self._resources.pop_all(),
        )

    def _make_access(
        self, memory: StateMemory, device: DeviceParts | None
    ) -> tuple[StateAccess, RankParts | None]:
        homes, extents, arenas = memory.homes, memory.extents, memory.arenas
        grad_offload = None if device is None else device.grad_offload
        updater = None if device is None else device.updater
        updates = ChunkUpdates(self._layout, homes[StateKind.PARAM], arenas, self._config.overlap)
        optim_states = OptimizerState(
            self._layout.tile_numel,
            self._dtypes,
            homes[StateKind.OPTIM_STATE],
            extents[StateKind.OPTIM_STATE],
            arenas,
            memory.file,
            updates,
            updater,
        )
        grads = Grads(
            self._layout,
            self._dtypes,
            homes[StateKind.GRAD],
            lambda before_write: self._file_cache(
                memory, arenas.grads, StateKind.GRAD, UseOrder(), before_write=before_write
            ),
            extents[StateKind.GRAD],
            updates,
            grad_offload if self._world.everyone is None else None,
            updater,
        )
        stepper = Stepper(
            self._layout,
            self._dtypes.param_bytes,
            homes[StateKind.PARAM],
            extents[StateKind.PARAM],
            grads,
            optim_states,
            updates,
            self._first_number,
            updater,
        )
        params, gathering, server = self._make_params(memory, updates, optim_states)
        ranks: RankParts | None = None
        if self._world.everyone is not None:
            grad_reducer = self._make_grad_reducer(homes[StateKind.GRAD], grads, grad_offload)
            ranks = RankParts(grad_reducer, server, gathering, params.versions)
        return StateAccess(params, grads, optim_states, updates, stepper), ranks

    # Memory

    def _make_memory(self) -> StateMemory:
        file = ScratchSpace(self._config, self._ledger, self._notes, self._resources)
        file_map = map_file(self._layout, self._placement, self._dtypes)
        if file_map.nbytes:
            file.allocate(file_map.nbytes)
        homes = self._make_homes()
        arenas = SlotArenas(
            self._layout, self._dtypes, self._backend, self._ledger, file, self._resources
        )
        arenas.allocate(self._placement, self._spare_bytes)
        return StateMemory(homes, file_map.extents, file, arenas)

    def _make_homes(self) -> dict[StateKind, Homes]:
        shard, dtypes = self._layout.shard, self._dtypes
        found = {}
        for state_kind, dtype, account, whole in (
            (StateKind.PARAM, dtypes.torch_compute, Account.PARAM, not shard.params),
            (StateKind.GRAD, dtypes.torch_grad, Account.GRAD, not shard.grads),
            (StateKind.OPTIM_STATE, torch.uint8, Account.OPTIM_STATE, False),
        ):
            found[state_kind] = Homes(
                self._layout,
                getattr(self._placement, state_kind.value),
                HomeFormat(getattr(self._slot, state_kind.value), dtype, account, whole),
                self._ledger,
                self._backend,
            )
            self._resources.callback(found[state_kind].close)
        return found

    def _make_device_parts(self, file: ScratchSpace) -> DeviceParts | None:
        if not self._backend.separate:
            return None
        updater = self._backend.updater(self._dtypes.kind, self._layout.tile_numel)
        if updater is not None and Tier.DEVICE in self._placement.param:
            updater.prepare()
        nbytes = link_bytes(self._layout, self._dtypes) // BUFFERS
        buffers = self._backend.host_arena(BUFFERS, nbytes, self._ledger, Account.LINK)
        self._resources.callback(buffers.close)
        buffers.commit(0, BUFFERS)
        grad_offload = GradOffload(
            self._backend, self._ledger, self._placement.grad_offload_bytes, buffers
        )
        self._resources.callback(grad_offload.close)
        home_copier = HomeCopier(self._backend, buffers, file)
        return DeviceParts(self._backend, home_copier, grad_offload, updater)

    # Copies of parameters

    def _make_params(
        self, memory: StateMemory, updates: ChunkUpdates, optim_states: OptimizerState
    ) -> tuple[Params, Gathering | None, ShardServer | None]:
        homes, arenas = memory.homes[StateKind.PARAM], memory.arenas
        order, versions = UseOrder(), Versions(len(self._layout.chunks))
        arena = arenas.gathered if arenas.read_in_place else arenas.shards
        chunks = self._layout.chunks
        shard_cache = self._file_cache(
            memory,
            arena,
            StateKind.PARAM,
            order,
            before_read=lambda chunk: updates.wait_written(chunks[chunk]),
        )
        # Shards on their way to ranks may take all the room for a while.
        patience_s = 0.0 if self._world.shard is None else self._config.rank_timeout_s
        shared_shards = SharedCache(shard_cache, self._dtypes.torch_compute, patience_s)
        shards = ParamShards(homes, shared_shards, updates)
        server = self._make_server(versions, shards, optim_states)
        gathering = self._make_gathering(arenas, shards, server)
        copies = self._make_copies(arenas, homes, shard_cache, shared_shards, gathering, order)
        params = Params(
            self._layout, homes, shards, copies, self._config.prefetch, versions, gathering, updates
        )
        return params, gathering, server

    def _make_server(
        self, versions: Versions, shards: ParamShards, optim_states: OptimizerState
    ) -> ShardServer | None:
        if self._world.shard is None:
            return None
        server = ShardServer(
            self._world.shard, self._layout, versions, shards.open, optim_states.open_raw
        )
        self._resources.callback(server.close)
        return server

    def _make_gathering(
        self, arenas: SlotArenas, shards: ParamShards, server: ShardServer | None
    ) -> Gathering | None:
        """What makes whole chunks, in RAM, from all ranks' shards."""
        if server is None:
            return None
        arena = arenas.staged if self._backend.separate else arenas.gathered
        return Gathering(self._layout, server, shards, arena, self._dtypes.torch_compute)

    def _make_copies(
        self,
        arenas: SlotArenas,
        homes: Homes,
        shard_cache: SlotCache,
        shared_shards: SharedCache,
        gathering: Gathering | None,
        order: UseOrder,
    ) -> ParamCopies:
        """The copies that compute uses, and what fills their slots.

        If compute happens in RAM, the file fills them (one rank), or all ranks' shards do; if not,
        they are copied from RAM, where the file or the ranks bring the chunks.
        """
        dtype = self._dtypes.torch_compute
        caches: tuple[CopyCache, ...] = ()
        drops: tuple[Callable[[int], object], ...] = ()
        if not self._backend.separate:
            cache = shard_cache
            if gathering is not None:
                limit = self._placement.gathered_slots
                cache = self._cache(arenas.gathered, gathering, order, limit)
                caches, drops = (cache,), (cache.drop,)
        else:
            in_ram = shared_shards
            if gathering is not None:
                in_ram = SharedCache(self._cache(arenas.staged, gathering, order), dtype)
                caches, drops = (in_ram,), (in_ram.drop,)

            chunks = self._layout.chunks

            def whole_home(chunk: int) -> torch.Tensor | None:
                found = chunks[chunk]
                return homes.flat(found) if homes.whole and found in homes else None

            fetches = FetchQueue(
                arenas.gathered,
                self._backend,
                whole_home,
                in_ram,
                {c.id: c.slots for c in chunks},
                {c.id: c.used_numel * self._dtypes.param_bytes for c in chunks},
            )
            self._resources.callback(fetches.close)
            cache = self._cache(arenas.gathered, fetches, order)
            caches = (cache, fetches, *caches)
            drops = (cache.drop, fetches.wait_home_read, *drops)
        return ParamCopies(
            arena=arenas.gathered,
            cache=cache,
            order=order,
            dtype=dtype,
            clearable=(*caches, shared_shards),
            drops=drops,
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
    ) -> SlotCache:
        backing = FileBacking(
            arena, memory.file, memory.extents[state_kind], before_read, before_write
        )
        return self._cache(arena, backing, order)

    def _cache(
        self, arena: HostArena, backing: Backing, order: UseOrder, limit: int | None = None
    ) -> SlotCache:
        chunks = self._layout.chunks
        names = [f"the chunk of {c.name}" for c in chunks]
        runs = {c.id: c.slots for c in chunks}
        made = SlotCache(arena, backing, runs, order, names.__getitem__, limit)
        self._resources.callback(made.close)
        return made

    # Gradients of several ranks

    def _pool(self, slots: int, nbytes: int, account: Account) -> HostArena | None:
        if not slots:
            return None
        made = HostArena(slots, nbytes, self._ledger, account)
        self._resources.callback(made.close)
        made.commit(0, slots)
        return made

    def _make_grad_reducer(
        self, homes: Homes, grads: Grads, grad_offload: GradOffload | None
    ) -> GradReducer:
        layout, placement, world = self._layout, self._placement, self._world
        bucket_bytes = self._slot.bucket
        between_replicas = None
        if world.replicas is not None:
            part_bytes = bucket_bytes // layout.shard.ranks
            between_replicas = self._pool(placement.longest_trained, part_bytes, Account.BUCKET)
        slots: SlotPool | None = None
        if layout.shard.grads:
            trained_slots = sum(c.slots for c in layout.chunks if c.trainable)
            slots = self._bucket_pool(
                max(trained_slots, placement.bucket_slots), placement.bucket_slots
            )
        grad_reducer = GradReducer(
            layout,
            [m for m in self._members if m.chunk.trainable],
            world,
            ReduceBuffers(
                dtype=self._dtypes.torch_reduce,
                homes=homes,
                buckets=slots,
                received=self._bucket_pool(placement.receive_slots, placement.receive_slots),
                replicas=between_replicas,
            ),
            grads,
            self._loss_scale,
            grad_offload,
        )
        if self._plan.reduce_at_end:
            self._resources.enter_context(grad_reducer.no_sync())
        return grad_reducer

    def _bucket_pool(self, slots: int, limit: int) -> SlotPool:
        arena = HostArena(slots, self._slot.bucket, self._ledger, Account.BUCKET)
        self._resources.callback(arena.close)  # also if there is no room for `limit` slots
        return SlotPool(arena, limit)
