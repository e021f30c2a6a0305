"""One set of parameters of one compute dtype, and all that keeps, moves and updates them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch

from hetero.arrangement import BankPlan
from hetero.buckets import Buckets
from hetero.config import Config
from hetero.dtypes import Dtypes
from hetero.extents import map_file
from hetero.gathering import Gathering
from hetero.grads import Grads
from hetero.homes import HostHomes
from hetero.layout import Chunk, Layout
from hetero.managed import ManagedParam
from hetero.param_shards import ParamShards
from hetero.params import Params
from hetero.placement import Placement, SlotBytes
from hetero.records import Record, Records
from hetero.shard_server import Kind, ShardServer, Versions
from hetero.steps import Stepper
from hetero.world import World
from offload._native import IoEngine, StepPipeline
from offload.arena import HostArena
from offload.backing import Backing, Extent, FileBacking
from offload.cache import SlotCache
from offload.ledger import Ledger
from offload.order import UseOrder
from offload.pool import SlotPool
from offload.store import ScratchFile, Transfers, make_io_engine
from offload.tiers import Account, Tier


@dataclass
class DiskParts:
    """What exists only if something is homed on DISK."""

    io: IoEngine
    scratch: ScratchFile
    transfers: Transfers
    measuring: Mapping[str, int]  # the I/O engine's counters after disks were measured


@dataclass
class RankParts:
    """What exists only with several ranks; only of shards, if the ranks share any."""

    buckets: Buckets
    server: ShardServer | None
    gathering: Gathering | None
    versions: Versions


@dataclass(eq=False)
class Bank:
    """Parameters that are laid out together, and their homes, pools, file and connections.

    An engine has one; another for parameters that stay in fp32; and one for each set of parameters
    that came later. They share nothing but the ledger: chunk ids, slots and messages are a bank's
    own.
    """

    members: Sequence[ManagedParam]
    layout: Layout
    placement: Placement
    dtypes: Dtypes
    params: Params
    grads: Grads
    records: Records
    stepper: Stepper
    pipeline: StepPipeline
    disk: DiskParts | None
    world: World
    ranks: RankParts | None
    order: UseOrder
    held: bool  # as BankPlan says
    resources: ExitStack  # closed in the reverse order of their making

    @property
    def add_grad(self) -> Callable[[ManagedParam, torch.Tensor, bool], None]:
        """What takes a gradient that autograd made."""
        return self.grads.add if self.ranks is None else self.ranks.buckets.add

    @property
    def trained_numel(self) -> int:
        """Elements of the parameters that are trained."""
        return sum(m.numel for m in self.members if m.chunk.trainable)

    def when_held(self) -> Placement:
        """Its placement with room for whole gradients until the end of backward."""
        shard, made = self.layout.shard, self.placement
        if self.held or self.ranks is None or not shard.grads:
            return made
        slots = sum(c.slots for c in self.layout.chunks if c.trainable)
        more = max(0, slots - made.bucket_slots)
        more_bytes = more * SlotBytes.of(self.layout, self.dtypes).bucket
        return replace(
            made, bucket_slots=made.bucket_slots + more, host_bytes=made.host_bytes + more_bytes
        )

    def hold(self) -> None:
        """From now on its gradients stay whole until the end of backward; idempotent.

        Raises BudgetError, with nothing changed.
        """
        if not self.held:
            placement = self.when_held()
            if self.ranks is not None:
                self.ranks.buckets.reserve(placement.bucket_slots - self.placement.bucket_slots)
            self.placement, self.held = placement, True
            self.resources.enter_context(self.no_sync())

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, gradients are only added up on each rank."""
        return nullcontext() if self.ranks is None else self.ranks.buckets.no_sync()

    def commit(self) -> None:
        """Charges what of its plan is not charged yet, once its parameters are there.

        From then on what the budget has left is nobody's.
        """
        self.grads.commit()

    def give_up(self, why: str) -> None:
        """Other ranks, which wait for values that will not come, are told why."""
        if self.ranks is not None:
            self.ranks.versions.end(why)

    def leave(self) -> None:
        """Answers other ranks until none asks any more."""
        if self.ranks is not None and self.ranks.server is not None:
            self.ranks.server.close()

    def close(self) -> None:
        """Frees memory, file and threads; idempotent."""
        self.params.forget()
        self.resources.close()

    @contextmanager
    def open_record(self, chunk: Chunk, piece: int, rank: int) -> Iterator[Record | None]:
        """A piece's record of any rank's shard, to be read inside the block; None: frozen."""
        if rank == self.layout.shard.rank or not chunk.trainable:
            with self.records.open(chunk, piece) as record:
                yield record
            return
        assert self.ranks is not None
        assert self.ranks.server is not None
        raw = self.records.empty()
        self.ranks.server.request(Kind.RECORD, chunk, piece, rank, raw).wait()
        yield self.records.over(raw)


def manage(plan: BankPlan, params: Mapping[int, torch.nn.Parameter]) -> list[ManagedParam]:
    """What is known of the bank's parameters, chunk by chunk; `params` by their specs' indices."""
    return [
        ManagedParam(params[s.param.index], chunk, s, plan.dtypes.torch_compute)
        for chunk in plan.layout.chunks
        for s in chunk.slices
    ]


def build_bank(
    plan: BankPlan,
    members: Sequence[ManagedParam],
    first_number: Mapping[int, int],
    config: Config,
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
        return _build(
            plan, members, first_number, config, ledger, world, spare_bytes, notes, resources
        )


def _build(
    plan: BankPlan,
    members: Sequence[ManagedParam],
    first_number: Mapping[int, int],
    config: Config,
    ledger: Ledger,
    world: World,
    spare_bytes: int,
    notes: list[str],
    resources: ExitStack,
) -> Bank:
    layout, placement, dtypes = plan.layout, plan.placement, plan.dtypes
    slot = SlotBytes.of(layout, dtypes)
    file_map = map_file(layout, placement, dtypes)
    disk: DiskParts | None = None
    if file_map.nbytes:
        disk = _open_disk(config, ledger, file_map.nbytes, notes, resources)

    shard = layout.shard

    def homes(
        tiers: Sequence[Tier | None],
        nbytes: int,
        dtype: torch.dtype,
        account: Account,
        sharded: bool,
    ) -> HostHomes:
        made = HostHomes(layout, tiers, nbytes, dtype, ledger, account, not sharded)
        resources.callback(made.close)
        return made

    def pool(slots: int, nbytes: int, account: Account, spare_slots: int = 0) -> HostArena | None:
        if not slots:
            return None
        made = HostArena(slots + spare_slots, nbytes, ledger, account)
        resources.callback(made.close)
        made.commit(0, slots)
        return made

    param_homes = homes(
        placement.param, slot.param, dtypes.torch_compute, Account.PARAM, shard.params
    )
    grad_homes = homes(placement.grad, slot.grad, dtypes.torch_grad, Account.GRAD, shard.grads)
    record_homes = homes(placement.record, slot.record, torch.uint8, Account.RECORD, True)
    # What the plan leaves of the budget lets all parameters be gathered at once, if wanted.
    spare_slots = 0
    if placement.gathered_slots and shard.ranks > 1:
        spare_slots = min(layout.slot_count, spare_bytes // slot.gathered)
    gathered = pool(
        placement.gathered_slots, slot.gathered, Account.GATHERED, spare_slots=spare_slots
    )
    shard_slots = pool(placement.shard_slots, slot.param, Account.SHARD)
    grad_slots = pool(placement.grad_slots, slot.grad, Account.GRAD_SLOT)
    shape = (
        dtypes.kind,
        layout.piece_numel,
        placement.trained_param_on_disk,
        Tier.DISK in placement.grad,
    )
    buffers = pool(placement.buffers, StepPipeline.buffer_bytes(*shape), Account.BUFFER)
    transfers = disk.transfers if disk is not None else None
    if disk is not None:
        # Of gathered copies only those that come from the file: with several ranks, shards do.
        for arena in (shard_slots or gathered, grad_slots, buffers):
            if arena is not None and not disk.io.register(arena.memory):
                notes.extend(n for n in disk.io.notes if n not in notes)
    pipeline = StepPipeline(
        # (Frozen parameters alone on DISK need no buffers, and so no engine.)
        disk.io if disk is not None and placement.buffers else None,
        transfers.file if transfers is not None else -1,
        buffers.memory if buffers is not None else None,
        placement.buffers,
        *shape,
    )
    resources.callback(pipeline.close)
    records = Records(
        layout.piece_numel, dtypes, record_homes, file_map.record, buffers, transfers, pipeline
    )

    names = [f"the chunk of {c.name}" for c in layout.chunks]
    runs = {c.id: c.slots for c in layout.chunks}

    def cache(
        arena: HostArena, backing: Backing, order: UseOrder, limit: int | None = None
    ) -> SlotCache:
        made = SlotCache(arena, backing, runs, order, names.__getitem__, limit)
        resources.callback(made.close)
        return made

    def file_cache(
        arena: HostArena | None, extents: dict[int, Extent], order: UseOrder
    ) -> SlotCache | None:
        if arena is None:
            return None
        assert transfers is not None
        return cache(arena, FileBacking(arena, transfers, extents), order)

    order = UseOrder()
    grad_cache = file_cache(grad_slots, file_map.grad, UseOrder())
    grads = Grads(layout, dtypes, grad_homes, grad_cache, file_map.grad)
    stepper = Stepper(
        layout,
        dtypes.param_bytes,
        param_homes,
        file_map.param,
        grads,
        records,
        pipeline,
        first_number,
    )
    # One rank's shards are whole chunks: what is read is what is gathered.
    alone = world.shard is None
    shard_cache = file_cache(gathered if alone else shard_slots, file_map.param, order)
    if shard_cache is not None:
        shard_cache.before_read = lambda chunk: stepper.wait_written(layout.chunks[chunk])
    shards = ParamShards(
        param_homes, shard_cache, dtypes.torch_compute, 0.0 if alone else config.rank_timeout_s
    )
    versions = Versions(len(layout.chunks))
    server: ShardServer | None = None
    gathering: Gathering | None = None
    gathered_cache = shard_cache
    if not alone:
        assert world.shard is not None
        server = ShardServer(world.shard, layout, versions, shards.open, records.open_raw)
        resources.callback(server.close)
        gathering = Gathering(layout, server, shards, gathered, dtypes.torch_compute)
        gathered_cache = (
            cache(gathered, gathering, order, placement.gathered_slots)
            if gathered is not None
            else None
        )
    store = Params(
        layout,
        param_homes,
        shards,
        gathered,
        gathered_cache,
        order,
        dtypes.torch_compute,
        config.prefetch,
        versions,
        gathering,
    )
    ranks: RankParts | None = None
    if world.everyone is not None:
        receiving = SlotPool(
            HostArena(placement.receive_slots, slot.bucket, ledger, Account.BUCKET),
            placement.receive_slots,
        )
        resources.callback(receiving.close)
        between_replicas = (
            pool(placement.longest_trained, slot.bucket // shard.ranks, Account.BUCKET)
            if world.replicas is not None
            else None
        )
        bucket_pool: SlotPool | None = None
        if shard.grads:
            trained_slots = sum(c.slots for c in layout.chunks if c.trainable)
            bucket_pool = SlotPool(
                HostArena(
                    max(trained_slots, placement.bucket_slots), slot.bucket, ledger, Account.BUCKET
                ),
                placement.bucket_slots,
            )
            resources.callback(bucket_pool.close)
        buckets = Buckets(
            layout,
            [m for m in members if m.chunk.trainable],
            world,
            dtypes.torch_reduce,
            grad_homes,
            bucket_pool,
            receiving,
            between_replicas,
            grads,
        )
        if plan.held:
            resources.enter_context(buckets.no_sync())
        ranks = RankParts(buckets, server, gathering, versions)
    return Bank(
        members=members,
        layout=layout,
        placement=placement,
        dtypes=dtypes,
        params=store,
        grads=grads,
        records=records,
        stepper=stepper,
        pipeline=pipeline,
        disk=disk,
        world=world,
        ranks=ranks,
        order=order,
        held=plan.held,
        resources=resources.pop_all(),
    )


def _open_disk(
    config: Config, ledger: Ledger, nbytes: int, notes: list[str], resources: ExitStack
) -> DiskParts:
    io, io_notes = make_io_engine(config.io_engine, len(config.nvme_paths))
    resources.callback(io.close)
    scratch = ScratchFile(config.nvme_paths, ledger, Account.FILE)
    resources.callback(scratch.close)
    scratch.balance(io, nbytes)
    measuring = io.stats
    scratch.reserve(nbytes)
    transfers = Transfers(io, scratch)
    resources.callback(transfers.close)
    notes.extend(n for n in (*scratch.notes, *io_notes) if n not in notes)
    return DiskParts(io, scratch, transfers, measuring)
