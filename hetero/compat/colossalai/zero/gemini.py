"""Gemini: ColossalAI's manager of memory, by its names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hetero.compat.colossalai.argument_keys import GEMINI, GEMINI_OPTIMIZER, read_arguments
from hetero.compat.colossalai.scaled_optimizer import ScaledOptimizer
from hetero.compat.colossalai.wrapped_model import WrappedModel, placement_of

DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


class GeminiDDP(WrappedModel):
    """A model with the options that GeminiOptimizer initializes it with.

    Args:
        module: built inside ZeroInitContext, or outside.
        arguments: placement_policy (default: "static"), mixed_precision, force_outputs_fp32, and
            others of ColossalAI's; and hetero's options, as host_memory and nvme_path.

    Raises:
        ValueError: an unknown argument, with the nearest name, or a wrong value.
    """

    def __init__(self, module: torch.nn.Module, **arguments: Any) -> None:
        values, own = read_arguments(GEMINI, arguments)
        dtype = values.get("mixed_precision", torch.float16)
        if dtype not in DTYPES:
            raise ValueError(f"GeminiDDP: mixed_precision must be a floating dtype, not {dtype!r}")
        stage = 2 if values.get("shard_param_frac", 1.0) == 0 else 3
        options: dict[str, Any] = {
            "placement_policy": _placement(values),
            "dtype": DTYPES[dtype],
            "zero_stage": 1 if values.get("strict_ddp_mode") else stage,
        }
        super().__init__(
            module,
            {**options, **own},
            values.get("zero_group", values.get("process_group")),
            bool(values.get("force_outputs_fp32", False)),
        )


def _placement(values: Mapping[str, Any]) -> str:
    """hetero's placement policy."""
    policy = values.get("placement_policy", "static")
    if policy != "static":
        return placement_of(policy)
    optimizer = values.get("offload_optim_frac", 0.0)
    params = values.get("offload_param_frac", 0.0)
    if params > 0 or optimizer == 1:
        return "cpu"
    return "auto" if optimizer > 0 else placement_of("cuda")


class GeminiOptimizer(ScaledOptimizer):
    """Initializes a model of GeminiDDP with its optimizer; scales losses, and clips.

    Args:
        optim: as of ShardedOptimizerV2.
        module: a GeminiDDP.
        arguments: of loss scaling (initial_scale, ...), max_norm, norm_type, and others of
            ColossalAI's.

    Raises:
        ValueError: an unknown argument, with the nearest name, or a wrong value.
        Exception: as hetero.initialize().
    """

    def __init__(
        self, optim: torch.optim.Optimizer, module: WrappedModel, **arguments: Any
    ) -> None:
        values = GEMINI_OPTIMIZER.read(arguments)
        self._max_norm = float(values.pop("max_norm", 0.0))
        self._norm_type = float(values.pop("norm_type", 2.0))
        super().__init__(module, optim, values)

    def step(self, closure: Any = None) -> Any:
        """One update, after clipping to max_norm; overflows skip it."""
        if self._max_norm > 0:
            self.clip_grad_norm(self.model, self._max_norm, self._norm_type)
        return super().step(closure)
