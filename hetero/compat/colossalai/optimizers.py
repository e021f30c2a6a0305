"""colossalai.nn.optimizer: HybridAdam and CPUAdam by ColossalAI's arguments."""

from __future__ import annotations

from typing import Any

from hetero.api import optimizers
from hetero.api.optimizer import ParamGroups


class HybridAdam(optimizers.HybridAdam):
    """hetero.HybridAdam with ColossalAI's arguments.

    Args:
        model_params: parameters, or param groups.
        lr, bias_correction, betas, eps, weight_decay, adamw_mode: as of hetero.HybridAdam.
        nvme_offload_fraction: above 0: nvme_offload_dir is used; 1: for all optimizer state.
        nvme_offload_dir: a directory on NVMe.
        defaults: state_dtype of hetero.HybridAdam.

    Raises:
        ValueError: an option is out of range, or a fraction has no directory.
    """

    def __init__(
        self,
        model_params: ParamGroups,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adamw_mode: bool = True,
        nvme_offload_fraction: float = 0.0,
        nvme_offload_dir: str | None = None,
        **defaults: Any,
    ) -> None:
        self.nvme_offload_fraction, self.nvme_offload_dir = _offload(
            nvme_offload_fraction, nvme_offload_dir
        )
        defaults |= {"bias_correction": bias_correction, "adamw_mode": adamw_mode}
        super().__init__(model_params, lr, betas, eps, weight_decay, **defaults)


class CPUAdam(HybridAdam, optimizers.CPUAdam):
    """hetero.CPUAdam with ColossalAI's arguments, which are HybridAdam's."""


def _offload(fraction: float, folder: str | None) -> tuple[float, str | None]:
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"nvme_offload_fraction must be from 0 to 1, not {fraction!r}")
    if fraction and folder is None:
        raise ValueError("nvme_offload_fraction needs nvme_offload_dir, a directory on NVMe")
    return fraction, folder
