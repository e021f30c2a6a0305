"""DeepSpeed's Adagrad by its name and arguments, as hetero's."""

from __future__ import annotations

from hetero.api.optimizer import ParamGroups
from hetero.api.optimizers import HybridAdagrad


class DeepSpeedCPUAdagrad(HybridAdagrad):
    """hetero.HybridAdagrad with DeepSpeed's arguments.

    Args:
        model_params: parameters, or param groups.
        lr, eps, weight_decay: as of hetero.HybridAdagrad.
        amsgrad: False.
        fp32_optimizer_states: False keeps the state in bf16, rounded stochastically.

    Raises:
        ValueError: an option is out of range.
    """

    def __init__(
        self,
        model_params: ParamGroups,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(
            model_params,
            lr=lr,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            state_dtype="fp32" if fp32_optimizer_states else "bf16",
        )
