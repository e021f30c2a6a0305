"""What a run needs before its first step: corpus, model inside its budgets, optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

import hetero
from hetero.chunks.layout import Shard
from hetero.cli.job.data import Corpus, load_corpus
from hetero.cli.job.models import build_model, count_parameters, model_config, model_label
from hetero.cli.job.optimization import make_optimizer, make_scheduler
from hetero.cli.job.options import TrainOptions
from hetero.cli.job.ranks import ALONE, Ranks
from hetero.cli.job.result import USUAL_STATE_BYTES_PER_PARAM, FinalPlacement, Setting
from hetero.cli.job.run_folder import RunFolder
from hetero.planning.group_plans import arrange
from hetero.planning.machine_profile import saved_profile
from hetero.planning.predict import Prediction, predict
from hetero.planning.trace import Work
from offload import _native
from offload.memory.sizes import format_bytes
from offload.memory.tiers import Tier

# Below this a third of the state of a small model is less than its chunks need to move at all.
LEAST_DEFAULT_HOST_BYTES = 256 << 20


@dataclass(frozen=True)
class Job:
    """All parts of a run, ready for the first step; `engine` holds memory until it is closed."""

    options: TrainOptions
    corpus: Corpus
    model: torch.nn.Module
    optimizer: hetero.HybridOptimizer
    scheduler: LambdaLR
    engine: Any
    device: torch.device
    setting: Setting
    ranks: Ranks
    placed: Callable[[], FinalPlacement]  # as it is now


@contextmanager
def open_job(options: TrainOptions, folder: RunFolder, ranks: Ranks = ALONE) -> Iterator[Job]:
    """Prepares a job and closes its engine at the end, however that comes.

    Raises ValueError or hetero.HeteroError for options that cannot work.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
        hetero.set_threads(options.threads)
    corpus = load_corpus(options.data, options.seq_len, options.seed, ranks)
    architecture = model_config(options)
    params = count_parameters(architecture)
    config = memory_config(options, folder, params, ranks)
    # A budget that cannot work is refused with the one that can, before anything is built.
    with torch.device("meta"):
        shape = build_model(architecture)
        dtypes = make_optimizer(options, shape).dtypes(config)
        stage = config.zero_stage
        shard = Shard(ranks.rank, ranks.count, grads=stage >= 2, params=stage >= 3)
        arrange(
            shape,
            config,
            dtypes,
            config.host_bytes(),
            config.disk_bytes(),
            shard=shard,
            device_bytes=config.device_bytes,
        )
    torch.manual_seed(options.seed)
    with hetero.ZeroInitContext(config):
        model = build_model(architecture)
    model, optimizer = hetero.initialize(model, make_optimizer(options, model))
    engine = optimizer.engine
    notes = list(engine.notes)
    predicted = predicted_step(options, engine, notes)

    def placed() -> FinalPlacement:
        return FinalPlacement(
            policy_of(engine),
            predicted_step(options, engine, []),
            [(change.step, change.words()) for change in engine.changes],
            tuple(engine.notes),
        )

    try:
        yield Job(
            options=options,
            corpus=corpus,
            model=model,
            optimizer=optimizer,
            scheduler=make_scheduler(optimizer, options.warmup, options.steps, options.schedule),
            engine=engine,
            device=engine.backend.device,
            setting=Setting(
                model=model_label(options),
                params=params,
                vocab_size=architecture.vocab_size,
                dtype=config.dtypes.compute,
                policy=options.policy,
                threads=torch.get_num_threads(),
                engine=engine.io_engine,
                isa=_native.isa(),
                budget_bytes=dict(engine.ledger.budget_bytes),
                notes=tuple(notes),
                steps=options.steps,
                tokens_per_step=options.tokens_per_step * ranks.count,
                data=f"{corpus.source} ({format_bytes(len(corpus))})",
                nvme_path=", ".join(config.nvme_paths) or None,
                run_dir=str(folder.path),
                ranks=ranks.count,
                predicted=predicted,
            ),
            ranks=ranks,
            placed=placed,
        )
    finally:
        engine.close()


def policy_of(engine: hetero.Engine) -> str:
    """How many chunks have which kind of state where."""
    found = []
    for state_kind in ("param", "grad", "optim_state"):
        homes = [
            t
            for b in engine.chunk_groups
            for t in getattr(b.placement, state_kind)
            if t is not None
        ]
        counts = [
            f"{homes.count(tier)} in {where}"
            for tier, where in ((Tier.DEVICE, "DEVICE"), (Tier.HOST, "RAM"), (Tier.DISK, "NVMe"))
            if tier in homes
        ]
        found.append(f"{state_kind.upper()} {', '.join(counts)}")
    return f"chunks: {'; '.join(found)}"


def predicted_step(
    options: TrainOptions, engine: hetero.Engine, notes: list[str]
) -> dict[str, Any] | None:
    """What a step is predicted to take by the saved profile of this machine, or else by the rates
    of the steps that were made.

    Args:
        options: of the run.
        engine: of the run.
        notes: gets the reason if the profile that there is says nothing.

    Returns:
        Prediction.as_dict(); None if nothing is known yet, or with several ranks: what the others
        do at the same time is not predicted.
    """
    if engine.world.size > 1:
        return None
    config, clips = engine.config, options.clip > 0
    try:
        profile = saved_profile(config, threads=options.threads)
        if profile is not None:
            made = predict(
                engine.chunk_groups,
                profile,
                Work(options.batch_size * options.seq_len, options.accumulate),
                grad_factors=clips,
                prefetch=config.prefetch,
                overlap=config.overlap,
            )
            return made.as_dict()
    except ValueError as error:  # of another version, or without what this run uses
        notes.append(f"no step time is predicted: {error}")
        return None
    plans = engine.predictions.plans(grad_factors=clips)
    if not plans:
        return None
    return Prediction(tuple(plan.cost for plan in plans), measured_computing=True).as_dict()


def memory_config(
    options: TrainOptions, folder: RunFolder, params: int, ranks: Ranks = ALONE
) -> hetero.Config:
    """The engine's configuration, with this command's defaults for what was not given."""
    host_memory: str | int | None = options.host_memory
    if host_memory is None and options.policy == "nvme":
        third = USUAL_STATE_BYTES_PER_PARAM * params // ranks.count // 3
        host_memory = max(third, LEAST_DEFAULT_HOST_BYTES)
    nvme_path = options.nvme_path
    if not nvme_path and options.policy in ("nvme", "auto"):
        nvme_path = (str(folder.path),)
    return hetero.Config.make(
        placement_policy=options.policy,
        backend=options.backend,
        link_gbps=options.link_gbps,
        host_memory=host_memory,
        device_memory=options.device_memory,
        nvme_path=nvme_path or None,
        nvme_capacity=options.nvme_capacity,
        dtype=options.dtype,
        chunk_numel=options.chunk_numel,
        io_engine=options.io_engine,
        prefetch=options.prefetch,
        overlap_updates=options.overlap_updates,
        zero_stage=options.zero_stage,
        process_memory=options.process_memory,
    )
