"""ColossalAI's engine: the calls of a training loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hetero.compat.colossalai.scaled_optimizer import ScaledOptimizer
from hetero.compat.colossalai.wrapped_model import WrappedModel


class Engine:
    """A model, its criterion and its optimizer.

        engine.zero_grad()
        loss = engine.criterion(engine(data), label)
        engine.backward(loss)
        engine.step()

    With gradient accumulation zero_grad() and step() act once in so many calls.
    """

    def __init__(
        self,
        model: WrappedModel,
        optimizer: ScaledOptimizer,
        criterion: Callable[..., torch.Tensor] | None = None,
        clip_grad_norm: float = 0.0,
        accumulation_steps: int = 1,
    ) -> None:
        """`clip_grad_norm`: limit of the total norm; 0: none."""
        self.model, self.optimizer, self.criterion = model, optimizer, criterion
        self._clip_grad_norm, self._accumulation_steps = clip_grad_norm, accumulation_steps
        self._micro_batches = 0  # of this step, whose gradients are there

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        return self.model.training

    @property
    def is_accumulating(self) -> bool:
        """Whether the next step() only counts, because more micro-batches of the step will come."""
        return self._micro_batches < self._accumulation_steps

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def train(self) -> None:
        """Training mode."""
        self.model.train()

    def eval(self) -> None:
        """Evaluation mode."""
        self.model.eval()

    def zero_grad(self) -> None:
        """Clears gradients; not between the micro-batches of a step."""
        if self._micro_batches == 0:
            self.optimizer.zero_grad()

    def backward(self, loss: torch.Tensor) -> None:
        """Adds the gradients of a micro-batch, whose loss is divided by their number."""
        self._micro_batches += 1
        if self._accumulation_steps > 1:
            loss = loss / self._accumulation_steps
        self.optimizer.backward(loss)

    def step(self) -> Any:
        """Clips and updates; False if an overflow skips the step, or if it only counts."""
        if self.is_accumulating:
            return False
        self._micro_batches = 0
        if self._clip_grad_norm > 0:
            self.optimizer.clip_grad_norm(self.model, self._clip_grad_norm)
        done = self.optimizer.step()
        self.optimizer.zero_grad()
        return done is not False

    def execute_schedule(self, batch: Any) -> tuple[Any, Any, torch.Tensor | None]:
        """One micro-batch, (data, label): the outputs, the label, the loss.

        In training mode with backward. Data may be a tensor, a list or tuple of arguments, or a
        mapping of them.
        """
        data, label = batch
        if isinstance(data, dict):
            output = self(**data)
        else:
            output = self(*data) if isinstance(data, (list, tuple)) else self(data)
        loss = None if self.criterion is None else self.criterion(output, label)
        if self.training and loss is not None:
            self.backward(loss)
        return output, label, loss
