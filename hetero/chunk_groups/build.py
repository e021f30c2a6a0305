"""From a plan to a chunk group: homes, pools, what backs gathered copies, and connections, in that
order.

What gathered copies come from (this rank's homes, the file, other ranks) is decided in one place,
`_BankBuilder._gathered_copies`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from hetero.chunk_groups.chunk_group import ChunkGroup, RankParts
from hetero.chunk_groups.movable import Clearable, Link, Movable, StateKind
from hetero.chunk_groups.update_tasks import Stepper
from hetero.config import Config
from hetero.planning.group_plans import ChunkGroupPlan
from hetero.planning.placement import SlotBytes, link_bytes
from hetero.ranks.process_groups import World
from hetero.ranks.shard_server import ShardServer, Versions
from hetero.state.all_gather import Gathering
from hetero.state.file_layout import FileMap, map_file
from hetero.state.grad_reduce import Buckets
from hetero.state.grads import Grads
from hetero.state.homes import Homes
from hetero.state.host_source import HostSource
from hetero.state.managed_param import ManagedParam
from hetero.state.optimizer_state import OptimStates
from hetero.state.param_shards import ParamShards
from hetero.state.params import Params
from hetero.state.scratch_space import ScratchSpace
from hetero.state.slot_arenas import Pools
from offload.cache.slot_cache import SlotCache
from offload.cache.use_order import UseOrder
from offload.device.backend import Backend, Updater
from offload.device.fetch_queue import FetchQueue
from offload.device.grad_offload import BUFFERS, GradOffload
from offload.device.home_copy import HomeCopier
from offload.device.shared_cache import SharedCache
from offload.disk.backing import Backing, Extent, FileBacking
from offload.memory.arena import HostArena
from offload.memory.ledger import Ledger
from offload.memory.slot_pool import SlotPool
from offload.memory.tiers import Account, Tier


def build_chunk_group(
    plan: ChunkGroupPlan,
    members: Sequence[ManagedParam],
    first_number: Mapping[int, int],
    config: Config,
    backend: Backend,
    ledger: Ledger,
    world: World,
    spare_bytes: int,
    notes: list[str],
) -> ChunkGroup:
    """Takes what `plan` says from the budgets; values are not there yet.

    All ranks must do so. `first_number` is as Stepper takes it; `spare_bytes` of RAM are nobody's
    and may be used for a while. Appends to `notes` what the user should know. Raises BudgetError,
    StoreError or NativeIoError, with nothing taken.
    """
    with ExitStack() as resources:
        builder = _ChunkGroupBuilder(
            plan,
            members,
            first_number,
            config,
            backend,
            ledger,
            world,
            spare_bytes,
            notes,
            resources,
        )
        return builder.build()


@dataclass(frozen=True)
class _Homes:
    """Homes of this rank's kinds of state in memory."""

    param: Homes
    grad: Homes
    optim_state: Homes


@dataclass(frozen=True)
class _Copies:
    """Gathered copies; `drops` forget copies of a chunk, nearest to compute first."""

    cache: SlotCache | None
    drops: tuple[Callable[[int], object], ...] = ()
    caches: tuple[Clearable, ...] = ()  # those behind `drops`
    limited: SlotCache | None = None  # the one whose slots for every day the placement counts


class _ChunkGroupBuilder:
    """Makes the parts of one chunk group; each is closed by `resources` if a later one fails."""

    def __init__(
        self,
        plan: ChunkGroupPlan,
        members: Sequence[ManagedParam],
        first_number: Mapping[int, int],
        config: Config,
        backend: Backend,
        ledger: Ledger,
        world: World,
        spare_bytes: int,
        notes: list[str],
        resources: ExitStack,
    ) -> None:
        self._plan = plan
        self._layout, self._placement, self._dtypes = plan.layout, plan.placement, plan.dtypes
        self._slot = SlotBytes.of(plan.layout, plan.dtypes)
        self._members = members
        self._first_number = first_number
        self._config = config
        self._backend = backend
        self._ledger = ledger
        self._world = world
        self._spare_bytes = spare_bytes
        self._notes = notes
        self._resources = resources
        self._file = ScratchSpace(config, ledger, notes, resources)

    def build(self) -> ChunkGroup:
        """All parts, in the order in which they need each other."""
        file_map = map_file(self._layout, self._placement, self._dtypes)
        if file_map.nbytes:
            self._file.take(file_map.nbytes)
        homes = self._make_homes()
        pools = Pools(
            self._layout,
            self._dtypes,
            self._placement,
            self._backend,
            self._ledger,
            self._file,
            self._notes,
            self._spare_bytes,
            self._resources,
        )
        updater = self._make_updater()
        optim_states = OptimStates(
            self._layout.tile_numel,
            self._dtypes,
            homes.optim_state,
            file_map.optim_state,
            pools.buffers,
            self._file,
            pools.pipeline,
            updater,
        )
        buffers = self._make_link_buffers()
        grad_offload = self._make_grad_offload(buffers)
        grads = Grads(
            self._layout,
            self._dtypes,
            homes.grad,
            lambda before_write: self._file_cache(
                pools.grads, file_map.grad, UseOrder(), before_write=before_write
            ),
            file_map.grad,
            grad_offload if self._world.everyone is None else None,
            updater,
        )
        stepper = Stepper(
            self._layout,
            self._dtypes.param_bytes,
            homes.param,
            file_map.param,
            grads,
            optim_states,
            pools.pipeline,
            self._first_number,
            updater,
        )
        order, versions = UseOrder(), Versions(len(self._layout.chunks))
        shard_cache = self._make_shard_cache(pools, file_map, order, stepper)
        # Shards on their way to ranks may take all the room for a while.
        patience_s = 0.0 if self._world.shard is None else self._config.rank_timeout_s
        shared_shards = SharedCache(shard_cache, self._dtypes.torch_compute, patience_s)
        shards = ParamShards(homes.param, shared_shards)
        server = self._make_server(versions, shards, optim_states)
        gathering = self._make_gathering(pools, shards, server)
        copies = self._gathered_copies(
            pools, homes.param, shard_cache, shared_shards, gathering, order
        )
        params = Params(
            self._layout,
            homes.param,
            shards,
            pools.gathered,
            copies.cache,
            order,
            self._dtypes.torch_compute,
            self._config.prefetch,
            versions,
            gathering,
            copies.drops,
        )
        ranks: RankParts | None = None
        if self._world.everyone is not None:
            buckets = self._make_buckets(homes.grad, grads, grad_offload)
            ranks = RankParts(buckets, server, gathering, versions)
        movable = Movable(
            layout=self._layout,
            dtypes=self._dtypes,
            members=self._members,
            homes={
                StateKind.PARAM: homes.param,
                StateKind.GRAD: homes.grad,
                StateKind.OPTIM_STATE: homes.optim_state,
            },
            extents={
                StateKind.PARAM: file_map.param,
                StateKind.GRAD: file_map.grad,
                StateKind.OPTIM_STATE: file_map.optim_state,
            },
            file=self._file,
            pools=pools,
            params=params,
            grads=grads,
            optim_states=optim_states,
            caches=[*copies.caches, shared_shards],
            grad_cache=grads.cache,
            gathered_cache=copies.limited,
            pipeline_users=[optim_states, stepper],
            buckets=None if ranks is None else ranks.buckets,
            link=self._make_link(buffers, grad_offload, updater),
        )
        return ChunkGroup(
            members=self._members,
            layout=self._layout,
            placement=self._placement,
            dtypes=self._dtypes,
            params=params,
            grads=grads,
            optim_states=optim_states,
            stepper=stepper,
            movable=movable,
            min_gathered_slots=self._plan.min_gathered_slots,
            world=self._world,
            ranks=ranks,
            order=order,
            held=self._plan.held,
            resources=self._resources.pop_all(),
        )

    # RAM

    def _make_homes(self) -> _Homes:
        made, shard, slot, dtypes = self._placement, self._layout.shard, self._slot, self._dtypes

        def homes(
            tiers: Sequence[Tier | None],
            nbytes: int,
            dtype: torch.dtype,
            account: Account,
            sharded: bool,
        ) -> Homes:
            found = Homes(
                self._layout,
                tiers,
                nbytes,
                dtype,
                self._ledger,
                account,
                self._backend,
                not sharded,
            )
            self._resources.callback(found.close)
            return found

        return _Homes(
            homes(made.param, slot.param, dtypes.torch_compute, Account.PARAM, shard.params),
            homes(made.grad, slot.grad, dtypes.torch_grad, Account.GRAD, shard.grads),
            homes(made.optim_state, slot.optim_state, torch.uint8, Account.OPTIM_STATE, True),
        )

    def _make_updater(self) -> Updater | None:
        """What updates on DEVICE, if the CPU's pipeline cannot; ready if something is there."""
        updater = self._backend.updater(self._dtypes.kind, self._layout.tile_numel)
        if updater is not None and Tier.DEVICE in self._placement.param:
            updater.prepare()
        return updater

    def _make_link_buffers(self) -> HostArena | None:
        """For what is on its way between a DEVICE of its own and RAM; whoever uses them waits."""
        if not self._backend.separate:
            return None
        nbytes = link_bytes(self._layout, self._dtypes) // BUFFERS
        buffers = self._backend.host_arena(BUFFERS, nbytes, self._ledger, Account.LINK)
        self._resources.callback(buffers.close)
        buffers.commit(0, BUFFERS)
        return buffers

    def _make_link(
        self, buffers: HostArena | None, grad_offload: GradOffload | None, updater: Updater | None
    ) -> Link | None:
        if buffers is None or grad_offload is None:
            return None
        home_copier = HomeCopier(self._backend, buffers, self._file)
        return Link(self._backend, home_copier, grad_offload, updater)

    def _make_grad_offload(self, buffers: HostArena | None) -> GradOffload | None:
        """The way of gradients from a DEVICE of its own to RAM."""
        if buffers is None:
            return None
        grad_offload = GradOffload(
            self._backend, self._ledger, self._placement.grad_offload_bytes, buffers
        )
        self._resources.callback(grad_offload.close)
        return grad_offload

    # Copies of parameters

    def _make_shard_cache(
        self,
        pools: Pools,
        file_map: FileMap,
        order: UseOrder,
        stepper: Stepper,
    ) -> SlotCache:
        """Copies of this rank's shards that are on DISK."""
        arena = pools.gathered if pools.read_in_place else pools.shards
        chunks = self._layout.chunks
        return self._file_cache(
            arena, file_map.param, order, lambda chunk: stepper.wait_written(chunks[chunk])
        )

    def _make_server(
        self, versions: Versions, shards: ParamShards, optim_states: OptimStates
    ) -> ShardServer | None:
        if self._world.shard is None:
            return None
        server = ShardServer(
            self._world.shard, self._layout, versions, shards.open, optim_states.open_raw
        )
        self._resources.callback(server.close)
        return server

    def _make_gathering(
        self, pools: Pools, shards: ParamShards, server: ShardServer | None
    ) -> Gathering | None:
        """Whole chunks from all ranks' shards, in RAM."""
        if server is None:
            return None
        arena = pools.staged if self._backend.separate else pools.gathered
        return Gathering(self._layout, server, shards, arena, self._dtypes.torch_compute)

    def _gathered_copies(
        self,
        pools: Pools,
        homes: Homes,
        shard_cache: SlotCache,
        shared_shards: SharedCache,
        gathering: Gathering | None,
        order: UseOrder,
    ) -> _Copies:
        """The copies that compute uses, and what backs them.

        If compute happens in RAM, the file, for one rank, or all ranks' shards; else what is in
        RAM, where the file or the ranks bring it.
        """
        made, dtype = self._placement, self._dtypes.torch_compute
        if not self._backend.separate:
            if gathering is None:
                return _Copies(shard_cache)
            cache = self._cache(pools.gathered, gathering, order, made.gathered_slots)
            return _Copies(cache, (cache.drop,), (cache,), cache)
        in_ram = shared_shards
        drops: tuple[Callable[[int], object], ...] = ()
        caches: tuple[SharedCache, ...] = ()
        if gathering is not None:
            in_ram = SharedCache(self._cache(pools.staged, gathering, order), dtype)
            drops, caches = (in_ram.drop,), (in_ram,)
        fetches = FetchQueue(
            pools.gathered,
            self._backend,
            HostSource(self._layout, homes, in_ram),
            {c.id: c.slots for c in self._layout.chunks},
            {c.id: c.used_numel * self._dtypes.param_bytes for c in self._layout.chunks},
        )
        self._resources.callback(fetches.close)
        cache = self._cache(pools.gathered, fetches, order)
        return _Copies(
            cache, (cache.drop, fetches.wait_home_read, *drops), (cache, fetches, *caches)
        )

    def _file_cache(
        self,
        arena: HostArena,
        extents: dict[int, Extent],
        order: UseOrder,
        before_read: Callable[[int], object] | None = None,
        before_write: Callable[[int], object] | None = None,
    ) -> SlotCache:
        backing = FileBacking(arena, self._file, extents, before_read, before_write)
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

    def _make_buckets(
        self, homes: Homes, grads: Grads, grad_offload: GradOffload | None
    ) -> Buckets:
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
        buckets = Buckets(
            layout,
            [m for m in self._members if m.chunk.trainable],
            world,
            self._dtypes.torch_reduce,
            homes,
            slots,
            self._bucket_pool(placement.receive_slots, placement.receive_slots),
            between_replicas,
            grads,
            grad_offload,
        )
        if self._plan.held:
            self._resources.enter_context(buckets.no_sync())
        return buckets

    def _bucket_pool(self, slots: int, limit: int) -> SlotPool:
        arena = HostArena(slots, self._slot.bucket, self._ledger, Account.BUCKET)
        self._resources.callback(arena.close)  # also if there is no room for `limit` slots
        return SlotPool(arena, limit)
