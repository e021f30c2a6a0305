"""From a plan to a bank: homes, pools, what backs gathered copies, and connections, in that order.

What gathered copies come from (this rank's homes, the file, other ranks) is decided in one place,
`_BankBuilder._gathered_copies`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from hetero.arrangement import BankPlan
from hetero.bank import Bank, DiskParts, RankParts
from hetero.buckets import Buckets
from hetero.config import Config
from hetero.extents import FileMap, map_file
from hetero.gathering import Gathering
from hetero.grads import Grads
from hetero.homes import Homes
from hetero.host_source import HostSource
from hetero.managed import ManagedParam
from hetero.param_shards import ParamShards
from hetero.params import Params
from hetero.placement import SlotBytes
from hetero.records import Records
from hetero.shard_server import ShardServer, Versions
from hetero.steps import Stepper
from hetero.world import World
from offload._native import StepPipeline, UpdateKind
from offload.arena import HostArena
from offload.backend import Backend, Updater
from offload.backing import Backing, Extent, FileBacking
from offload.cache import SlotCache
from offload.drain import BUFFER_BYTES, BUFFERS, Drain
from offload.fetching import Fetching
from offload.ledger import Ledger
from offload.order import UseOrder
from offload.pool import SlotPool
from offload.staging import SharedCache
from offload.store import ScratchFile, Transfers, make_io_engine
from offload.tiers import Account, Tier


def build_bank(
    plan: BankPlan,
    members: Sequence[ManagedParam],
    first_number: Mapping[int, int],
    config: Config,
    backend: Backend,
    ledger: Ledger,
    world: World,
    spare_bytes: int,
    notes: list[str],
) -> Bank:
    """Takes what `plan` says from the budgets; values are not there yet.

    All ranks must do so. `first_number` is as Stepper takes it; `spare_bytes` of RAM are nobody's
    and may be used for a while. Appends to `notes` what the user should know. Raises BudgetError,
    StoreError or NativeIoError, with nothing taken.
    """
    with ExitStack() as resources:
        builder = _BankBuilder(
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
    """Homes of this rank's payloads in memory."""

    param: Homes
    grad: Homes
    record: Homes


@dataclass(frozen=True)
class _Pools:
    """Slots for what is elsewhere at home; None where nothing is."""

    gathered: HostArena | None  # where compute happens
    staged: HostArena | None
    shards: HostArena | None
    grads: HostArena | None
    buffers: HostArena | None


@dataclass(frozen=True)
class _Copies:
    """Gathered copies; `drops` forget copies of a chunk, nearest to compute first."""

    cache: SlotCache | None
    drops: tuple[Callable[[int], object], ...] = ()


class _BankBuilder:
    """Makes the parts of one bank; each is closed by `resources` if a later one fails."""

    def __init__(
        self,
        plan: BankPlan,
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
        # One rank's shards are whole chunks: they are read to where compute finds them, if in RAM.
        self._read_in_place = world.shard is None and not backend.separate

    def build(self) -> Bank:
        """All parts, in the order in which they need each other."""
        file_map = map_file(self._layout, self._placement, self._dtypes)
        disk = self._open_disk(file_map.nbytes) if file_map.nbytes else None
        transfers = disk.transfers if disk is not None else None
        homes = self._make_homes()
        pools = self._make_pools()
        if disk is not None:
            self._register(disk, pools)
        pipeline = self._make_pipeline(disk, pools)
        updater = self._make_updater()
        records = Records(
            self._layout.piece_numel,
            self._dtypes,
            homes.record,
            file_map.record,
            pools.buffers,
            transfers,
            pipeline,
            updater,
        )
        drain = self._make_drain()
        grads = Grads(
            self._layout,
            self._dtypes,
            homes.grad,
            self._file_cache(pools.grads, transfers, file_map.grad, UseOrder()),
            file_map.grad,
            drain if self._world.everyone is None else None,
            updater,
        )
        stepper = Stepper(
            self._layout,
            self._dtypes.param_bytes,
            homes.param,
            file_map.param,
            grads,
            records,
            pipeline,
            self._first_number,
            updater,
        )
        order, versions = UseOrder(), Versions(len(self._layout.chunks))
        shard_cache = self._make_shard_cache(pools, transfers, file_map, order, stepper)
        shared_shards: SharedCache | None = None
        if shard_cache is not None:
            # Shards on their way to ranks may take all the room for a while.
            patience_s = 0.0 if self._world.shard is None else self._config.rank_timeout_s
            shared_shards = SharedCache(shard_cache, self._dtypes.torch_compute, patience_s)
        shards = ParamShards(homes.param, shared_shards)
        server = self._make_server(versions, shards, records)
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
            buckets = self._make_buckets(homes.grad, grads, drain)
            ranks = RankParts(buckets, server, gathering, versions)
        return Bank(
            members=self._members,
            layout=self._layout,
            placement=self._placement,
            dtypes=self._dtypes,
            params=params,
            grads=grads,
            records=records,
            stepper=stepper,
            pipeline=pipeline,
            disk=disk,
            world=self._world,
            ranks=ranks,
            order=order,
            held=self._plan.held,
            resources=self._resources.pop_all(),
        )

    # DISK

    def _open_disk(self, nbytes: int) -> DiskParts:
        config, resources, notes = self._config, self._resources, self._notes
        io, io_notes = make_io_engine(config.io_engine, len(config.nvme_paths))
        resources.callback(io.close)
        scratch = ScratchFile(config.nvme_paths, self._ledger, Account.FILE)
        resources.callback(scratch.close)
        scratch.balance(io, nbytes)
        measuring = io.stats
        scratch.reserve(nbytes)
        transfers = Transfers(io, scratch)
        resources.callback(transfers.close)
        notes.extend(n for n in (*scratch.notes, *io_notes) if n not in notes)
        return DiskParts(io, scratch, transfers, measuring)

    def _register(self, disk: DiskParts, pools: _Pools) -> None:
        """What the file is read into and written from."""
        params = pools.gathered if self._read_in_place else pools.shards
        for arena in (params, pools.grads, pools.buffers):
            if arena is not None and not disk.io.register(arena.memory):
                self._notes.extend(n for n in disk.io.notes if n not in self._notes)

    def _make_pipeline(self, disk: DiskParts | None, pools: _Pools) -> StepPipeline:
        buffers = self._placement.buffers
        pipeline = StepPipeline(
            # (Frozen parameters alone on DISK need no buffers, and so no engine.)
            disk.io if disk is not None and buffers else None,
            disk.transfers.file if disk is not None else -1,
            pools.buffers.memory if pools.buffers is not None else None,
            buffers,
            *self._buffer_shape,
        )
        self._resources.callback(pipeline.close)
        return pipeline

    @property
    def _buffer_shape(self) -> tuple[UpdateKind, int, bool, bool]:
        """What of the pipeline's buffers follows from the plan."""
        placement = self._placement
        return (
            self._dtypes.kind,
            self._layout.piece_numel,
            placement.trained_param_on_disk,
            Tier.DISK in placement.grad,
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
            homes(made.record, slot.record, torch.uint8, Account.RECORD, True),
        )

    def _make_pools(self) -> _Pools:
        made, slot = self._placement, self._slot
        buffer_bytes = StepPipeline.buffer_bytes(*self._buffer_shape)
        return _Pools(
            self._gathered_slots(),
            self._pool(made.staged_slots, slot.gathered, Account.GATHERED),
            self._pool(made.shard_slots, slot.param, Account.SHARD),
            self._pool(made.grad_slots, slot.grad, Account.GRAD_SLOT),
            self._pool(made.buffers, buffer_bytes, Account.BUFFER, linked=False),
        )

    def _gathered_slots(self) -> HostArena | None:
        """Slots where compute happens."""
        slots, nbytes = self._placement.gathered_slots, self._slot.gathered
        if not slots:
            return None
        # What the plan leaves of RAM lets all parameters be gathered at once, if wanted.
        spare_slots = 0
        if self._layout.shard.ranks > 1 and not self._backend.separate:
            spare_slots = min(self._layout.slot_count, self._spare_bytes // nbytes)
        made = self._backend.arena(slots + spare_slots, nbytes, self._ledger, Account.GATHERED)
        self._resources.callback(made.close)
        made.commit(0, slots)
        return made

    def _pool(
        self, slots: int, nbytes: int, account: Account, linked: bool = True
    ) -> HostArena | None:
        """`linked`: the device's copies use it."""
        if not slots:
            return None
        make = self._backend.host_arena if linked else HostArena
        made = make(slots, nbytes, self._ledger, account)
        self._resources.callback(made.close)
        made.commit(0, slots)
        return made

    def _make_updater(self) -> Updater | None:
        """What updates on DEVICE, if the CPU's pipeline cannot and something is at home there."""
        if Tier.DEVICE not in self._placement.param:
            return None
        return self._backend.updater(self._dtypes.kind, self._layout.piece_numel)

    def _make_drain(self) -> Drain | None:
        """The way of gradients from DEVICE to RAM."""
        if not self._placement.drain_bytes:
            return None
        # Its buffers are of the few MiB that no budget counts.
        buffers = self._backend.host_arena(BUFFERS, BUFFER_BYTES, self._ledger, Account.BUFFER)
        buffers.pin(0, BUFFERS)
        drain = Drain(self._backend, self._ledger, self._placement.drain_bytes, buffers)
        self._resources.callback(drain.close)
        return drain

    # Copies of parameters

    def _make_shard_cache(
        self,
        pools: _Pools,
        transfers: Transfers | None,
        file_map: FileMap,
        order: UseOrder,
        stepper: Stepper,
    ) -> SlotCache | None:
        """Copies of this rank's shards that are on DISK."""
        arena = pools.gathered if self._read_in_place else pools.shards
        cache = self._file_cache(arena, transfers, file_map.param, order)
        if cache is not None:
            chunks = self._layout.chunks
            cache.before_read = lambda chunk: stepper.wait_written(chunks[chunk])
        return cache

    def _make_server(
        self, versions: Versions, shards: ParamShards, records: Records
    ) -> ShardServer | None:
        if self._world.shard is None:
            return None
        server = ShardServer(
            self._world.shard, self._layout, versions, shards.open, records.open_raw
        )
        self._resources.callback(server.close)
        return server

    def _make_gathering(
        self, pools: _Pools, shards: ParamShards, server: ShardServer | None
    ) -> Gathering | None:
        """Whole chunks from all ranks' shards, in RAM."""
        if server is None:
            return None
        arena = pools.staged if self._backend.separate else pools.gathered
        return Gathering(self._layout, server, shards, arena, self._dtypes.torch_compute)

    def _gathered_copies(
        self,
        pools: _Pools,
        homes: Homes,
        shard_cache: SlotCache | None,
        shared_shards: SharedCache | None,
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
            if pools.gathered is None:
                return _Copies(None)
            cache = self._cache(pools.gathered, gathering, order, made.gathered_slots)
            return _Copies(cache, (cache.drop,))
        if pools.gathered is None:
            return _Copies(None)
        in_ram = shared_shards
        drops: tuple[Callable[[int], object], ...] = ()
        if gathering is not None:
            in_ram = None
            if pools.staged is not None:
                in_ram = SharedCache(self._cache(pools.staged, gathering, order), dtype)
                drops = (in_ram.drop,)
        fetching = Fetching(
            pools.gathered,
            self._backend,
            HostSource(self._layout, homes, in_ram),
            {c.id: c.slots for c in self._layout.chunks},
            {c.id: c.used_numel * self._dtypes.param_bytes for c in self._layout.chunks},
        )
        self._resources.callback(fetching.close)
        cache = self._cache(pools.gathered, fetching, order)
        return _Copies(cache, (cache.drop, fetching.settle, *drops))

    def _file_cache(
        self,
        arena: HostArena | None,
        transfers: Transfers | None,
        extents: dict[int, Extent],
        order: UseOrder,
    ) -> SlotCache | None:
        if arena is None:
            return None
        assert transfers is not None
        return self._cache(arena, FileBacking(arena, transfers, extents), order)

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

    def _make_buckets(self, homes: Homes, grads: Grads, drain: Drain | None) -> Buckets:
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
            drain,
        )
        if self._plan.held:
            self._resources.enter_context(buckets.no_sync())
        return buckets

    def _bucket_pool(self, slots: int, limit: int) -> SlotPool:
        arena = HostArena(slots, self._slot.bucket, self._ledger, Account.BUCKET)
        self._resources.callback(arena.close)  # also if there is no room for `limit` slots
        return SlotPool(arena, limit)
