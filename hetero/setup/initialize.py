"""From a model and an optimizer to an engine."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import accumulate, pairwise
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from hetero.activations.limits import ActivationLimits
from hetero.activations.store import ActivationStore, build_activation_store
from hetero.api.module_state_dict import StateDictHooks
from hetero.api.optimizer import HybridOptimizer
from hetero.chunk_groups.chunk_group import ChunkGroup, Shared, build_chunk_group
from hetero.chunks.dtypes import Dtypes, unmanaged_bytes
from hetero.chunks.layout import Layout, Shard
from hetero.config import Config
from hetero.cpu_threads import lacking_threads, share_threads
from hetero.durable.commits import DurableState
from hetero.durable.state_folder import StateFolder
from hetero.planning.group_plans import Arrangement, arrange, make_shard
from hetero.planning.placement import PlacementError
from hetero.ranks.device_group import can_gather_between_devices
from hetero.ranks.process_groups import (
    ProcessGroups,
    init_default_group,
    is_distributed,
    tell_absence,
)
from hetero.runtime.engine import Engine
from hetero.runtime.modules.module_hooks import move_rest
from hetero.runtime.update_schedule import OptimizerView
from hetero.setup.added_params import AddedParams
from hetero.setup.construction import ConstructionArena
from hetero.setup.construction_store import take_from_first
from hetero.setup.first_values import FirstValues, fill
from hetero.stand_ins.construction_uses import arena_of, written_to
from hetero.stand_ins.parameter_classes import AbsentParameter, memory_in
from hetero.state.grads import LossScale
from hetero.state.managed_param import ManagedParam, can_train, refuse_managed
from hetero.state.state_files import StateFiles
from offload.device.backend import Backend
from offload.errors import HeteroError
from offload.memory.process_memory import ProcessExcess
from offload.memory.sizes import format_bytes
from offload.memory.tiers import Tier

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def join_ranks(
    make_config: Callable[[], Config], process_group: Any = None, mesh: DeviceMesh | None = None
) -> tuple[Config, ProcessGroups]:
    """The ranks that train one model together, this process among them. All of them must call it.

    A process that torchrun started gets torch.distributed's default process group (gloo) if it has
    none yet, because it must not train a model of its own by mistake; a training that needs another
    backend calls torch.distributed.init_process_group() first. The process's threads for optimizer
    updates become its share of the machine's CPUs, unless hetero.set_threads() has chosen.

    Args:
        make_config: makes the options; what it raises the other ranks are told.
        process_group, mesh: the ranks, as ProcessGroups takes them.

    Returns:
        The options, and the ranks.

    Raises ValueError as ProcessGroups does, and what `make_config` raises.
    """
    if not is_distributed() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        init_default_group()
    try:
        config = make_config()
    except BaseException as error:  # other ranks wait for this one
        if is_distributed():
            tell_absence(process_group, mesh, error)
        raise
    world = ProcessGroups(config.rank_timeout_s, process_group, mesh)
    share_threads(world.local_ranks)
    return config, world


def start_alike(
    model: torch.nn.Module, arrangement: Arrangement, construction: ConstructionArena
) -> None:
    """Makes parameters and buffers those of the first rank, where they differ. All ranks call it.

    Raises:
        HeteroError: the ranks' models or options differ; it names the first difference.
    """
    everyone = construction.world.everyone
    if everyone is None:
        return
    facts = {
        name: f"{tuple(p.shape)} {p.dtype}, requires_grad={p.requires_grad}"
        for name, p in model.named_parameters()
    }
    facts |= {f"buffer {name}": f"{tuple(b.shape)} {b.dtype}" for name, b in model.named_buffers()}
    facts |= {
        f"option {key}": str(value)
        for key, value in vars(construction.config).items()
        if key != "nvme_path"
    }
    facts["offloaded parameters"] = str(sum(map(construction.is_offloaded, model.parameters())))
    layouts = [plan.layout for plan in arrangement.chunk_groups]
    facts["slot_numel"] = str([layout.slot_numel for layout in layouts])
    facts["trained"] = str([[c.trainable for c in layout.chunks] for layout in layouts])
    construction.world.require_equal(facts, "the models or options")
    require_same_writes(model, construction)
    # An offloaded parameter is made of all ranks' parts, and so the same everywhere.
    params = [p for p in model.parameters() if p.numel() and not construction.is_offloaded(p)]
    sums = torch.tensor([_checksum(p) for p in params], dtype=torch.int64, device="cpu")
    found = everyone.all_gather(sums, "the comparison of first values")
    differs = found.ne(found[0]).any(dim=0)
    for param, different in zip(params, differs.tolist(), strict=True):
        if different:
            take_from_first(memory_in(param), everyone)
    for buffer in model.buffers():
        if buffer.numel():
            take_from_first(buffer, everyone)


def require_same_writes(model: torch.nn.Module, construction: ConstructionArena) -> None:
    """Compares what ranks have written inside gathered() without a modifier_rank; all call it.

    Raises HeteroError if it differs: the first rank's values would count, or parts of each rank's.
    """
    written = {name: f"{written_to(p):08x}" for name, p in model.named_parameters()}
    construction.world.require_equal(
        {f"the checksum of {name}": checksum for name, checksum in written.items()},
        "values that were written inside gathered() without a modifier_rank (00000000: none were)",
        "name the rank whose values count as modifier_rank, or write the same on all ranks",
    )


def _checksum(param: torch.nn.Parameter) -> int:
    """CRC-32 of the whole parameter's values in fp32."""
    total = 0
    for block in memory_in(param).reshape(-1).split(1 << 20):
        total = zlib.crc32(block.float().contiguous().view(torch.uint8).numpy().data, total)
    return total


Model = TypeVar("Model", bound=torch.nn.Module)
# One optimizer of hetero, or a list or tuple of them.
Optimizers = TypeVar("Optimizers", bound=HybridOptimizer | Sequence[HybridOptimizer])


def initialize(
    model: Model,
    optimizer: Optimizers,
    config: Config | Mapping[str, Any] | str | PathLike[str] | None = None,
    *,
    process_group: Any = None,
    mesh: DeviceMesh | None = None,
    **options: Any,
) -> tuple[Model, Optimizers]:
    """Places the model's state and connects model and optimizer to the engine that runs it.

    Parameters become the compute dtype; those that are frozen or not in the optimizer get no
    gradient and no optimizer state. With torch.distributed (torchrun) the state is sharded over the
    ranks, which all must call this; they then have the values of the first of them. A process of
    torchrun's that has no default process group yet gets one (gloo), and its threads for optimizer
    updates become its share of the machine's CPUs (setup/join_ranks.py).

    Args:
        model: built inside ZeroInitContext, whose options then hold, or outside of it.
        optimizer: made from the model's parameters; or a list of optimizers, of one rule or of
            several, that have no parameter in common. Each one's step() updates its own.
        config: for a model that was built outside: a Config, a mapping, or the path of a JSON file.
        process_group: the ranks to shard over, if not all.
        mesh: instead of `process_group`: one dimension shards, two replicate and shard (FSDP's
            hybrid sharding).
        options: Config's fields as keywords.

    Returns:
        The same model and the same optimizer, or list.

    Raises:
        BudgetError: the state does not fit; it says the smallest budget that works.
        ValueError: the optimizer does not fit the model, or options contradict each other.
        StoreError: an NVMe directory cannot be used.
        HeteroError: the ranks' models or options differ, or a parameter or buffer is on the meta
            device.
        CheckpointError: another process has the durable state, or it is damaged.
            The model is then as before; only where a transfer, or a rank, failed when state was on
            its way already, or the durable state is of another model or damaged, it must be built
            again.
    """
    given: Any = optimizer
    optimizers: list[HybridOptimizer] = list(given) if isinstance(given, (list, tuple)) else [given]
    if _are_initialized(model, optimizers) and config is None and not options:
        return model, optimizer  # by its first forward, say
    construction = construction_of(model)
    adopting = construction is None

    def checked_config() -> Config:
        _check(model, optimizers)
        return Config.make(config, **options)

    if construction is None:
        made, world = join_ranks(checked_config, process_group, mesh)
        with world.telling_failures("hetero.initialize()"):
            construction = ConstructionArena(made, world)
    made, world = construction.config, construction.world
    folder: StateFolder | None = None
    if world.is_closed:  # a call before has failed
        world.reconnect()
    try:
        with ExitStack() as resources, world.telling_failures("hetero.initialize()"):
            if not adopting:
                given_config = construction.given_config
                _refuse_other_options(given_config, config, options, process_group, mesh)
                _check(model, optimizers)
            if made.durable:
                _check_commits(made, optimizers)
                folder = StateFolder(made.nvme_paths, world)
                resources.callback(folder.close)
            for name, param in model.named_parameters():
                construction.adopt(param, name)
            views = [each.view(made) for each in optimizers]
            backend = made.make_backend()
            resources.callback(backend.close)
            shard = make_shard(made, world, can_gather_between_devices(world, backend))
            arrangement = _arrange(model, construction, optimizers, views, shard)
            start_alike(model, arrangement, construction)
            resources.enter_context(construction.placing())
            files = None if folder is None else folder.files
            engine = _build(model, arrangement, construction, views, files, backend, resources)
            engine.attach(StateDictHooks(model, engine), AddedParams(engine))
            resources.pop_all()
    except BaseException:
        if adopting:
            construction.restore(model.parameters())
        world.close()
        raise
    for each, view in zip(optimizers, views, strict=True):
        each.connect(engine, view)
    for param in model.parameters():
        construction.release(param)
    construction.close()
    if folder is not None:
        try:
            DurableState(engine, optimizers, folder)
        except BaseException:
            engine.close()
            raise
    return model, optimizer


def _arrange(
    model: torch.nn.Module,
    construction: ConstructionArena,
    optimizers: Sequence[HybridOptimizer],
    views: Sequence[OptimizerView],
    shard: Shard,
) -> Arrangement:
    """Places what the model has; `budgets.host_bytes` are then what it was placed within.

    Raises PlacementError, ValueError.
    """
    first = construction.budgets.first_host_bytes
    stays = construction.staying(model)
    refusal: PlacementError | None = None
    for host_bytes in dict.fromkeys((first, construction.budgets.host_bytes)):
        try:
            arrangement = arrange(
                model,
                construction.config,
                views[0].dtypes,
                host_bytes,
                construction.budgets.disk_bytes,
                _dtypes_by_param(optimizers, views),
                shard,
                construction.budgets.device_bytes,
                stays=stays,
            )
        except PlacementError as error:
            refusal = error
        else:
            construction.budgets.host_bytes = host_bytes
            return arrangement
    assert refusal is not None
    raise construction.budgets.in_its_words(refusal) from None


def _check_commits(config: Config, optimizers: Sequence[HybridOptimizer]) -> None:
    """Raises ValueError if commits after each step could be of half an iteration."""
    if config.commit_every and len(optimizers) > 1:
        raise ValueError(
            f"commit_every={config.commit_every} commits after a step of any of the "
            f"{len(optimizers)} optimizers; give commit_every=0, and call hetero.commit() when all "
            f"have made theirs"
        )


def _are_initialized(model: torch.nn.Module, optimizers: Sequence[object]) -> bool:
    """Whether all are connected to the model's engine already."""
    engines = [each._engine for each in optimizers if isinstance(each, HybridOptimizer)]
    found = [engine for engine in engines if engine is not None and engine.lifetime.is_of(model)]
    return len(found) == len(optimizers) > 0


def _refuse_meta(model: torch.nn.Module) -> None:
    """Raises HeteroError if a parameter or a buffer has no values yet."""
    for what, named in (("parameter", model.named_parameters), ("buffer", model.named_buffers)):
        found = [(name, tensor) for name, tensor in named() if tensor.device.type == "meta"]
        if found:
            name, first = found[0]
            others = f", like {len(found) - 1} others" if len(found) > 1 else ""
            raise HeteroError(
                f"{what} {name!r} of shape {tuple(first.shape)} is on the meta device and has no "
                f"values{others}; before initialize(), and inside the block of ZeroInitContext if "
                f"there is one, call model.load_state_dict(state_dict, assign=True), or "
                f"model.to_empty(device='cpu') and initialise it"
            )


def _refuse_shared_memory(model: torch.nn.Module) -> None:
    """Raises HeteroError for two parameters over the same memory: in chunks they would come apart.

    (Views of one storage that have no element in common are copied from it, and are right.)
    """
    spans: list[tuple[int, int, str]] = []
    for name, param in model.named_parameters():
        if param.numel() and not isinstance(param, AbsentParameter):
            memory = memory_in(param)
            last = sum((n - 1) * s for n, s in zip(memory.shape, memory.stride(), strict=True))
            begin = memory.data_ptr()
            spans.append((begin, begin + (last + 1) * memory.element_size(), name))
    spans.sort()
    for (_, end, name), (begin, _, other) in pairwise(spans):
        if begin < end:
            raise HeteroError(
                f"{name} and {other} are two parameters over the same memory, as an assignment to "
                f".data makes them; tie them by assigning the parameter itself: "
                f"module.weight = other.weight"
            )


def construction_of(model: torch.nn.Module) -> ConstructionArena | None:
    """The arena of the ZeroInitContext that built the model, or None.

    Raises HeteroError if several built it.
    """
    constructions = {arena_of(param) for param in model.parameters()} - {None}
    if len(constructions) > 1:
        raise HeteroError("the model's parameters come from several ZeroInitContexts; use one")
    construction = next(iter(constructions), None)
    assert construction is None or isinstance(construction, ConstructionArena)
    return construction


def _check(model: torch.nn.Module, optimizers: Sequence[HybridOptimizer]) -> None:
    """Raises ValueError or HeteroError if they cannot be initialized together."""
    if not optimizers:
        raise ValueError("the list of optimizers is empty; give one of hetero's at least")
    for optimizer in optimizers:
        if not isinstance(optimizer, HybridOptimizer):
            raise ValueError(
                f"the optimizer must be one of hetero's, such as hetero.AdamW(model.parameters()), "
                f"which update state where it is; not {type(optimizer).__module__}."
                f"{type(optimizer).__qualname__}"
            )
        if optimizer._engine is not None:
            raise ValueError("this optimizer was initialized already")
    _check_params(model, optimizers)
    for name, param in model.named_parameters():
        refuse_managed(param, name)
    _refuse_meta(model)
    _refuse_shared_memory(model)


def _refuse_other_options(
    made: Config,
    config: Config | Mapping[str, Any] | str | PathLike[str] | None,
    options: dict[str, Any],
    process_group: Any,
    mesh: DeviceMesh | None,
) -> None:
    """Raises ValueError if initialize() got other options than the ZeroInitContext had."""
    if (config is not None or options) and Config.make(config, **options) != made:
        raise ValueError(
            "initialize() was given other options than the ZeroInitContext that built the "
            "model; give them to one of the two only"
        )
    if process_group is not None or mesh is not None:
        raise ValueError("give process_group or mesh to the ZeroInitContext that built the model")


def _check_params(model: torch.nn.Module, optimizers: Sequence[HybridOptimizer]) -> None:
    """Raises ValueError for a parameter that is not the model's, or that two optimizers have."""
    names = {id(p): name for name, p in model.named_parameters()}
    owned = {id(p) for p in model.parameters() if p.is_floating_point()}
    seen: dict[int, int] = {}
    for number, optimizer in enumerate(optimizers):
        for index, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                if param.is_complex() and id(param) in names:
                    raise ValueError(
                        f"param group {index} of the optimizer has {names[id(param)]} of shape "
                        f"{tuple(param.shape)}, which is {param.dtype}: no optimizer of hetero "
                        f"updates complex numbers; leave it out of the optimizer, or train its "
                        f"torch.view_as_real() as a parameter"
                    )
                if id(param) not in owned and can_train(param):
                    raise ValueError(
                        f"param group {index} of the optimizer has a parameter of shape "
                        f"{tuple(param.shape)} that is not one of this model's managed parameters; "
                        f"make the optimizer from model.parameters()"
                    )
                if seen.setdefault(id(param), number) != number:
                    raise ValueError(
                        f"{names.get(id(param), 'a parameter')} is in optimizer number "
                        f"{seen[id(param)]} and in number {number}; give it to one of them"
                    )


def _dtypes_by_param(
    optimizers: Sequence[HybridOptimizer], views: Sequence[OptimizerView]
) -> dict[int, Dtypes]:
    """By id, the dtypes of each parameter that an optimizer has."""
    return {
        id(param): view.dtypes
        for optimizer, view in zip(optimizers, views, strict=True)
        for group in optimizer.param_groups
        for param in group["params"]
        if can_train(param)
    }


def _build(
    model: torch.nn.Module,
    arrangement: Arrangement,
    construction: ConstructionArena,
    optimizers: Sequence[OptimizerView],
    state_files: StateFiles | None,
    backend: Backend,
    resources: ExitStack,
) -> Engine:
    """Builds the chunk groups and the engine; until it is there `resources` close them."""
    config = construction.config
    plans = arrangement.chunk_groups
    specs = [s.param for plan in plans for c in plan.layout.chunks for s in c.slices]
    specs.sort(key=lambda spec: spec.index)
    ends = accumulate(spec.numel for spec in specs)
    first_number = {s.index: end - s.numel for s, end in zip(specs, ends, strict=True)}
    bytes_of = arrangement.activation_bytes
    spare_bytes = construction.budgets.host_bytes - sum(plan.placement.host_bytes for plan in plans)
    spare_bytes -= bytes_of[0] + unmanaged_bytes(model.parameters())
    params = dict(enumerate(arrangement.params))
    notes: list[str] = []
    if config.files_are_ram:
        notes.append(
            f"files in {' and '.join(config.nvme_paths)} are RAM, so "
            f"{format_bytes(construction.budgets.disk_bytes)} of host_memory are for them"
        )
    loss_scale = LossScale()
    if config.dtype == "fp16" and config.initial_loss_scale is not None:
        loss_scale = LossScale(config.initial_loss_scale, config.loss_scale_window)
    limits: ActivationLimits | None = None
    if config.activation_limit is not None:
        limits = ActivationLimits(*bytes_of, is_strict=config.activation_limit != "auto")
    ledger = construction.ledger
    excess = _excess(config, construction)
    unmanaged = construction.unmanaged
    shared = Shared(
        config, backend, ledger, notes, loss_scale, unmanaged, state_files, limits, excess
    )
    chunk_groups: list[ChunkGroup] = []
    # Placed last first, and made in the same order, for which the plans have reckoned.
    for plan in reversed(plans):
        world = construction.world
        if plan is not plans[0]:
            world = world.duplicate()
            resources.callback(world.close)
        chunk_group = build_chunk_group(plan, params, first_number, shared, world, spare_bytes)
        resources.callback(chunk_group.close)
        fill(chunk_group, _first_values(construction, plan.layout))
        chunk_groups.insert(0, chunk_group)
    for chunk_group in reversed(chunk_groups):
        chunk_group.commit()
    # Of the file that parameters waited in; most of it the engine's own file has said already.
    notes += [f"while the model was built: {n}" for n in construction.notes if n not in notes]
    notes += backend.notes
    notes += lacking_threads()
    passed = construction.budgets.passed()
    notes += [] if passed is None else [passed]
    move_rest(model, map(id, arrangement.params), shared)
    activations: ActivationStore | None = None
    if limits is not None:
        main = chunk_groups[0]
        activations = build_activation_store(
            config,
            limits,
            backend,
            ledger,
            notes,
            lambda: None if main.disk is None else main.disk.io,
            (lambda _: 0) if excess is None else excess,
        )
    engine = Engine(model, chunk_groups, shared, first_number, optimizers, activations)
    resources.pop_all()
    resources.callback(engine.close)
    engine.params.begin_gathers()
    ledger.set_budget(Tier.HOST, construction.budgets.host_bytes)
    return engine


def _excess(config: Config, construction: ConstructionArena) -> ProcessExcess | None:
    """By how many bytes the process is larger than process_memory, if that has a limit."""
    limit, ledger = config.process_bytes(construction.world.local_ranks), construction.ledger
    if limit is None:
        return None
    tiers = [Tier.HOST] if config.backend != "emulated" else [Tier.HOST, Tier.DEVICE]
    return ProcessExcess(limit, lambda: sum(ledger.in_use_bytes[tier.value] for tier in tiers))


def _first_values(construction: ConstructionArena, layout: Layout) -> FirstValues:
    records, ranks = construction.store.params, range(layout.shard.ranks)

    def prepare(managed: ManagedParam) -> None:
        if len(ranks) > 1:
            wanted = [managed.in_shard(layout, rank)[1] for rank in ranks]
            records[id(managed.param)].bring_elements(wanted)

    def elements(managed: ManagedParam, wanted: slice) -> torch.Tensor:
        return records[id(managed.param)].elements(wanted)

    def done(managed: ManagedParam) -> None:
        construction.release(managed.param)
        managed.unload()

    return FirstValues(elements, prepare, done)
