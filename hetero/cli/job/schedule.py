"""The learning rate over the steps, as a torch scheduler."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

FINAL_FRACTION = 0.1


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
