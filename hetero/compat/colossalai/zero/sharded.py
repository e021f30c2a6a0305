"""A model whose state is sharded and placed, and its optimizer."""

from __future__ import annotations

from typing import Any

import torch

from hetero.compat.colossalai.argument_keys import (
    SHARDED_MODEL,
    SHARDED_OPTIMIZER,
    read_arguments,
)
from hetero.compat.colossalai.scaled_optimizer import ScaledOptimizer
from hetero.compat.colossalai.wrapped_model import WrappedModel, placement_of


class ShardedModelV2(WrappedModel):
    """A model with the options that ShardedOptimizerV2 initializes it with.

    Args:
        module: built inside ZeroInitContext, or outside.
        shard_strategy: TensorShardStrategy() or BucketTensorShardStrategy().
        process_group: the ranks to shard over, for a model that was built outside.
        arguments: tensor_placement_policy (default: "cuda"), fp32_reduce_scatter, and others of
            ColossalAI's; and hetero's options, as host_memory and nvme_path.

    Raises:
        ValueError: an unknown argument, with the nearest name, or a wrong value.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        shard_strategy: Any = None,
        process_group: Any = None,
        **arguments: Any,
    ) -> None:
        values, own = read_arguments(SHARDED_MODEL, arguments)
        options: dict[str, Any] = {
            "placement_policy": placement_of(values.get("tensor_placement_policy", "cuda"))
        }
        if shard_strategy is not None:
            options["shard_strategy"] = shard_strategy
        if values.get("fp32_reduce_scatter"):
            options["reduce_dtype"] = "fp32"
        super().__init__(module, {**options, **own}, process_group)


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
