"""The record of a run of `hetero train` or `hetero finetune`: its setting, and what it did."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from hetero.reporting.run_record import LINKS, PARTS, RunFacts, RunRecord, StepPoint
from hetero.reporting.table import placement_words
from offload.memory.tiers import Tier

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
    tokens_per_step: int  # of all ranks
    data: str
    nvme_path: str | None  # several with commas between
    run_dir: str


@dataclass
class TrainResult(RunRecord):
    """The record with every step, and what the run left.

    `status` is "finished", "interrupted", "terminated" or "failed". Bytes are those of this rank,
    but for `peak_rss_by_rank_bytes`: of all in a run that finished.
    """

    facts: Setting
    every_step: list[StepPoint] = field(default_factory=list)  # without samples of memory
    peak_rss_by_rank_bytes: list[int] = field(default_factory=list)
    checkpoint: str | None = None  # the last that was saved
    model_folder: str | None = None  # of the trained weights
    eval_losses: list[tuple[int, float]] = field(default_factory=list)  # after which step, and loss
    failure: Exception | None = None
    timeline_paths: list[str] = field(default_factory=list)  # picture and trace

    def add(self, step: StepPoint) -> None:
        """Takes the next step; its samples of memory are in `points`, as far as they are kept."""
        self.every_step.append(replace(step, samples=()))

    @property
    def rss_by_rank_bytes(self) -> list[int]:
        """Peaks of all ranks' processes; of a run that did not finish this rank's alone."""
        return self.peak_rss_by_rank_bytes or [self.peak_rss_bytes]

    @property
    def bytes_per_step(self) -> dict[str, int]:
        """Mean traffic of the steady steps."""
        return {link: round(self.mean(link)) for link in LINKS}

    @property
    def total_bytes(self) -> dict[str, int]:
        """What all steps moved."""
        return {link: sum(step.traffic_bytes[link] for step in self.every_step) for link in LINKS}

    def as_dict(self) -> dict[str, Any]:
        """The object that `--json` prints and summary.json holds."""
        facts, steps, moved = self.facts, self.every_step, self.bytes_per_step
        names = (
            *("params", "dtype", "policy", "threads", "engine", "isa", "budget_bytes", "data"),
            *("nvme_path", "run_dir", "ranks", "trained_params", "process_bytes"),
        )
        return {
            "model": facts.title,
            "state_bytes": facts.plain_bytes,
            **{name: getattr(facts, name) for name in names},
            "status": self.status,
            "checkpoint": self.checkpoint,
            "model_folder": self.model_folder,
            "error": self.error,
            "steps": len(steps),
            "losses": [step.loss for step in steps],
            "eval_losses": [list(each) for each in self.eval_losses],
            "grad_norms": [step.grad_norm for step in steps],
            "step_s": [step.seconds for step in steps],
            **{f"{part}_s": [step.parts_s[part] for step in steps] for part in PARTS},
            "tokens_per_s": self.tokens_per_s or 0.0,
            "peak_managed_bytes": {tier.value: self.peak_bytes[tier] for tier in Tier},
            "peak_rss_bytes": self.peak_rss_bytes,
            "peak_rss_by_rank_bytes": self.rss_by_rank_bytes,
            "bytes_per_step": moved,
            "sent_bytes_per_step": moved["sent"],
            "received_bytes_per_step": moved["received"],
            **{
                f"{name}_per_step": self.mean(name)
                for name in ("gather_wait_s", "update_s", "update_wait_s")
            },
            "total_bytes": self.total_bytes,
            "placement": placement_words(self) or None,
            "changes": [why for _, why in self.changes],
            "predicted": self.predicted,
            "measured_over_predicted": self.measured_over_predicted,
            "notes": list(self.notes),
            "timeline": self.timeline_paths,
        }
