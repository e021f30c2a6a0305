"""The names of ColossalAI that its example uses, in plain PyTorch: fp16 with fp32 masters."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from tests.support.training.plain_adam import Master


class _Logger:
    def info(self, message: str, ranks: Any = None) -> None:
        """Says nothing."""


def get_dist_logger() -> _Logger:
    return _Logger()


def disable_existing_loggers() -> None:
    return None


def launch_from_torch(config: Any) -> None:
    torch.manual_seed(1024)


def ZeroInitContext(**_: Any) -> Any:
    return nullcontext()


class TensorShardStrategy:
    """Nothing."""


def ShardedModelV2(model: torch.nn.Module, *_: Any, **__: Any) -> torch.nn.Module:
    model.first_values = [p.detach().clone() for p in model.parameters()]  # type: ignore[assignment]
    return model.half()


class HybridAdam:
    """The options of an AdamW, which the wrapper makes over masters."""

    def __init__(self, params: Any, lr: float) -> None:
        self.lr = lr


class ShardedOptimizerV2:
    """hetero's documented AdamW on fp32 masters, from gradients of a scaled loss."""

    def __init__(self, model: torch.nn.Module, optimizer: HybridAdam, initial_scale: float) -> None:
        self._params, self._lr, self._scale = list(model.parameters()), optimizer.lr, initial_scale
        self.masters = [Master(value) for value in model.first_values]

    def zero_grad(self) -> None:
        for param in self._params:
            param.grad = None

    def backward(self, loss: torch.Tensor) -> None:
        (loss.float() * self._scale).backward()

    @torch.no_grad()
    def step(self) -> None:
        for param, master in zip(self._params, self.masters, strict=True):
            if param.grad is not None:
                master.update(
                    param.grad,
                    lr=self._lr,
                    weight_decay=0.0,
                    decoupled=True,
                    beta1=0.9,
                    beta2=0.999,
                    eps=1e-8,
                    grad_scale=1 / self._scale,
                )
                param.copy_(master.weight)
