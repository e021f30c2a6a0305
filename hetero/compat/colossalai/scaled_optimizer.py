"""What ColossalAI's wrappers of optimizers share: scaled losses, and steps that overflows skip."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from hetero.api.access import clip_grad_norm_
from hetero.api.optimizer import HybridOptimizer
from hetero.compat.colossalai.wrapped_model import WrappedModel
from hetero.compat.grad_scale import GradScale, ScalePolicy
from hetero.compat.late_start import start
from hetero.compat.torch_optimizers import OwnedSteps, hybrid_optimizer
from hetero.config import Config
from hetero.runtime.engine import Engine


class ScaledOptimizer(torch.optim.Optimizer):
    """An optimizer of hetero's whose losses are scaled under fp16.

    Making one initializes the model: it is hetero.initialize() with the options of the wrapper.

    Attributes:
        optim: hetero's optimizer.
        model: the wrapper of the model.
        grad_scale: the loss scale, which checkpoints keep.
    """

    def __init__(
        self, model: WrappedModel, optimizer: torch.optim.Optimizer, scale: Mapping[str, Any]
    ) -> None:
        """`scale`: ColossalAI's arguments of loss scaling.

        Raises as hetero.initialize(), and ValueError for a model without wrapper.
        """
        if not isinstance(model, WrappedModel):
            raise ValueError(
                f"the model must be wrapped first, by ShardedModelV2 or GeminiDDP, and is a "
                f"{type(model).__name__}"
            )
        if isinstance(optimizer, ScaledOptimizer):
            raise ValueError(f"the optimizer is a {type(optimizer).__name__} already; wrap it once")
        policy = scale_policy(scale)
        self.model = model
        self.optim: HybridOptimizer = hybrid_optimizer(optimizer)
        self._steps = OwnedSteps(self.optim, f"step() of the {type(self).__name__}")
        self.grad_scale = GradScale(policy if model.config.dtype == "fp16" else None)
        self._is_scaled = False  # gradients are times the scale
        self._overflow = False
        self._grad_norm: float | None = None  # before the last clipping
        start(
            model.module,
            self.optim,
            _with_nvme(model.config, optimizer),
            process_group=model.process_group,
        )

    # The options are the inner optimizer's.

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """hetero's."""
        return self.optim.param_groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """hetero's."""
        return self.optim.defaults

    @property
    def state(self) -> Any:  # type: ignore[override]
        """hetero's: it says where the state is."""
        return self.optim.state

    @property
    def engine(self) -> Engine:
        """hetero's engine."""
        return self.optim.engine

    @property
    def loss_scale(self) -> float:
        """The factor of losses now."""
        return self.grad_scale.value

    def unwrap(self) -> HybridOptimizer:
        """hetero's optimizer."""
        return self.optim

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optim!r})"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As of hetero's optimizers."""
        self.optim.add_param_group(param_group)

    def state_dict(self, only_rank_0: bool = True) -> dict[str, Any]:
        """hetero's, and the loss scale.

        Args:
            only_rank_0: not needed: a rank that calls this gets the values.
        """
        return {**self.optim.state_dict(), "loss_scale": self.grad_scale.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what state_dict() gave."""
        rest = dict(state_dict)
        scale = rest.pop("loss_scale", None)
        self.optim.load_state_dict(rest)
        if scale is not None:
            self.grad_scale.load_state_dict(scale)

    # A step

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Adds the gradients of a loss; under fp16 it must be used instead of loss.backward().

        Args:
            loss: a scalar.
            options: as of torch.Tensor.backward().
        """
        self._is_scaled = True
        self.engine.backward(self.grad_scale.scaled(loss), **options)

    def clip_grad_norm(self, model: Any, max_norm: float, norm_type: float = 2.0) -> float:
        """Clips the norm of all gradients together, once before a step.

        Args:
            model: not looked at: the optimizer's parameters are meant.
            max_norm: the limit; 0: nothing is done.
            norm_type: 2 or infinity.

        Returns:
            The norm before clipping; -1 if nothing is done.
        """
        self._unscale()
        if max_norm <= 0 or self._overflow:
            return -1.0
        self._grad_norm = float(clip_grad_norm_(self._params(), max_norm, norm_type))
        return self._grad_norm

    def get_grad_norm(self, norm_type: float = 2.0, **_: Any) -> float | None:
        """The norm before the last clipping; None if none was clipped yet.

        Args:
            norm_type: not looked at: that of the clipping.
        """
        return self._grad_norm

    def clip_grad_by_norm(self, max_norm: float, norm_type: float = 2.0) -> float:
        """As clip_grad_norm()."""
        return self.clip_grad_norm(self.model, max_norm, norm_type)

    def step(self, closure: Any = None) -> Any:
        """One update; gradients that overflow skip it, and make the loss scale smaller.

        Args:
            closure: None.

        Returns:
            False if the step was skipped, else None.
        """
        if closure is not None:
            raise ValueError("closures are not supported with scaled losses; call backward() first")
        self._unscale()
        overflow, self._overflow = self._overflow, False
        if overflow:
            self.optim.zero_grad()
        else:
            self._steps.step(self.optim)
        self.grad_scale.update(overflow)
        return False if overflow else None

    def _unscale(self) -> None:
        if self._is_scaled:
            self._is_scaled = False
            self._overflow = self.grad_scale.unscale(self.engine, self._params())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients."""
        self._is_scaled = self._overflow = False
        self.optim.zero_grad(set_to_none)

    def _params(self) -> list[torch.Tensor]:
        return [param for group in self.optim.param_groups for param in group["params"]]


def scale_policy(given: Mapping[str, Any]) -> ScalePolicy:
    """ColossalAI's arguments of loss scaling. Raises ValueError for those that cannot be."""
    return ScalePolicy(
        initial=float(given.get("initial_scale", 2.0**32)),
        growth_interval=given.get("growth_interval", 1000),
        growth_factor=float(given.get("growth_factor", 2)),
        backoff_factor=float(given.get("backoff_factor", 0.5)),
        hysteresis=max(1, given.get("hysteresis", 2)),
        least=float(given.get("min_scale", 1)),
        most=float(given.get("max_scale", math.inf) or math.inf),
    )


def _with_nvme(config: Config, optimizer: torch.optim.Optimizer) -> Config:
    """The options, with the directory on NVMe that ColossalAI's optimizers can be given."""
    folder = getattr(optimizer, "nvme_offload_dir", None)
    fraction = getattr(optimizer, "nvme_offload_fraction", 0.0)
    if not fraction:
        return config
    policy = "nvme" if fraction == 1.0 else "auto"
    return Config.make(config, placement_policy=policy, nvme_path=folder)
