"""DeepSpeed's optimizers by their names and arguments, as hetero's."""

from __future__ import annotations

from hetero.api.optimizer import ParamGroups
from hetero.api.optimizers import CPUAdam, HybridAdam
from hetero.compat.key_table import log_not_needed


class DeepSpeedCPUAdam(CPUAdam):
    """hetero.CPUAdam with DeepSpeed's arguments.

    Args:
        model_params: parameters, or param groups.
        lr, bias_correction, betas, eps, weight_decay, adamw_mode: as of hetero.HybridAdam.
        amsgrad: False.
        fp32_optimizer_states: False keeps both states in bf16, rounded stochastically.

    Raises:
        ValueError: an option is out of range.
    """

    def __init__(
        self,
        model_params: ParamGroups,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(
            model_params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad=amsgrad,
            bias_correction=bias_correction,
            adamw_mode=adamw_mode,
            state_dtype="fp32" if fp32_optimizer_states else "bf16",
        )


class FusedAdam(HybridAdam):
    """hetero.HybridAdam with the arguments of DeepSpeed's FusedAdam.

    Args:
        params: parameters, or param groups.
        lr, bias_correction, betas, eps, weight_decay: as of hetero.HybridAdam.
        adam_w_mode: as adamw_mode of hetero.HybridAdam.
        amsgrad: False.
        set_grad_none: not needed: zero_grad() has an argument for it.

    Raises:
        ValueError: an option is out of range.
    """

    def __init__(
        self,
        params: ParamGroups,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if not set_grad_none:
            log_not_needed("FusedAdam: set_grad_none", "zero_grad(set_to_none=False) says it")
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad=amsgrad,
            bias_correction=bias_correction,
            adamw_mode=adam_w_mode,
        )
