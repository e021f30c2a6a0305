"""Loss scaling as DeepSpeed and ColossalAI do it, for fp16.

hetero's own (Config.initial_loss_scale) halves the scale at each overflow. Theirs have more
options, so an adapter initializes with initial_loss_scale=None and scales losses by this.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hetero.runtime.engine import Engine
from offload.errors import NonFiniteError


@dataclass(frozen=True)
class ScalePolicy:
    """How the scale changes.

    Attributes:
        initial: the first scale.
        growth_interval: steps without overflow after which the scale grows.
        grows_late: after an overflow, and at first, it takes one more.
        growth_factor, backoff_factor: by which it grows, and becomes smaller.
        hysteresis: overflows before it becomes smaller.
        refills_hysteresis: any step without overflow begins to count anew, and not growth alone.
        least, most: its limits.

    Raises ValueError for factors and limits that cannot be.
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
        return engine.grad_factors.unscale(engine.with_grads(params), 1.0 / self.value)

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
            if self._left <= 0:
                self._back_off(policy)
                self._left = 1
            return
        self._good_steps += 1
        if policy.refills_hysteresis:
            self._left = policy.hysteresis
        counted = self._good_steps - int(policy.grows_late)
        if counted > 0 and counted % policy.growth_interval == 0:
            self._left = policy.hysteresis
            self.value = min(policy.most, self.value * policy.growth_factor)

    def _back_off(self, policy: ScalePolicy) -> None:
        if self.value <= policy.least and policy.backoff_factor < 1:
            raise NonFiniteError(
                f"fp16 gradients overflow although the loss scale is down to {self.value:g}, its "
                f"least; use bf16 or fp32, whose range is wider"
            )
        self.value = max(policy.least, self.value * policy.backoff_factor)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {"value": self.value, "good_steps": self._good_steps, "left": self._left}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes what state_dict() gave."""
        self.value = float(state["value"])
        self._good_steps, self._left = int(state["good_steps"]), int(state["left"])
