"""The optimizer of a run, and its learning rate over the steps."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import hetero
from hetero.job.options import TrainOptions

# Adam's betas for language models: the second moment forgets faster than torch's 0.999, which
# suits runs of few steps.
ADAM_BETAS = (0.9, 0.95)
SGD_MOMENTUM = 0.9
FINAL_FRACTION = 0.1


def make_optimizer(options: TrainOptions, model: torch.nn.Module) -> hetero.HybridOptimizer:
    """The optimizer that was asked for."""
    groups = _param_groups(model, options.weight_decay)
    lr, state_dtype = options.lr, options.state_dtype
    if options.optimizer == "lion":
        return hetero.HybridLion(groups, lr=lr, state_dtype=state_dtype)
    if options.optimizer == "adagrad":
        return hetero.HybridAdagrad(groups, lr=lr, state_dtype=state_dtype)
    if options.optimizer == "sgd":
        return hetero.HybridSGD(groups, lr=lr, momentum=SGD_MOMENTUM, state_dtype=state_dtype)
    return hetero.HybridAdam(groups, lr=lr, betas=ADAM_BETAS, state_dtype=state_dtype)


def _param_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; biases and norms, which have one dimension, do not."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def lr_factor(step: int, warmup: int, steps: int, schedule: str) -> float:
    """The factor of the peak rate in `step` (from 0): linear warm-up, then cosine or constant.

    The cosine ends at FINAL_FRACTION in the last step.
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if schedule == "constant":
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
    return FINAL_FRACTION + (1 - FINAL_FRACTION) * 0.5 * (1 + math.cos(math.pi * progress))


def make_scheduler(optimizer: Optimizer, warmup: int, steps: int, schedule: str) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: lr_factor(step, warmup, steps, schedule))
