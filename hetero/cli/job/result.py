"""What a whole run did."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from hetero.cli.job.metrics import LINKS, MemorySample, StepMetrics
from offload.timeline import Timeline

# fp32 master, exp_avg, exp_avg_sq and gradient: what the state takes where nothing is split.
USUAL_STATE_BYTES_PER_PARAM = 16


@dataclass(frozen=True)
class Setting:
    """What is known before the first step."""

    model: str
    params: int
    dtype: str
    policy: str
    threads: int
    engine: str | None  # of disk transfers; None when nothing is on disk
    isa: str
    budget_bytes: dict[str, int | None]  # per tier; None is no limit
    notes: tuple[str, ...]  # fallbacks worth knowing
    vocab_size: int
    steps: int  # planned
    tokens_per_step: int  # of all ranks
    data: str
    nvme_path: str | None  # several with commas between
    run_dir: str
    ranks: int = 1
    predicted: dict[str, Any] | None = None  # Prediction.as_dict(); None without a profile

    @property
    def state_bytes(self) -> int:
        return USUAL_STATE_BYTES_PER_PARAM * self.params


@dataclass(frozen=True)
class FinalPlacement:
    """Where the state was at the end of the run; homes may have moved after some steps."""

    placement: str
    predicted: dict[str, Any] | None  # Prediction.as_dict()
    changes: list[tuple[int, str]]  # after which step, and why
    notes: tuple[str, ...] = ()  # the engine's: fallbacks, changes, and what limits a step


@dataclass
class TrainResult:
    """The setting, the steps that were made and the peaks; `status` says how the run ended.

    Bytes are those of this rank, but for `peak_rss_by_rank_bytes`: of all in a run that finished.
    """

    setting: Setting
    steps: list[StepMetrics] = field(default_factory=list)
    peak_managed_bytes: dict[str, int] = field(default_factory=dict)
    peak_rss_bytes: int = 0
    peak_rss_by_rank_bytes: list[int] = field(default_factory=list)
    status: str = "finished"  # "finished" | "interrupted" | "failed"
    failure: Exception | None = None
    placed: FinalPlacement | None = None  # None: the run failed
    timeline: Timeline | None = None  # of the last steps, if it was wanted and the run came there
    timeline_paths: list[str] = field(default_factory=list)  # picture and trace

    @property
    def predicted(self) -> dict[str, Any] | None:
        """What a step was expected to take with the placement that the run ended with."""
        return self.setting.predicted if self.placed is None else self.placed.predicted

    @property
    def notes(self) -> list[str]:
        """What was worth knowing at first, and what came to it."""
        later = () if self.placed is None else self.placed.notes
        return list(dict.fromkeys((*self.setting.notes, *later)))

    @property
    def error(self) -> str | None:
        return None if self.failure is None else str(self.failure)

    @property
    def steady_steps(self) -> list[StepMetrics]:
        """The steps without the first, which also touches memory for the first time.

        After homes have moved those that came then, without the first of them.
        """
        changes = [] if self.placed is None else self.placed.changes
        moved = max((step for step, _ in changes), default=0)
        return self.steps[moved + 1 :] or self.steps[1:] or self.steps

    @property
    def tokens_per_s(self) -> float:
        seconds = sum(step.step_s for step in self.steady_steps)
        return sum(step.tokens for step in self.steady_steps) / seconds if seconds else 0.0

    @property
    def bytes_per_step(self) -> dict[str, int]:
        """Mean traffic of the steady steps."""
        steady = self.steady_steps
        count = max(1, len(steady))
        return {
            link: round(sum(step.traffic_bytes[link] for step in steady) / count) for link in LINKS
        }

    @property
    def measured_over_predicted(self) -> float | None:
        """The median steady step over what was predicted."""
        if self.predicted is None or not self.steps:
            return None
        step_s = statistics.median(step.step_s for step in self.steady_steps)
        return float(step_s / self.predicted["step_s"])

    @property
    def gather_wait_s_per_step(self) -> float:
        """Mean of the steady steps."""
        steady = self.steady_steps
        return sum(step.gather_wait_s for step in steady) / max(1, len(steady))

    @property
    def total_bytes(self) -> dict[str, int]:
        return {link: sum(step.traffic_bytes[link] for step in self.steps) for link in LINKS}

    @property
    def memory(self) -> list[MemorySample]:
        return [sample for step in self.steps for sample in step.memory]

    def as_dict(self) -> dict[str, Any]:
        """The object that `--json` prints and summary.json holds."""
        setting = self.setting
        return {
            "model": setting.model,
            "params": setting.params,
            "state_bytes": setting.state_bytes,
            "dtype": setting.dtype,
            "policy": setting.policy,
            "engine": setting.engine,
            "isa": setting.isa,
            "threads": setting.threads,
            "ranks": setting.ranks,
            "status": self.status,
            "error": self.error,
            "steps": len(self.steps),
            "losses": [step.loss for step in self.steps],
            "grad_norms": [step.grad_norm for step in self.steps],
            "step_s": [step.step_s for step in self.steps],
            "forward_s": [step.forward_s for step in self.steps],
            "backward_s": [step.backward_s for step in self.steps],
            "optimizer_s": [step.optimizer_s for step in self.steps],
            "tokens_per_s": self.tokens_per_s,
            "budget_bytes": setting.budget_bytes,
            "peak_managed_bytes": self.peak_managed_bytes,
            "peak_rss_bytes": self.peak_rss_bytes,
            "peak_rss_by_rank_bytes": self.peak_rss_by_rank_bytes,
            "bytes_per_step": self.bytes_per_step,
            "sent_bytes_per_step": self.bytes_per_step["sent"],
            "received_bytes_per_step": self.bytes_per_step["received"],
            "gather_wait_s_per_step": self.gather_wait_s_per_step,
            "total_bytes": self.total_bytes,
            "placement": None if self.placed is None else self.placed.placement,
            "changes": [] if self.placed is None else [why for _, why in self.placed.changes],
            "predicted": self.predicted,
            "measured_over_predicted": self.measured_over_predicted,
            "notes": self.notes,
            "timeline": self.timeline_paths,
            "data": setting.data,
            "nvme_path": setting.nvme_path,
            "run_dir": setting.run_dir,
        }
