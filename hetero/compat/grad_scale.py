"""Loss scaling as DeepSpeed and ColossalAI do it, for fp16, and steps that overflows skip.

hetero's own (Config.initial_loss_scale) halves the scale at each overflow. Theirs have more
options, so an adapter initializes with initial_loss_scale=None and scales losses by this.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hetero.api.access import clip_grad_norm_
from hetero.api.optimizer import HybridOptimizer
from hetero.runtime.engine import Engine
from offload.errors import HeteroError, NonFiniteError


@dataclass(frozen=True)
class ScalePolicy:
    """How the scale changes. Raises ValueError for factors and limits that cannot be.

    Attributes:
        initial: the first scale.
        growth_interval: steps without overflow after which the scale grows.
        grows_late: after an overflow, and at first, it takes one more.
        growth_factor, backoff_factor: by which it grows, and becomes smaller.
        hysteresis: overflows before it becomes smaller.
        refills_hysteresis: any step without overflow begins to count anew, and not growth alone.
        least, most: its limits.
    """

    initial: float = 2.0**16
    growth_interval: int = 1000
    grows_late: bool = False
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    hysteresis: int = 1
    refills_hysteresis: bool = False
    least: float = 1.0
    most: float = math.inf

    def __post_init__(self) -> None:
        if not 0 < self.least <= self.initial <= self.most:
            raise ValueError(
                f"the first loss scale must be from the least, {self.least}, to the largest, "
                f"{self.most}, not {self.initial}"
            )
        if self.growth_factor < 1 or not 0 < self.backoff_factor <= 1:
            raise ValueError(
                f"growth_factor must be 1 or more and backoff_factor from 0 to 1, not "
                f"{self.growth_factor} and {self.backoff_factor}"
            )
        if self.growth_interval < 1 or self.hysteresis < 1:
            raise ValueError(
                f"steps between growths and the hysteresis must be 1 or more, not "
                f"{self.growth_interval} and {self.hysteresis}"
            )

    @classmethod
    def fixed(cls, scale: float) -> ScalePolicy:
        """The policy that never changes the scale."""
        return cls(initial=scale, growth_factor=1.0, backoff_factor=1.0, least=min(1.0, scale))


class GradScale:
    """The factor of losses, and what each step makes of it; without a policy it is 1 for ever."""

    def __init__(self, policy: ScalePolicy | None) -> None:
        self._policy = policy
        self.value = 1.0 if policy is None else policy.initial
        self._good_steps = 0
        self._left = 0 if policy is None else policy.hysteresis

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the scale, in fp32; without a policy the loss."""
        return loss if self._policy is None else loss.float() * self.value

    def unscale(self, engine: Engine, params: Iterable[torch.Tensor]) -> bool:
        """Divides the parameters' gradients by the scale; all ranks call it, once a step.

        Returns whether an element is infinite or NaN, so that the step must be left out.
        """
        if self._policy is None:
            return False
        return engine.steps.grad_factors.unscale(engine.with_grads(params), 1.0 / self.value)

    def update(self, overflow: bool) -> None:
        """Follows one step, made or left out.

        Raises NonFiniteError if the scale would have to be smaller than its least.
        """
        policy = self._policy
        if policy is None:
            return
        if overflow:
            self._good_steps = 0
            self._left -= 1
            if self._left > 0:
                return
            self._left = 1
            if self.value <= policy.least and policy.backoff_factor < 1:
                raise NonFiniteError(
                    f"fp16 gradients overflow although the loss scale is down to {self.value:g}, "
                    f"its least; use bf16 or fp32, whose range is wider"
                )
            self.value = max(policy.least, self.value * policy.backoff_factor)
            return
        self._good_steps += 1
        if policy.refills_hysteresis:
            self._left = policy.hysteresis
        counted = self._good_steps - int(policy.grows_late)
        if counted > 0 and counted % policy.growth_interval == 0:
            self._left = policy.hysteresis
            self.value = min(policy.most, self.value * policy.growth_factor)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {"value": self.value, "good_steps": self._good_steps, "left": self._left}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes what state_dict() gave."""
        self.value = float(state["value"])
        self._good_steps, self._left = int(state["good_steps"]), int(state["left"])


class ScaledSteps:
    """Steps of an optimizer whose losses are scaled by `policy`; overflows skip them.

    Anybody else's call of the optimizer's step() would leave that out, and is an error, which says
    what to `call`.

    Attributes:
        optimizer: hetero's.
        scale: of the losses; without a policy it is 1 for ever.
        is_scaled: gradients are times the scale.
        norm: of all gradients before the last clipping; None: there was none yet.
    """

    def __init__(self, optimizer: HybridOptimizer, policy: ScalePolicy | None, call: str) -> None:
        self.scale = GradScale(policy)
        self.is_scaled = False
        self.norm: float | None = None
        self.optimizer, self._call = optimizer, call
        self._overflow = self._is_own = False
        optimizer.register_step_pre_hook(self._check)

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Adds the gradients of a loss, scaled; options as of torch.Tensor.backward()."""
        self.is_scaled = True
        self.optimizer.engine.backward(self.scale.scaled(loss), **options)

    def clip(self, max_norm: float, norm_type: float = 2.0) -> bool:
        """Clips the norm of all gradients together, or with 0 takes it alone; False: they overflow,
        and are as they were."""
        if not self._unscale():
            params = self._params()
            if max_norm:
                self.norm = float(clip_grad_norm_(params, max_norm, norm_type))
            else:
                self.norm = self.optimizer.engine.grad_norm(params)
        return not self._overflow

    def step(self) -> bool:
        """One update; False: gradients overflow, and are cleared. Raises as the optimizer's."""
        overflow = self._unscale()
        self._overflow = False
        if overflow:
            self.optimizer.zero_grad()
        else:
            self._is_own = True
            try:
                self.optimizer.step()
            finally:
                self._is_own = False
        self.scale.update(overflow)
        return not overflow

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients."""
        self.is_scaled = self._overflow = False
        self.optimizer.zero_grad(set_to_none)

    def _unscale(self) -> bool:
        """Divides gradients by the scale, once; whether they overflow."""
        if self.is_scaled:
            self.is_scaled = False
            self._overflow = self.scale.unscale(self.optimizer.engine, self._params())
        return self._overflow

    def _params(self) -> list[torch.Tensor]:
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def _check(self, optimizer: Any, *_: Any) -> None:
        if not self._is_own:
            raise HeteroError(
                f"step() of this {type(optimizer).__name__} would leave out what its wrapper does "
                f"(loss scale, clipping, counts); call {self._call}"
            )
