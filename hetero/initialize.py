"""From a model and an optimizer to an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from os import PathLike
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from hetero.arrangement import Arrangement, arrange
from hetero.buckets import Buckets
from hetero.config import Config
from hetero.dtypes import Dtypes
from hetero.engine import DiskParts, Engine, RankParts
from hetero.extents import map_file
from hetero.gathering import Gathering
from hetero.grads import Grads
from hetero.homes import HostHomes
from hetero.layout import Chunk, Layout, Shard
from hetero.managed import ManagedParam
from hetero.module_state import StateDictHooks
from hetero.optimizer import HybridOptimizer
from hetero.param_shards import ParamShards
from hetero.params import Params
from hetero.placement import SlotBytes
from hetero.records import Part, Record, Records, parts_of
from hetero.scaler import LossScale
from hetero.shard_server import ShardServer, Versions
from hetero.stage import Stage
from hetero.start import start_alike
from hetero.steps import Stepper
from hetero.world import World
from offload._native import StepPipeline
from offload.arena import HostArena
from offload.backing import Backing, Extent, FileBacking
from offload.cache import SlotCache
from offload.errors import HeteroError
from offload.order import UseOrder
from offload.pool import SlotPool
from offload.store import ScratchFile, Transfers, make_io_engine
from offload.tiers import Account, Tier

Model = TypeVar("Model", bound=torch.nn.Module)
Optimizer = TypeVar("Optimizer", bound=HybridOptimizer)


def initialize(
    model: Model,
    optimizer: Optimizer,
    config: Config | Mapping[str, Any] | str | PathLike[str] | None = None,
    *,
    process_group: Any = None,
    mesh: DeviceMesh | None = None,
    **options: Any,
) -> tuple[Model, Optimizer]:
    """Places the model's state and connects model and optimizer to the engine that runs it.

    The model may have been built inside ZeroInitContext (whose options then hold) or outside (then
    give the options here, as ZeroInitContext takes them). Parameters become
    the compute dtype; those that are frozen or not in the optimizer get no gradient and no record.
    Returns the same two objects.

    With torch.distributed (torchrun) the state is sharded over all ranks, or those of
    `process_group`, or of `mesh`: one dimension shards, two replicate and shard (FSDP's hybrid
    sharding). All of these ranks must call this. They then have the values of the first of them.

    Raises BudgetError with the smallest budget that works, ValueError for an optimizer that does
    not fit the model, StoreError if the NVMe directory cannot be used. The model is then as
    before; only after a failed transfer, when state is already on its way, it must be built again.
    """
    if not isinstance(optimizer, HybridOptimizer):
        raise ValueError(
            f"the optimizer must be hetero.HybridAdam, HybridLion or HybridAdagrad, not "
            f"{type(optimizer).__name__}: the update runs where the state lives"
        )
    if optimizer._engine is not None:
        raise ValueError("this optimizer was initialized already")
    optimized = _optimized(model, optimizer)
    stage = _context_stage(model, config, options)
    adopting = stage is None
    if stage is None:
        made = Config.make(config, **options)
        stage = Stage(made, World(made.rank_timeout_s, process_group, mesh))
    elif process_group is not None or mesh is not None:
        raise ValueError("give process_group or mesh to the ZeroInitContext that built the model")
    try:
        for param in model.parameters():
            stage.adopt(param)
        with ExitStack() as resources:
            dtypes = optimizer.dtypes(stage.config)
            shard = Shard(
                stage.world.rank,
                stage.world.ranks,
                grads=stage.config.zero_stage >= 2,
                params=stage.config.zero_stage >= 3,
                replicas=stage.world.size // stage.world.ranks,
            )
            arrangement = arrange(
                model, stage.config, dtypes, stage.host_bytes, stage.disk_bytes, optimized, shard
            )
            start_alike(model, arrangement, stage)
            stage.scatter()
            engine = _build(model, arrangement, dtypes, stage, resources)
    except BaseException:
        if adopting:
            stage.restore(model.parameters())
            stage.world.close()
        raise
    engine.attach(StateDictHooks(model, engine))
    optimizer._engine = engine
    for param in model.parameters():
        stage.release(param)
    stage.close()
    return model, optimizer


def _context_stage(
    model: torch.nn.Module,
    config: Config | Mapping[str, Any] | str | PathLike[str] | None,
    options: dict[str, Any],
) -> Stage | None:
    """The stage of the ZeroInitContext that built the model, or None."""
    stages = {
        id(stage): stage
        for p in model.parameters()
        if (stage := getattr(p, "_hetero_stage", None)) is not None
    }
    if len(stages) > 1:
        raise HeteroError("the model's parameters come from several ZeroInitContexts; use one")
    stage = next(iter(stages.values()), None)
    given = config is not None or bool(options)
    if stage is not None and given and Config.make(config, **options) != stage.config:
        raise ValueError(
            "initialize() was given other options than the ZeroInitContext that built the "
            "model; give them to one of the two only"
        )
    return stage


def _optimized(model: torch.nn.Module, optimizer: HybridOptimizer) -> set[int]:
    """Ids of the optimizer's parameters. Raises ValueError for one that is not the model's."""
    owned = {id(p) for p in model.parameters() if p.is_floating_point()}
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if id(param) not in owned:
                raise ValueError(
                    f"param group {index} of the optimizer has a parameter of shape "
                    f"{tuple(param.shape)} that is not one of this model's managed parameters; "
                    f"make the optimizer from model.parameters()"
                )
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _build(
    model: torch.nn.Module,
    arrangement: Arrangement,
    dtypes: Dtypes,
    stage: Stage,
    resources: ExitStack,
) -> Engine:
    config, ledger = stage.config, stage.ledger
    layout, placement = arrangement.layout, arrangement.placement
    managed = [
        ManagedParam(arrangement.params[s.param.index], chunk, s, dtypes.torch_compute)
        for chunk in layout.chunks
        for s in chunk.slices
    ]
    slot = SlotBytes.of(layout, dtypes)
    file_map = map_file(layout, placement, dtypes)
    notes: list[str] = []
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
        spare_bytes = stage.host_bytes - placement.host_bytes
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
        layout, dtypes.param_bytes, param_homes, file_map.param, grads, records, pipeline
    )
    # One rank's shards are whole chunks: what is read is what is gathered.
    alone = stage.world.shard is None
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
        assert stage.world.shard is not None
        server = ShardServer(stage.world.shard, layout, versions, shards.open, records.open_raw)
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
    if stage.world.everyone is not None:
        receiving = SlotPool(
            HostArena(placement.receive_slots, slot.bucket, ledger, Account.BUCKET),
            placement.receive_slots,
        )
        resources.callback(receiving.close)
        between_replicas = (
            pool(placement.longest_trained, slot.bucket // shard.ranks, Account.BUCKET)
            if stage.world.replicas is not None
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
            [m for m in managed if m.chunk.trainable],
            stage.world,
            dtypes.torch_reduce,
            grad_homes,
            bucket_pool,
            receiving,
            between_replicas,
            grads,
        )
        ranks = RankParts(buckets, server, gathering)
    _convert(layout, managed, store, records, stage)
    # Of the file that parameters waited in; most of it the engine's own file has said already.
    notes += [f"while the model was built: {n}" for n in stage.notes if n not in notes]
    return Engine(
        model=model,
        managed=managed,
        layout=layout,
        placement=placement,
        dtypes=dtypes,
        ledger=ledger,
        params=store,
        grads=grads,
        records=records,
        stepper=stepper,
        pipeline=pipeline,
        disk=disk,
        world=stage.world,
        ranks=ranks,
        resources=resources.pop_all(),
        loss_scale=LossScale(config.initial_loss_scale, config.loss_scale_window)
        if dtypes.compute == "fp16" and config.initial_loss_scale is not None
        else LossScale(),
        notes=notes,
        end_step=order.end_step,
    )


def _open_disk(
    config: Config, ledger: Any, nbytes: int, notes: list[str], resources: ExitStack
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
    notes += scratch.notes + io_notes
    return DiskParts(io, scratch, transfers, measuring)


def _convert(
    layout: Layout,
    managed: Sequence[ManagedParam],
    store: Params,
    records: Records,
    stage: Stage,
) -> None:
    """Moves every parameter from the stage to its chunk; records start with zero moments."""
    members: dict[int, list[ManagedParam]] = {}
    for m in managed:
        members.setdefault(m.chunk.id, []).append(m)
    for chunk in layout.chunks:
        _convert_chunk(chunk, members[chunk.id], layout, store, records, stage)


def _convert_chunk(
    chunk: Chunk,
    members: Sequence[ManagedParam],
    layout: Layout,
    store: Params,
    records: Records,
    stage: Stage,
) -> None:
    # A function of its own so that the lease on one chunk ends before the next is made.
    if layout.shard.ranks > 1:
        for m in members:
            ranks = range(layout.shard.ranks)
            stage.fetch(m.param, [m.in_shard(layout, rank)[1] for rank in ranks])
    flat = store.fill(chunk)
    numel = layout.piece_numel
    for piece in range(chunk.slots):
        into = flat[piece * numel : (piece + 1) * numel]
        with records.open(chunk, piece, write=True, fresh=True) as record:
            for m in members:
                for part in parts_of(m, layout):
                    if part.piece == piece:
                        _fill(m, part, into, records, record, stage)
    for m in members:
        stage.release(m.param)
        m.param.data = m.absent
    store.filled(chunk)


def _fill(
    managed: ManagedParam,
    part: Part,
    into: torch.Tensor,
    records: Records,
    record: Record | None,
    stage: Stage,
) -> None:
    """Writes one part's values to the piece `into` and, if it is trained, to its record."""
    shift = part.in_piece.start - part.in_param.start
    for begin, values in stage.blocks(managed.param, part.in_param):
        where = slice(begin + shift, begin + shift + values.numel())
        if record is None:
            into[where] = values
        else:
            records.split(values, into[where], record, where)
