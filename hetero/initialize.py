"""From a model and an optimizer to an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch

from hetero.config import Config
from hetero.dtypes import Dtypes
from hetero.engine import DiskParts, Engine
from hetero.extents import map_file
from hetero.grads import Grads
from hetero.homes import HostHomes
from hetero.init_context import Stage
from hetero.layout import MAX_SLOT_NUMEL, Chunk, Layout, ParamSpec, pack, search_slot_numel
from hetero.managed import ManagedParam
from hetero.module_state import StateDictHooks
from hetero.optimizer import HybridAdam
from hetero.params import Params
from hetero.placement import Budgets, SlotBytes, concurrent_slots, place
from hetero.records import Part, Record, Records, parts_of
from hetero.scaler import LossScale
from hetero.steps import Stepper
from offload._native import StepPipeline
from offload.arena import HostArena
from offload.cache import Extent, SlotCache
from offload.errors import HeteroError
from offload.order import UseOrder
from offload.store import ScratchFile, Transfers, make_io_engine
from offload.tiers import Account, Tier

# A slot's four payloads are at most this share of host_memory: a few slots are always in flight.
_SLOT_SHARE_OF_HOST = 16

Model = TypeVar("Model", bound=torch.nn.Module)


def initialize(
    model: Model,
    optimizer: HybridAdam,
    config: Config | Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[Model, HybridAdam]:
    """Places the model's state and connects model and optimizer to the engine that runs it.

    The model may have been built inside ZeroInitContext (whose options then hold) or outside (then
    give the options here: a Config, a mapping, or Config's fields as keywords). Parameters become
    the compute dtype; those that are frozen or not in the optimizer get no gradient and no record.
    Returns the same two objects.

    Raises BudgetError with the smallest budget that works, ValueError for an optimizer that does
    not fit the model, StoreError if the NVMe directory cannot be used. The model is then as before.
    """
    if not isinstance(optimizer, HybridAdam):
        raise ValueError(
            f"the optimizer must be hetero.HybridAdam or hetero.CPUAdam, not "
            f"{type(optimizer).__name__}: the update runs where the state lives"
        )
    if optimizer._engine is not None:
        raise ValueError("this optimizer was initialized already")
    specs, params = _specs(model, optimizer)
    stage = _context_stage(model, config, options)
    adopting = stage is None
    if stage is None:
        stage = Stage(Config.make(config, **options))
    try:
        for param in params:
            stage.adopt(param)
        with ExitStack() as resources:
            engine = _build(model, specs, params, stage, resources)
    except BaseException:
        if adopting:
            stage.restore(params)
        raise
    engine.attach(StateDictHooks(model, engine))
    optimizer._engine = engine
    for param in model.parameters():
        stage.release(param)
    stage.close()
    return model, optimizer


def _context_stage(
    model: torch.nn.Module, config: Config | Mapping[str, Any] | None, options: dict[str, Any]
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


def _specs(
    model: torch.nn.Module, optimizer: HybridAdam
) -> tuple[list[ParamSpec], list[torch.nn.Parameter]]:
    """The managed parameters, in the model's order. Raises ValueError for foreign ones."""
    named = [(n, p) for n, p in model.named_parameters() if p.is_floating_point()]
    owned = {id(p) for _, p in named}
    optimized = set()
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if id(param) not in owned:
                raise ValueError(
                    f"param group {index} of the optimizer has a parameter of shape "
                    f"{tuple(param.shape)} that is not one of this model's managed parameters; "
                    f"make the optimizer from model.parameters()"
                )
            optimized.add(id(param))
    specs: list[ParamSpec] = []
    params: list[torch.nn.Parameter] = []
    for name, param in named:
        if param.numel() == 0:
            continue
        trains = param.requires_grad and id(param) in optimized
        specs.append(ParamSpec(len(specs), name, param.numel(), trains))
        params.append(param)
    if not specs:
        raise ValueError("the model has no floating-point parameters to manage")
    return specs, params


def _layout(specs: Sequence[ParamSpec], stage: Stage, dtypes: Dtypes) -> Layout:
    if stage.config.chunk_numel is not None:
        return pack(specs, stage.config.chunk_numel)
    slot_bytes = dtypes.param_bytes + dtypes.grad_bytes + dtypes.record_bytes
    max_numel = min(MAX_SLOT_NUMEL, stage.host_bytes // _SLOT_SHARE_OF_HOST // slot_bytes)
    return pack(specs, search_slot_numel(specs, max_numel))


def _module_chunks(
    model: torch.nn.Module, chunk_of: Mapping[int, Chunk]
) -> list[tuple[Chunk, ...]]:
    """For each module the chunks that are held while it runs: its own and its ancestors'."""
    found: list[tuple[Chunk, ...]] = []

    def visit(module: torch.nn.Module, held: dict[int, Chunk]) -> None:
        own = [chunk_of[id(p)] for p in module._parameters.values() if id(p) in chunk_of]
        held = {**held, **{c.id: c for c in own}}
        if own:
            found.append(tuple(held.values()))
        for child in module.children():
            visit(child, held)

    visit(model, {})
    return found


def _build(
    model: torch.nn.Module,
    specs: Sequence[ParamSpec],
    params: Sequence[torch.nn.Parameter],
    stage: Stage,
    resources: ExitStack,
) -> Engine:
    config, ledger, dtypes = stage.config, stage.ledger, stage.config.dtypes
    layout = _layout(specs, stage, dtypes)
    managed = [
        ManagedParam(params[s.param.index], chunk, s, dtypes.torch_compute)
        for chunk in layout.chunks
        for s in chunk.slices
    ]
    chunk_of = {id(m.param): m.chunk for m in managed}
    placement = place(
        layout,
        dtypes,
        config.placement_policy,
        Budgets(
            stage.host_bytes,
            stage.disk_bytes,
            config.budget(Tier.DEVICE),
            keep_records=config.host_memory is not None,
        ),
        concurrent_slots(_module_chunks(model, chunk_of)),
    )
    slot = SlotBytes.of(layout, dtypes)
    file_map = map_file(layout, placement, dtypes)
    notes: list[str] = []
    disk: DiskParts | None = None
    if file_map.nbytes:
        disk = _open_disk(config, ledger, file_map.nbytes, notes, resources)

    def homes(
        tiers: Sequence[Tier | None], nbytes: int, dtype: torch.dtype, account: Account
    ) -> Any:
        made = HostHomes(layout, tiers, nbytes, dtype, ledger, account)
        resources.callback(made.close)
        return made

    def pool(slots: int, nbytes: int, account: Account) -> HostArena | None:
        if not slots:
            return None
        made = HostArena(slots, nbytes, ledger, account)
        resources.callback(made.close)
        made.commit(0, slots)
        return made

    param_homes = homes(placement.param, slot.param, dtypes.torch_compute, Account.PARAM)
    grad_homes = homes(placement.grad, slot.grad, dtypes.torch_grad, Account.GRAD)
    record_homes = homes(placement.record, slot.record, torch.uint8, Account.RECORD)
    gathered = pool(placement.gathered_slots, slot.param, Account.GATHERED)
    grad_slots = pool(placement.grad_slots, slot.grad, Account.GRAD_SLOT)
    shape = (
        dtypes.compute,
        dtypes.grad,
        layout.slot_numel,
        placement.trained_param_on_disk,
        Tier.DISK in placement.grad,
    )
    buffers = pool(placement.buffers, StepPipeline.buffer_bytes(*shape), Account.BUFFER)
    transfers = disk.transfers if disk is not None else None
    if disk is not None:
        for arena in (gathered, grad_slots, buffers):
            if arena is not None and not disk.io.register(arena.memory):
                notes.extend(n for n in disk.io.notes if n not in notes)
    pipeline = StepPipeline(
        disk.io if disk is not None else None,
        transfers.file if transfers is not None else -1,
        buffers.memory if buffers is not None else None,
        placement.buffers,
        *shape,
    )
    resources.callback(pipeline.close)
    records = Records(
        layout.slot_numel, dtypes, record_homes, file_map.record, buffers, transfers, pipeline
    )

    def cache(
        arena: HostArena | None, extents: dict[int, Extent], order: UseOrder
    ) -> SlotCache | None:
        if arena is None:
            return None
        assert transfers is not None
        names = [f"the chunk of {c.name}" for c in layout.chunks]
        made = SlotCache(arena, transfers, extents, order, names.__getitem__)
        resources.callback(made.close)
        return made

    order = UseOrder()
    grad_cache = cache(grad_slots, file_map.grad, UseOrder())
    grads = Grads(layout, dtypes, grad_homes, grad_cache, file_map.grad)
    stepper = Stepper(
        layout, dtypes.param_bytes, param_homes, file_map.param, grads, records, pipeline
    )
    store = Params(
        layout,
        param_homes,
        gathered,
        cache(gathered, file_map.param, order),
        order,
        dtypes.torch_compute,
        config.prefetch,
        stepper.wait_written,
    )
    _convert(layout, managed, store, records, stage)
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
        resources=resources.pop_all(),
        loss_scale=LossScale(config.initial_loss_scale, config.loss_scale_window)
        if dtypes.compute == "fp16"
        else LossScale(),
        notes=notes,
        end_step=order.end_step,
    )


def _open_disk(
    config: Config, ledger: Any, nbytes: int, notes: list[str], resources: ExitStack
) -> DiskParts:
    assert config.nvme_path is not None
    io, io_notes = make_io_engine(config.io_engine)
    resources.callback(io.close)
    scratch = ScratchFile(config.nvme_path, ledger, Account.RECORD)
    resources.callback(scratch.close)
    scratch.reserve(nbytes)
    transfers = Transfers(io, scratch)
    resources.callback(transfers.close)
    notes += scratch.notes + io_notes
    return DiskParts(io, scratch, transfers)


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
        _convert_chunk(chunk, members[chunk.id], layout.slot_numel, store, records, stage)


def _convert_chunk(
    chunk: Chunk,
    members: Sequence[ManagedParam],
    slot_numel: int,
    store: Params,
    records: Records,
    stage: Stage,
) -> None:
    # A function of its own so that the lease on one chunk ends before the next is made.
    flat = store.fill(chunk)
    for piece in range(chunk.slots):
        into = flat[piece * slot_numel : (piece + 1) * slot_numel]
        with records.open(chunk, piece, write=True, fresh=True) as record:
            for m in members:
                for part in parts_of(m, slot_numel):
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
