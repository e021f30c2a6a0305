"""oneflow.optim: hetero's optimizers with OneFlow's signatures."""

from __future__ import annotations

from typing import Any

from hetero.api.optimizer import ParamGroups
from hetero.compat import torch_optimizers
from hetero.compat.key_table import log_not_needed


def _own_options(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options but those that torch's have not."""
    if options.pop("contiguous_params", False):
        log_not_needed(f"{name}: contiguous_params", "parameters always lie in chunks")
    return options


class SGD(torch_optimizers.SGD):
    """hetero.HybridSGD with the signature of oneflow.optim.SGD.

    Args:
        params: parameters, or param groups.
        lr, momentum, dampening, weight_decay, nesterov: as of hetero.HybridSGD.
        options: further ones of OneFlow's; maximize is refused.
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
        own = _own_options("SGD", options)
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov, **own)


class Adam(torch_optimizers.Adam):
    """hetero.Adam with the signature of oneflow.optim.Adam.

    Args:
        params: parameters, or param groups.
        lr, betas, eps, weight_decay: as of hetero.Adam.
        amsgrad: False.
        do_bias_correction: as bias_correction of hetero.Adam.
        options: further ones of OneFlow's.
    """

    _decoupled = False

    def __init__(
        self,
        params: ParamGroups,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        do_bias_correction: bool = True,
        **options: Any,
    ) -> None:
        own = _own_options(type(self).__name__, options)
        own = {
            "decoupled_weight_decay": self._decoupled,
            "bias_correction": do_bias_correction,
            **own,
        }
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **own)


class AdamW(Adam):
    """hetero.AdamW with the signature of oneflow.optim.AdamW, whose arguments are Adam's."""

    _decoupled = True


class Adagrad(torch_optimizers.Adagrad):
    """hetero.HybridAdagrad with the signature of oneflow.optim.Adagrad, as torch's."""
