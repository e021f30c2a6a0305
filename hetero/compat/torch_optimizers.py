"""Optimizers with the signatures of torch.optim, and hetero's optimizers from torch's."""

from __future__ import annotations

from typing import Any

import torch

from hetero.api.optimizer import HybridOptimizer, ParamGroups
from hetero.api.optimizers import HybridAdagrad, HybridAdam, HybridSGD
from hetero.compat.key_table import log_not_needed

_ONE_KERNEL = "hetero has one kernel, which takes many tensors at a time"
_SPEED = ("foreach", "fused", "capturable", "differentiable")


def check_torch_options(name: str, options: dict[str, Any]) -> None:
    """Takes torch's options that choose an implementation out of `options`, and logs them.

    Raises ValueError for those that change the update: amsgrad, maximize.
    """
    for option in _SPEED:
        if options.pop(option, None):
            log_not_needed(f"{name}: {option}", _ONE_KERNEL)
    for option in ("amsgrad", "maximize"):
        if options.pop(option, False):
            raise ValueError(f"{name}: {option}=True is another update, which hetero has not")


class Adam(HybridAdam):
    """HybridAdam with the signature of torch.optim.Adam.

    Args:
        params: parameters, or param groups.
        lr, betas, eps, weight_decay: as of torch.optim.Adam.
        options: further ones of torch.optim.Adam; amsgrad and maximize are refused.

    Raises:
        ValueError: for options that cannot be.
    """

    _decoupled = False

    def __init__(
        self,
        params: ParamGroups,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **options: Any,
    ) -> None:
        decoupled = bool(options.pop("decoupled_weight_decay", self._decoupled))
        corrects = bool(options.pop("bias_correction", True))
        check_torch_options(type(self).__name__, options)
        super().__init__(params, lr, corrects, betas, eps, weight_decay, decoupled, **options)


class AdamW(Adam):
    """HybridAdam with the signature of torch.optim.AdamW.

    Args:
        params: parameters, or param groups.
        lr, betas, eps, weight_decay: as of torch.optim.AdamW.
        options: further ones of torch.optim.AdamW; amsgrad and maximize are refused.

    Raises:
        ValueError: for options that cannot be.
    """

    _decoupled = True

    def __init__(
        self,
        params: ParamGroups,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, **options)


class SGD(HybridSGD):
    """HybridSGD with the signature of torch.optim.SGD.

    Args:
        params: parameters, or param groups.
        lr, momentum, dampening, weight_decay, nesterov: as of torch.optim.SGD.
        options: further ones of torch.optim.SGD; maximize is refused.

    Raises:
        ValueError: for options that cannot be.
    """

    def __init__(
        self,
        params: ParamGroups,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **options: Any,
    ) -> None:
        check_torch_options("SGD", options)
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov, **options)


class Adagrad(HybridAdagrad):
    """HybridAdagrad with the signature of torch.optim.Adagrad.

    Args:
        params: parameters, or param groups.
        lr, lr_decay, weight_decay, initial_accumulator_value, eps: as of torch.optim.Adagrad; the
            accumulator starts at 0.
        options: further ones of torch.optim.Adagrad; maximize is refused.

    Raises:
        ValueError: for options that cannot be.
    """

    def __init__(
        self,
        params: ParamGroups,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        **options: Any,
    ) -> None:
        if initial_accumulator_value:
            raise ValueError(
                f"Adagrad: initial_accumulator_value must be 0, not {initial_accumulator_value!r}"
            )
        check_torch_options("Adagrad", options)
        super().__init__(params, lr, lr_decay, weight_decay, eps, **options)


def hybrid_optimizer(optimizer: torch.optim.Optimizer) -> HybridOptimizer:
    """hetero's optimizer with the param groups of torch's; hetero's own comes back as it is.

    Args:
        optimizer: torch.optim.Adam, AdamW, SGD or Adagrad, before its first step.

    Raises:
        ValueError: it is another one, it was stepped already, or it has options that hetero's has
            not.
    """
    if isinstance(optimizer, HybridOptimizer):
        return optimizer
    makers: dict[type, Any] = {
        torch.optim.AdamW: AdamW,
        torch.optim.Adam: Adam,
        torch.optim.SGD: SGD,
        torch.optim.Adagrad: Adagrad,
    }
    made = makers.get(type(optimizer))
    if made is None:
        raise ValueError(
            f"the optimizer must be one of hetero's, or torch.optim.Adam, AdamW, SGD or Adagrad, "
            f"not {type(optimizer).__name__}: the update runs where the state lives"
        )
    # (Adagrad has its states, with steps of 0, from the beginning.)
    if any(float(state.get("step", 0)) for state in optimizer.state.values()):
        raise ValueError(
            f"this {type(optimizer).__name__} was stepped already; give it before its first step, "
            f"and load its state afterwards"
        )
    groups = []
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        check_torch_options(type(optimizer).__name__, options)
        decoupled = options.pop("decoupled_weight_decay", None)
        if issubclass(made, HybridAdam):
            options |= {"adamw_mode": made._decoupled if decoupled is None else bool(decoupled)}
        if options.pop("initial_accumulator_value", 0):
            raise ValueError("Adagrad: initial_accumulator_value must be 0")
        groups.append({"params": group["params"], **options})
    hybrid: HybridOptimizer = made(groups)
    return hybrid


def follow(scheduler: Any, old: torch.optim.Optimizer, new: HybridOptimizer) -> None:
    """Makes a learning rate scheduler that was made for `old` set the options of `new`.

    Those that it combines, too. One of another optimizer stays as it is.
    """
    if scheduler is None or old is new:
        return
    for part in getattr(scheduler, "_schedulers", ()):
        follow(part, old, new)
    if getattr(scheduler, "optimizer", None) is not old:
        return
    if not hasattr(new.step, "_wrapped_by_lr_sched"):
        # torch's schedulers warn unless one of them has wrapped step(), as their constructor does.
        before = [group["lr"] for group in new.param_groups]
        torch.optim.lr_scheduler.LambdaLR(new, lambda _: 1.0)
        for group, lr in zip(new.param_groups, before, strict=True):
            group["lr"] = lr
    scheduler.optimizer = new
