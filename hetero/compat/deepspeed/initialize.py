"""deepspeed.initialize(), and the calls beside it that hetero has not."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any

import torch
from torch.utils.data import Dataset

from hetero.api.optimizer import HybridOptimizer, ParamGroups
from hetero.api.optimizers import HybridSGD
from hetero.api.whole_state import write_parts
from hetero.compat import ranks
from hetero.compat.deepspeed.engine import DeepSpeedEngine
from hetero.compat.deepspeed.lr_schedules import make_schedule
from hetero.compat.deepspeed.options import DeepSpeedOptions, read_options
from hetero.compat.key_table import log_given, log_once
from hetero.compat.late_start import start
from hetero.compat.optimizers import hybrid_optimizer, named_optimizer

_OptimizerMaker = Callable[[Any], torch.optim.Optimizer]
_SchedulerMaker = Callable[[torch.optim.Optimizer], Any]


def initialize(
    args: Any = None,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | _OptimizerMaker | None = None,
    model_parameters: ParamGroups | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any | _SchedulerMaker | None = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Mapping[str, Any] | str | PathLike[str] | None = None,
    mesh_param: Any = None,
    config_params: Mapping[str, Any] | str | PathLike[str] | None = None,
) -> tuple[DeepSpeedEngine, HybridOptimizer | None, Any, Any]:
    """Makes the engine that trains a model as a DeepSpeed configuration says.

    Args:
        args: an object with the configuration's path as `deepspeed_config`, if `config` is None.
        model: built inside zero.Init, or outside.
        optimizer: of hetero, or torch.optim.Adam, AdamW, SGD or Adagrad before its first step, or a
            function that makes one of parameters. It goes before the configuration's.
        model_parameters: parameters, or param groups, of the optimizer that the configuration
            names. Default: all of the model's that require gradients.
        training_data: a dataset, of which a loader is made.
        lr_scheduler: of the optimizer, or a function that makes one of the optimizer. It goes
            before the configuration's.
        distributed_port, dist_init_required, mesh_param: not needed: torchrun says where ranks
            meet, and there is no sequence parallelism.
        mpu: an object whose get_data_parallel_group() gives the ranks to shard over.
        collate_fn: of the loader.
        config: a mapping, or the path of a JSON file.
        config_params: another name of config.

    Returns:
        The engine, its optimizer (None for inference), the loader and the scheduler (or None).

    Raises:
        ValueError: an unknown key (with the nearest name), one that is refused or wrong, or an
            optimizer that hetero has not.
        Exception: as hetero.initialize().
    """
    if model is None:
        raise ValueError("deepspeed.initialize() needs a model")
    log_given(
        "initialize",
        "torchrun says where ranks meet",
        distributed_port=distributed_port != 29500,
        dist_init_required=dist_init_required is False,
    )
    log_given("initialize", "there is no sequence parallelism", mesh_param=mesh_param)
    ranks.join()
    options = read_options(_given(args, config, config_params), ranks.ranks())
    made = _optimizer(model, optimizer, model_parameters, options)
    group = None if mpu is None else mpu.get_data_parallel_group()
    scheduler = None if made is None else _scheduler(lr_scheduler, made, options)
    for name, given in (("optimizer", optimizer), ("scheduler", lr_scheduler)):
        configured = given is not None and getattr(options, name) is not None
        log_given("the configuration", "initialize() was given another", **{name: configured})
    if options.buffer_dtype is not None:
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(options.buffer_dtype)
    started = made or _no_updates(model)
    mesh = ranks.shard_mesh(options.shard_size, group)
    start(model, started, options.config, process_group=group, mesh=mesh)
    if options.config.dtype != "fp32" and not options.config.durable:
        # Masters begin as the parameters do, in fp16 or bf16, with which DeepSpeed begins.
        trained = [m for m in started.engine.params.in_order() if m.chunk.trainable]
        write_parts(started.engine, trained, lambda piece: piece.set_master(piece.values.float()))
    loader = None
    if training_data is not None:
        loader = ranks.loader(
            training_data,
            shuffle=True,
            batch_size=options.train_micro_batch_size_per_gpu,
            collate_fn=collate_fn,
            drop_last=options.drop_last,
        )
    engine = DeepSpeedEngine(model, options, started.engine, made, scheduler, loader)
    return engine, made, loader, scheduler


def _no_updates(model: torch.nn.Module) -> HybridOptimizer:
    """The optimizer of a model that only computes: of parameters without gradients and states."""
    for param in model.parameters():
        param.requires_grad_(False)
    log_once("no optimizer", "parameters get no gradients (requires_grad is False)")
    return HybridSGD(model.parameters(), lr=0.0)


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds --deepspeed and --deepspeed_config, which deepspeed.initialize(args=...) reads."""
    group = parser.add_argument_group("DeepSpeed", "configuration of the training")
    group.add_argument("--deepspeed", action="store_true", help="train as the configuration says")
    group.add_argument("--deepspeed_config", help="the path of a DeepSpeed configuration, JSON")
    return parser


def _given(args: Any, *configs: Any) -> Any:
    """The one configuration that was given. Raises ValueError for none and for several."""
    of_args = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    found = [config for config in (*configs, of_args) if config is not None]
    if len(found) != 1:
        raise ValueError(
            f"deepspeed.initialize() needs one configuration and got {len(found)}: give config, or "
            f"args with deepspeed_config"
        )
    return found[0]


def _optimizer(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | _OptimizerMaker | None,
    model_parameters: ParamGroups | None,
    options: DeepSpeedOptions,
) -> HybridOptimizer | None:
    """The optimizer that was given, now one of hetero's, or the configuration's; None without."""
    params: Any = model_parameters
    if params is None:
        params = [param for param in model.parameters() if param.requires_grad]
    elif not isinstance(params, torch.Tensor):
        params = list(params)
    named = options.optimizer
    if optimizer is not None:
        source = optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer(params)
        return hybrid_optimizer(source)
    if named is None:
        return None
    return named_optimizer(named.type, named.params, params, options.state_dtype)


def _scheduler(given: Any, optimizer: HybridOptimizer, options: DeepSpeedOptions) -> Any:
    """The scheduler of the optimizer; None if there is none."""
    if given is None:
        return None if options.scheduler is None else make_schedule(options.scheduler, optimizer)
    return given if hasattr(given, "step") else given(optimizer)


def _refused(name: str, said: str) -> Callable[..., Any]:
    """A name of DeepSpeed's that raises ValueError when it is called."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise ValueError(f"{name}: hetero has no {said}")

    return refuse


init_inference = _refused(
    "init_inference",
    "inference engine; deepspeed.initialize() without an optimizer, or model.generate() as it is, "
    "compute from offloaded parameters",
)
tp_model_init = _refused("tp_model_init", "tensor parallelism")
PipelineModule = _refused("PipelineModule", "pipeline parallelism; give it the whole model")
