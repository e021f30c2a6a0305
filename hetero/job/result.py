"""What a whole run did."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from hetero.reporting.run_record import LINKS, RunFacts, RunRecord, StepPoint
from offload.timeline import Timeline

# fp32 master, exp_avg, exp_avg_sq and gradient: what the state takes where nothing is split.
USUAL_STATE_BYTES_PER_PARAM = 16
FROZEN_BYTES_PER_PARAM = 2  # in bf16


def usual_state_bytes(params: int, trained: int) -> int:
    """What the state of a model takes where nothing is split: of `params`, `trained` are so."""
    return USUAL_STATE_BYTES_PER_PARAM * trained + FROZEN_BYTES_PER_PARAM * (params - trained)


@dataclass(frozen=True, kw_only=True)
class Setting(RunFacts):
    """What is known before the first step."""

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
    trained_params: int | None = None  # the others are frozen; None: all are trained


@dataclass
class TrainResult:
    """The setting, the steps that were made and the peaks; `status` says how the run ended.

    Bytes are those of this rank, but for `peak_rss_by_rank_bytes`: of all in a run that finished.
    """

    setting: Setting
    steps: list[StepPoint] = field(default_factory=list)  # without samples of memory
    peak_managed_bytes: dict[str, int] = field(default_factory=dict)
    peak_rss_bytes: int = 0
    peak_rss_by_rank_bytes: list[int] = field(default_factory=list)
    status: str = "finished"  # "finished" | "interrupted" | "terminated" | "failed"
    checkpoint: str | None = None  # the last that was saved
    model_folder: str | None = None  # of the trained weights
    eval_losses: list[tuple[int, float]] = field(default_factory=list)  # after which step, and loss
    failure: Exception | None = None
    # Of a step, from figures(): before the first one, and where homes are in the end.
    predicted: dict[str, Any] | None = None
    placement: str | None = None  # at the end; None: the run failed
    changes: list[tuple[int, str]] = field(default_factory=list)  # of homes: after which step, why
    notes: list[str] = field(default_factory=list)  # fallbacks, changes, and what limits a step
    record: RunRecord | None = None  # of all steps, by this rank; None: none was made
    timeline: Timeline | None = None  # of the last steps, if the run came there
    timeline_paths: list[str] = field(default_factory=list)  # picture and trace

    def add(self, step: StepPoint) -> None:
        """Takes the next step; its samples of memory are in the record, as far as they are kept."""
        self.steps.append(replace(step, samples=()))

    @property
    def error(self) -> str | None:
        return None if self.failure is None else str(self.failure)

    @property
    def tokens_per_s(self) -> float:
        """Of the steady steps, as all figures below: RunRecord.steady says which they are."""
        return (self.record and self.record.tokens_per_s) or 0.0

    @property
    def bytes_per_step(self) -> dict[str, int]:
        """Mean traffic."""
        return {link: round(self.per_step(link)) for link in LINKS}

    @property
    def measured_over_predicted(self) -> float | None:
        """The median step over what was predicted."""
        if self.predicted is None or self.record is None:
            return None
        return float(self.record.step_s / self.predicted["step_s"])

    def per_step(self, figure: str) -> float:
        """The mean of a figure of StepPoint, or of the bytes on one of LINKS."""
        return 0.0 if self.record is None else self.record.mean(figure)

    @property
    def total_bytes(self) -> dict[str, int]:
        """What all steps moved."""
        return {link: sum(step.traffic_bytes[link] for step in self.steps) for link in LINKS}

    def as_dict(self) -> dict[str, Any]:
        """The object that `--json` prints and summary.json holds."""
        names = (
            *("params", "dtype", "policy", "threads", "engine", "isa", "budget_bytes", "data"),
            *("nvme_path", "run_dir", "ranks", "trained_params", "process_bytes"),
        )
        seconds = ("step_s", "forward_s", "backward_s", "optimizer_s")
        return {
            "model": self.setting.title,
            "state_bytes": self.setting.plain_bytes,
            **{name: getattr(self.setting, name) for name in names},
            "status": self.status,
            "checkpoint": self.checkpoint,
            "model_folder": self.model_folder,
            "error": self.error,
            "steps": len(self.steps),
            "losses": [step.loss for step in self.steps],
            "eval_losses": [list(each) for each in self.eval_losses],
            "grad_norms": [step.grad_norm for step in self.steps],
            **{name: [getattr(step, name) for step in self.steps] for name in seconds},
            "tokens_per_s": self.tokens_per_s,
            "peak_managed_bytes": self.peak_managed_bytes,
            "peak_rss_bytes": self.peak_rss_bytes,
            "peak_rss_by_rank_bytes": self.peak_rss_by_rank_bytes,
            "bytes_per_step": self.bytes_per_step,
            "sent_bytes_per_step": self.bytes_per_step["sent"],
            "received_bytes_per_step": self.bytes_per_step["received"],
            "gather_wait_s_per_step": self.per_step("gather_wait_s"),
            "update_s_per_step": self.per_step("update_s"),
            "update_wait_s_per_step": self.per_step("update_wait_s"),
            "total_bytes": self.total_bytes,
            "placement": self.placement,
            "changes": [why for _, why in self.changes],
            "predicted": self.predicted,
            "measured_over_predicted": self.measured_over_predicted,
            "notes": self.notes,
            "timeline": self.timeline_paths,
        }
