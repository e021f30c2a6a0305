"""DeepSpeed's Lion by its names and arguments, as hetero's."""

from __future__ import annotations

from hetero.api.optimizer import ParamGroups
from hetero.api.optimizers import HybridLion
from hetero.compat.key_table import log_not_needed


class DeepSpeedCPULion(HybridLion):
    """hetero.HybridLion with DeepSpeed's arguments and defaults.

    Args:
        model_params: parameters, or param groups.
        lr, betas, weight_decay: as of hetero.HybridLion.
        fp32_optimizer_states: False keeps the state in bf16, rounded stochastically.

    Raises:
        ValueError: an option is out of range.
    """

    def __init__(
        self,
        model_params: ParamGroups,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(
            model_params,
            lr=lr,
            betas=betas,
            weight_decay=weight_decay,
            state_dtype="fp32" if fp32_optimizer_states else "bf16",
        )


class FusedLion(DeepSpeedCPULion):
    """DeepSpeedCPULion with the arguments of DeepSpeed's FusedLion.

    Args:
        params: parameters, or param groups.
        lr, betas, weight_decay: as of hetero.HybridLion.
        set_grad_none: not needed: zero_grad() has an argument for it.

    Raises:
        ValueError: an option is out of range.
    """

    def __init__(
        self,
        params: ParamGroups,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        if not set_grad_none:
            log_not_needed("FusedLion: set_grad_none", "zero_grad(set_to_none=False) says it")
        super().__init__(params, lr, betas, weight_decay)
