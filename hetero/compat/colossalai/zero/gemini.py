"""Gemini: ColossalAI's manager of memory, by its names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from hetero.compat.colossalai.argument_keys import (
    GEMINI,
    GEMINI_OPTIMIZER,
    by_name,
    read_arguments,
)
from hetero.compat.colossalai.scaled_optimizer import ScaledOptimizer
from hetero.compat.colossalai.wrapped_model import WrappedModel, placement_of
from hetero.compat.key_table import log_not_needed

DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


class GeminiDDP(WrappedModel):
    """A model with the options that GeminiOptimizer initializes it with.

    Args:
        module: built inside ZeroInitContext, or outside.
        positional: as ColossalAI takes them.
        arguments: placement_policy (default: "static"), mixed_precision, force_outputs_fp32, and
            others of ColossalAI's; and hetero's options, as host_memory and nvme_path.

    Raises:
        ValueError: an unknown argument, with the nearest name, or a wrong value.
    """

    def __init__(self, module: torch.nn.Module, *positional: Any, **arguments: Any) -> None:
        values, own = read_arguments(GEMINI, by_name(GEMINI, positional, arguments))
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

    @staticmethod
    def set_params_to_ignore(params_to_ignore: Iterable[torch.Tensor]) -> None:
        """Accepts frozen parameters, which get no optimizer state.

        Raises:
            ValueError: a parameter requires gradients: the engine has all parameters of a model.
        """
        for param in params_to_ignore:
            if param.requires_grad:
                raise ValueError(
                    f"GeminiDDP.set_params_to_ignore(): a parameter of shape {tuple(param.shape)} "
                    f"requires gradients, and hetero manages all of a model; freeze it "
                    f"(requires_grad_(False)), or keep its module out of the model"
                )

    def state_dict(  # type: ignore[override]
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        only_rank_0: bool = True,
    ) -> dict[str, Any]:
        """The model's, on whichever rank calls it.

        Args:
            destination, prefix, keep_vars: as of torch.nn.Module.state_dict().
            only_rank_0: not needed: a rank that calls this gets the values.

        Returns:
            whole tensors in the compute dtype.
        """
        given = {} if destination is None else {"destination": destination}
        return super().state_dict(prefix=prefix, keep_vars=keep_vars, **given)

    def state_dict_shard(
        self,
        prefix: str = "",
        keep_vars: bool = False,
        max_shard_size: float = 1024,
        only_rank_0: bool = True,
        pinned_state_dicts: Mapping[str, torch.Tensor] | None = None,
    ) -> Iterator[tuple[dict[str, Any], float]]:
        """state_dict() in parts.

        Args:
            prefix, keep_vars, only_rank_0: as of state_dict().
            max_shard_size: of a part, in MiB; a tensor that is larger is a part of its own.
            pinned_state_dicts: not needed.

        Yields:
            A part, and its size in MiB.
        """
        if pinned_state_dicts is not None:
            log_not_needed("state_dict_shard: pinned_state_dicts", "homes of state are in RAM")
        part: dict[str, Any] = {}
        size = 0.0
        for name, value in self.state_dict(prefix=prefix, keep_vars=keep_vars).items():
            more = value.nbytes / 2**20 if isinstance(value, torch.Tensor) else 0.0
            if part and size + more > max_shard_size:
                yield part, size
                part, size = {}, 0.0
            part[name], size = value, size + more
        yield part, size


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
        positional: as ColossalAI takes them.
        arguments: of loss scaling (initial_scale, ...), max_norm, norm_type, and others of
            ColossalAI's.

    Raises:
        ValueError: an unknown argument, with the nearest name, or a wrong value.
        Exception: as hetero.initialize().
    """

    def __init__(
        self,
        optim: torch.optim.Optimizer,
        module: WrappedModel,
        *positional: Any,
        **arguments: Any,
    ) -> None:
        values = GEMINI_OPTIMIZER.read(by_name(GEMINI_OPTIMIZER, positional, arguments))
        self._max_norm = float(values.pop("max_norm", 0.0))
        self._norm_type = float(values.pop("norm_type", 2.0))
        super().__init__(module, optim, values)

    def step(self, closure: Any = None) -> Any:
        """One update, after clipping to max_norm; overflows skip it."""
        if self._max_norm > 0:
            self.clip_grad_norm(self.model, self._max_norm, self._norm_type)
        return super().step(closure)
