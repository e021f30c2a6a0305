"""colossalai.initialize(): the route by a configuration, to an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from hetero.compat.colossalai.core import global_context
from hetero.compat.colossalai.engine import Engine
from hetero.compat.colossalai.zero.sharded_model import ShardedModelV2
from hetero.compat.colossalai.zero.sharded_optim import ShardedOptimizerV2
from hetero.compat.key_table import log_not_needed, refuse_unknown


def initialize(
    model: torch.nn.Module | Callable[[], torch.nn.Module],
    optimizer: torch.optim.Optimizer,
    criterion: Callable[..., torch.Tensor] | None = None,
    train_dataloader: Iterable[Any] | None = None,
    test_dataloader: Iterable[Any] | None = None,
    lr_scheduler: Any = None,
    ophooks: Any = None,
    verbose: bool = True,
) -> tuple[Engine, Any, Any, Any]:
    """Makes the engine that the configuration of colossalai.launch() describes.

    Args:
        model: built inside ZeroInitContext, or outside.
        optimizer: as of ShardedOptimizerV2.
        criterion: gives the loss of outputs and labels.
        train_dataloader, test_dataloader: come back as they are.
        lr_scheduler: of the optimizer.
        ophooks: not needed.
        verbose: not needed.

    Returns:
        The engine, the loaders and the scheduler.

    Raises:
        ValueError: an unknown key or argument, with the nearest name.
        Exception: as hetero.initialize().
    """
    if ophooks:
        log_not_needed("colossalai.initialize: ophooks", "the engine's hooks move parameters")
    if not isinstance(model, torch.nn.Module):
        model = model()
    config = global_context.config
    zero = config.get("zero")
    if zero is None:  # plain data parallelism there
        wrapped = ShardedModelV2(model, dtype="fp32", zero_stage=1)
        scaled = ShardedOptimizerV2(wrapped, optimizer)
    else:
        refuse_unknown("zero", zero, ["model_config", "optimizer_config"])
        wrapped = ShardedModelV2(model, **zero.get("model_config", {}))
        scaled = ShardedOptimizerV2(wrapped, optimizer, **zero.get("optimizer_config", {}))
    engine = Engine(
        wrapped,
        scaled,
        criterion,
        float(config.get("clip_grad_norm", 0.0)),
        int(config.get("gradient_accumulation", 1)),
    )
    return engine, train_dataloader, test_dataloader, lr_scheduler
