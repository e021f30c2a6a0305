"""What one step did."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from hetero.reporting.run_record import LINKS

__all__ = ["LINKS", "TIERS", "MemorySample", "StepMetrics"]

TIERS = ("device", "host", "disk")


@dataclass(frozen=True)
class MemorySample:
    """Bytes held at one moment, `time_s` after the run's first step began."""

    time_s: float
    managed_bytes: dict[str, int]  # per tier, the model state that hetero holds
    budget_bytes: dict[str, int | None]  # per tier, as it is then; None is no limit
    rss_bytes: int  # of the whole process


@dataclass(frozen=True)
class StepMetrics:
    """Figures of one optimizer step; all times are wall-clock seconds, all bytes this step's.

    Times and bytes are those of this rank; loss, norm and tokens are of all ranks together.
    `step_s` is the time since the step before; what is not forward, backward or optimizer is the
    data, the scheduler, the measuring itself, and a checkpoint that was saved between the two.
    """

    step: int  # from 1
    loss: float  # mean over the micro-batches of all ranks
    grad_norm: float | None  # before clipping; None without clipping or if not finite
    lr: float
    step_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    tokens: int
    traffic_bytes: dict[str, int]  # per link
    gather_wait_s: float  # in which compute waited for parameters that other ranks hold
    update_s: float  # in which updates were being made
    update_wait_s: float  # in which step(), or a use of a parameter, waited for updates
    memory: tuple[MemorySample, ...]  # after each forward and backward, and after the optimizer

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s

    def as_dict(self) -> dict[str, Any]:
        """The line of metrics.jsonl."""
        return dataclasses.asdict(self) | {"tokens_per_s": self.tokens_per_s}
