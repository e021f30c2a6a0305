"""What a run needs before its first step: corpus, model inside its budgets, optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim.lr_scheduler import LambdaLR

import hetero
from hetero.chunks.layout import Shard
from hetero.job.models import BytesTask
from hetero.job.optimization import make_optimizer, make_scheduler
from hetero.job.options import TrainOptions
from hetero.job.ranks import ALONE, Ranks
from hetero.job.run_folder import RunFolder
from hetero.planning.group_plans import Arrangement, arrange
from hetero.planning.placement import PlacementError
from hetero.planning.refusal import process_too_small
from hetero.reporting.recorder import Recorder, facts_of
from hetero.reporting.run_record import RunFacts
from offload import _native
from offload.memory.process_memory import resident_bytes
from offload.memory.sizes import format_bytes

# Below this a third of the state of a small model is less than its chunks need to move at all.
LEAST_DEFAULT_HOST_BYTES = 256 << 20
# What cross-entropy has of each whole logit: in the compute dtype, in fp32, and a gradient of each.
_LOGIT_BYTES = 16


def usual_state_bytes(params: int, trained: int) -> int:
    """What the state of a model takes where nothing is split: of `params`, `trained` have an fp32
    master, exp_avg, exp_avg_sq and gradient, and the others 2 bytes in bf16."""
    return 16 * trained + 2 * (params - trained)


class ModelSource(Protocol):
    """A model to train, before it has memory."""

    @property
    def label(self) -> str:
        """How the model is called in tables and figures."""

    @property
    def vocab_size(self) -> int: ...

    def shape(self) -> torch.nn.Module:
        """The model on the meta device; its trained parameters require gradients."""

    def build(self) -> torch.nn.Module:
        """The model in training mode; called inside ZeroInitContext."""


@dataclass(frozen=True)
class BuiltModel:
    """A model within its budgets, which no engine has taken over yet.

    Attributes:
        source: of the model.
        model: in training mode.
        config: for the engine.
        trained_numel: elements of the parameters that are trained.
        tiled: whether hetero.tile_heads() has the head.
        notes: choices that the user is told of.
    """

    source: ModelSource
    model: torch.nn.Module
    config: hetero.Config
    trained_numel: int
    tiled: bool
    notes: list[str]


@dataclass(frozen=True)
class Job:
    """All parts of a run, ready for the first step; `engine` holds memory until it is closed."""

    options: TrainOptions
    engine: hetero.Engine
    recorder: Recorder
    task: BytesTask
    model: torch.nn.Module
    optimizer: hetero.HybridOptimizer
    scheduler: LambdaLR
    ranks: Ranks

    @property
    def device(self) -> torch.device:
        return self.engine.backend.device

    @property
    def setting(self) -> RunFacts:
        """What is known of the run before its first step."""
        return self.recorder.record.facts


@contextmanager
def open_job(options: TrainOptions, folder: RunFolder, ranks: Ranks = ALONE) -> Iterator[Job]:
    """Prepares a job and closes its engine at the end, however that comes.

    Raises ValueError or hetero.HeteroError for options that cannot work.
    """
    task = BytesTask(options, ranks)
    built = build_in_budgets(task, options, folder, ranks)
    model, optimizer = hetero.initialize(built.model, make_optimizer(options, built.model))
    scheduler = make_scheduler(optimizer, options.warmup, options.steps, options.schedule)
    with closing(optimizer.engine) as engine:
        setting = make_setting(built, options, folder, task.data.description, engine)
        with closing(Recorder(engine, setting, waits=True)) as recorder:
            yield Job(options, engine, recorder, task, model, optimizer, scheduler, ranks)


def build_in_budgets(
    source: ModelSource, options: TrainOptions, folder: RunFolder, ranks: Ranks
) -> BuiltModel:
    """The model, built within the budgets of the options. All ranks call it.

    Raises ValueError or hetero.HeteroError for options that cannot work.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
        hetero.set_threads(options.threads)
    shape = source.shape()
    numels = [(parameter.numel(), parameter.requires_grad) for parameter in shape.parameters()]
    numel = sum(each for each, _ in numels)
    trained = sum(each for each, trains in numels if trains)
    config = memory_config(options, folder, usual_state_bytes(numel, trained), ranks)
    if options.gradient_checkpointing and config.activation_limit is not None:
        config = replace(config, recompute="all")
    # A budget that cannot work is refused with the one that can, before anything is built; a
    # default, which knows of no large embedding and of no ranks' buffers, becomes that one.
    limit, held = config.process_bytes(ranks.local), resident_bytes()
    host = config.host_bytes(beside_bytes=held)
    bytes_of = host, config.disk_bytes(), config.device_bytes
    try:
        arrange_shape(shape, options, config, ranks, *bytes_of)
    except PlacementError as refusal:
        least = refusal.smallest_host_bytes
        if limit is not None and host < least:
            is_auto = config.process_memory == "auto"
            what = "the least placement of the model"
            why = process_too_small(limit, is_auto, held, host, what, least)
            if why is not None:
                raise PlacementError(why, least, refusal.smallest_device_bytes) from None
        if options.host_memory is not None or config.host_memory is None:
            raise
        config = replace(config, host_memory=max(host, least))
        arrange_shape(shape, options, config, ranks, config.host_bytes(), *bytes_of[1:])
    torch.manual_seed(options.seed)
    with hetero.ZeroInitContext(config, mesh=_mesh(options, ranks)):
        model: Any = source.build()
    if options.gradient_checkpointing and config.activation_limit is None:
        names = "activation_checkpointing_enable", "gradient_checkpointing_enable"  # new and old
        enable = next(getattr(model, name) for name in names if hasattr(model, name))
        enable({"use_reentrant": False})
    notes: list[str] = []
    tiled = choose_for_memory(options, config, model, source.vocab_size, ranks, notes)
    return BuiltModel(source, model, config, trained, tiled, notes)


def make_setting(
    built: BuiltModel,
    options: TrainOptions,
    folder: RunFolder,
    data: str,
    engine: hetero.Engine,
    steps: int | None = None,
) -> RunFacts:
    """What is known of a run before its first step.

    `data` says what it is trained on, and `steps` how many there will be; None: those of options.
    """
    threads, isa = torch.get_num_threads(), _native.isa()
    nvme_path = ", ".join(built.config.nvme_paths) or None
    about = {"threads": threads, "engine": engine.io_engine, "isa": isa, "data": data}
    rows = [("data", data), ("compute", f"{threads} threads, {isa}, on {engine.backend.device}")]
    if engine.io_engine is not None:
        rows.append(("state file", f"in {nvme_path}, by {engine.io_engine}"))
    rows.append(("run folder", str(folder.path)))
    return replace(
        facts_of(engine, built.source.label),
        rows=tuple(rows),
        losses_are_means=True,
        chance_loss=math.log(built.source.vocab_size),
        planned_steps=steps or options.steps,
        trained_params=built.trained_numel,
        budget_bytes=dict(engine.ledger.budget_bytes),
        notes=(*built.notes, *engine.notes),
        run_dir=str(folder.path),
        about={**about, "nvme_path": nvme_path},
    )


def _mesh(options: TrainOptions, ranks: Ranks) -> DeviceMesh | None:
    """The ranks of --shard-ranks as rows; None: all share the state. hetero takes no more of a mesh
    than the numbers of ranks: torch's own groups of it, which are in RAM, carry nothing."""
    if options.shard_ranks is None or ranks.count == 1:
        return None
    return init_device_mesh("cpu", (ranks.count // options.shard_ranks, options.shard_ranks))


def choose_for_memory(
    options: TrainOptions,
    config: hetero.Config,
    model: torch.nn.Module,
    vocab_size: int,
    ranks: Ranks,
    notes: list[str],
) -> bool:
    """Tiles the model's loss if that was asked for, or if the limit of the process needs it.

    `notes` gets one for each thing that nobody has asked for and that the limit brings. Returns
    whether the loss is tiled. Raises ValueError if tiles were asked for and cannot be.
    """
    mine = config.process_bytes(ranks.local)
    limit = min(ranks.gather(math.inf if mine is None else mine))
    if math.isfinite(limit) and options.activation_memory is None and options.recompute == "auto":
        notes.append(
            f"activations are part of the {format_bytes(limit)} of the process: what finds no room "
            f"is computed again in backward (--recompute none: never)"
        )
    whole = _LOGIT_BYTES * options.batch_size * options.seq_len * vocab_size
    if options.tiled_loss is not None or whole <= limit / 4:
        if options.tiled_loss:
            hetero.tile_heads(model)
        return bool(options.tiled_loss)
    try:
        hetero.tile_heads(model)
    except ValueError:  # a head of another kind; if it does not fit, that is said
        return False
    notes.append(
        f"the loss is computed in tiles, because whole logits and their gradients would take "
        f"{format_bytes(whole)} of a process of {format_bytes(limit)} (--no-tiled-loss: whole)"
    )
    return True


def arrange_shape(
    shape: torch.nn.Module,
    options: TrainOptions,
    config: hetero.Config,
    ranks: Ranks,
    host_bytes: int,
    disk_bytes: int,
    device_bytes: int | None,
) -> Arrangement:
    """What goes where of a model on the meta device; budgets as arrange() has them.

    Chunks are shared as the options say of all `ranks`. Raises PlacementError.
    """
    shared_by = options.shard_ranks or ranks.count
    stage_3, replicas = config.zero_stage >= 3, ranks.count // shared_by
    return arrange(
        shape,
        config,
        make_optimizer(options, shape).dtypes(config),
        host_bytes,
        disk_bytes,
        shard=Shard(ranks.rank % shared_by, shared_by, params=stage_3, replicas=replicas),
        device_bytes=device_bytes,
        policy=options.policy,
    )


def memory_config(
    options: TrainOptions, folder: RunFolder, state_bytes: int, ranks: Ranks = ALONE
) -> hetero.Config:
    """The engine's configuration, with this command's defaults for what was not given.

    `state_bytes`: usual_state_bytes() of the model. Raises ValueError if --shard-ranks does not fit
    the ranks.
    """
    if ranks.count % (options.shard_ranks or 1):
        raise ValueError(
            f"--shard-ranks {options.shard_ranks} does not divide the {ranks.count} ranks"
        )
    host_memory: str | int | None = options.host_memory
    if host_memory is None and options.policy == "nvme":
        third = state_bytes // (options.shard_ranks or ranks.count) // 3
        host_memory = max(third, LEAST_DEFAULT_HOST_BYTES)
    nvme_path = options.nvme_path
    others = options.commit_every, options.activation_memory
    if not nvme_path and (
        options.policy in ("nvme", "auto") or any(each is not None for each in others)
    ):
        nvme_path = (str(folder.path),)
    same = (
        *("backend", "activation_memory", "recompute", "device_memory", "nvme_capacity"),
        *("dtype", "chunk_numel", "zero_stage", "process_memory", "verify_reads"),
    )
    debug = ("prefetch", "io_engine", "overlap_updates", "link_gbps", "allow_ram_filesystem")
    return hetero.Config.make(
        **{name: getattr(options, name) for name in same},
        debug={name: getattr(options, name) for name in debug},
        placement_policy=options.policy,
        host_memory=host_memory,
        nvme_path=nvme_path or None,
        durable=options.commit_every is not None,
        commit_every=0,  # the loop commits, with its scheduler and its place in the data
    )
