"""colossalai.nn.optimizer: HybridAdam and CPUAdam by ColossalAI's arguments."""

from __future__ import annotations

from typing import Any

from hetero.api import optimizers
from hetero.compat.renamed_optimizers import RenamedOptimizer

_ARGUMENTS = (
    "model_params lr bias_correction betas eps weight_decay adamw_mode nvme_offload_fraction "
    "nvme_offload_dir **defaults"
)


class HybridAdam(RenamedOptimizer, optimizers.HybridAdam, arguments=_ARGUMENTS):
    """hetero.HybridAdam with ColossalAI's arguments; `defaults` are further options of hetero's.

    nvme_offload_fraction above 0: nvme_offload_dir, a directory on NVMe, is used; 1: for all
    optimizer state. Raises ValueError for a fraction without a directory, or beyond 0 to 1.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = self._given(args, kwargs)
        fraction = given.pop("nvme_offload_fraction", 0.0)
        folder = given.pop("nvme_offload_dir", None)
        if not 0.0 <= fraction <= 1.0:
            raise ValueError(f"nvme_offload_fraction must be from 0 to 1, not {fraction!r}")
        if fraction and folder is None:
            raise ValueError("nvme_offload_fraction needs nvme_offload_dir, a directory on NVMe")
        self.nvme_offload_fraction, self.nvme_offload_dir = fraction, folder
        super().__init__(**given)


class CPUAdam(HybridAdam, optimizers.CPUAdam):
    """hetero.CPUAdam with ColossalAI's arguments, which are HybridAdam's."""
