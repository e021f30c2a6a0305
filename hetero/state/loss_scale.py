"""Dynamic loss scaling for fp16."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LossScale:
    """The factor the loss is multiplied by so that small fp16 gradients do not vanish.

    Halved at a step whose gradients overflow, which is skipped; doubled after `window` good steps.
    With scale 1 and window 0 it stays 1: for every dtype but fp16, and if the user scales the loss.
    """

    value: float = 1.0
    window: int = 0
    good_steps: int = 0
    skipped_steps: int = 0

    @property
    def dynamic(self) -> bool:
        """Whether losses must be scaled."""
        return self.window > 0

    @property
    def grad_factor(self) -> float:
        """What the gradients that backward gives are to be multiplied by."""
        return 1.0 / self.value

    def update(self, overflow: bool) -> None:
        """Follows one step."""
        if not self.dynamic:
            return
        if overflow:
            self.value = max(self.value / 2, 1.0)
            self.good_steps = 0
            self.skipped_steps += 1
            return
        self.good_steps += 1
        if self.good_steps == self.window:
            self.value *= 2
            self.good_steps = 0
