"""colossalai.zero.sharded_optim: the optimizer of a sharded model."""

from __future__ import annotations

from typing import Any

import torch

from hetero.compat.colossalai.argument_keys import SHARDED_OPTIMIZER
from hetero.compat.colossalai.scaled_optimizer import ScaledOptimizer
from hetero.compat.colossalai.wrapped_model import WrappedModel


class ShardedOptimizerV2(ScaledOptimizer):
    """Initializes a sharded model with its optimizer, and scales losses under fp16.

    Args:
        sharded_model: a ShardedModelV2.
        optimizer: of hetero.compat.colossalai.nn.optimizer, of hetero, or torch's Adam, AdamW, SGD
            or Adagrad before its first step.
        arguments: of loss scaling (initial_scale, ...), and others of ColossalAI's.

    Raises:
        ValueError: an unknown argument, with the nearest name, or a wrong value.
        Exception: as hetero.initialize().
    """

    def __init__(
        self, sharded_model: WrappedModel, optimizer: torch.optim.Optimizer, **arguments: Any
    ) -> None:
        super().__init__(sharded_model, optimizer, SHARDED_OPTIMIZER.read(arguments))
