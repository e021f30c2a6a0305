"""hetero's documented AdamW on the parameters of plain PyTorch, where not a bit may differ."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.support.native.update_oracle import Hyper, update

# eps is large so that an update is a smooth function of the gradient, its slope at most lr / eps.
# With 1e-8 a gradient that is zero but for rounding (an attention's key bias) would make updates as
# large as any.
OPTIONS: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-4}


class Master:
    """A parameter's fp32 master and moments, kept outside PyTorch."""

    def __init__(self, value: torch.Tensor) -> None:
        self._shape = value.shape
        self._weight = value.detach().float().cpu().numpy().reshape(-1).copy()
        self._moments = (np.zeros_like(self._weight), np.zeros_like(self._weight))
        self.steps = 0

    def update(self, grad: torch.Tensor, **hyper: Any) -> None:
        """One step; `hyper` is what Hyper takes, but for the step, which is counted here."""
        self.steps += 1
        flat = grad.float().cpu().numpy().reshape(-1)
        self._weight, self._moments = update(
            "adam", self._weight, self._moments, flat, Hyper(step=self.steps, **hyper)
        )

    def write(self, value: torch.Tensor) -> None:
        """It becomes `value`; the moments stay."""
        self._weight = value.detach().float().cpu().numpy().reshape(-1).copy()

    @property
    def weight(self) -> torch.Tensor:
        """The master now, in the parameter's shape, as are the moments."""
        return torch.from_numpy(self._weight).view(self._shape)

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """As an optimizer's state_dict() has it."""
        moments = [torch.from_numpy(moment).view(self._shape) for moment in self._moments]
        return {
            "step": torch.tensor(float(self.steps)),
            "exp_avg": moments[0],
            "exp_avg_sq": moments[1],
        }


@torch.no_grad()
def update_all(
    masters: Mapping[nn.Parameter, Master], betas: tuple[float, float], **hyper: Any
) -> None:
    """One step of AdamW of the parameters that have gradients; `hyper` is what Hyper takes."""
    for param, master in masters.items():
        if param.grad is not None:
            master.update(param.grad, decoupled=True, beta1=betas[0], beta2=betas[1], **hyper)
            param.copy_(master.weight)


class PlainAdam:
    """AdamW under OPTIONS. Parameters are updated to their masters rounded to their dtypes."""

    def __init__(self) -> None:
        self.masters: dict[nn.Parameter, Master] = {}

    def add(self, param: nn.Parameter) -> None:
        """Trains the parameter from its value now, which it may be rounded from afterwards."""
        self.masters[param] = Master(param)

    def norm(self) -> float:
        """The 2-norm of all gradients."""
        grads = [p.grad for p in self.masters if p.grad is not None]
        return math.sqrt(sum(g.double().square().sum().item() for g in grads))

    def step(self, grad_scale: float = 1.0) -> None:
        """Updates the parameters that have gradients, which are multiplied by `grad_scale`."""
        update_all(self.masters, grad_scale=grad_scale, **OPTIONS)

    def zero_grad(self) -> None:
        """Clears all gradients."""
        for param in self.masters:
            param.grad = None

    def whole(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """By the parameters' names: masters, and the values of what is not trained, in fp32."""
        return {
            name: self.masters[p].weight if p in self.masters else p.detach().float()
            for name, p in model.named_parameters()
        }
