"""What one step did."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from hetero.reporting.run_record import LINKS, StepPoint
from offload.memory.tiers import Tier

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


def metrics_of(
    point: StepPoint,
    loss: float,
    grad_norm: float | None,
    lr: float,
    start_s: float,
) -> StepMetrics:
    """The metrics of a recorded step of a run that began at `start_s`."""
    return StepMetrics(
        step=point.last,
        loss=loss,
        grad_norm=grad_norm,
        lr=lr,
        step_s=point.seconds,
        forward_s=point.parts_s["forward"],
        backward_s=point.parts_s["backward"],
        optimizer_s=point.parts_s["optimizer"],
        tokens=point.tokens or 0,
        traffic_bytes=dict(point.traffic_bytes),
        gather_wait_s=point.gather_wait_s,
        update_s=point.update_s,
        update_wait_s=point.update_wait_s,
        memory=tuple(
            MemorySample(
                time_s=sample.at_s - start_s,
                managed_bytes={tier.value: sample.total(tier) for tier in Tier},
                budget_bytes={tier.value: sample.budget_bytes[tier] for tier in Tier},
                rss_bytes=sample.rss_bytes,
            )
            for sample in point.samples
        ),
    )
