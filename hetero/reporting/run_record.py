"""What is kept of a run: figures of its steps, and the facts that hold for all of it.

Vocabulary of this package:

    memory kind  what bytes of a tier are for, as pictures tell them apart; a few accounts each
    point        figures of a step; of a long run not every step has one
    record       all points of a run with what is known of it at its end: what the page is made of
"""

from __future__ import annotations

import enum
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from offload.memory.sizes import format_bytes
from offload.memory.tiers import Account, Tier
from offload.timeline import Timeline

LINKS = ("h2d", "d2h", "disk_read", "disk_write", "sent", "received")  # the last two: other ranks
PARTS = ("forward", "backward", "optimizer")
TIER_WORDS = {Tier.DEVICE: "device", Tier.HOST: "RAM", Tier.DISK: "NVMe"}
TIER_PLACES = {Tier.DEVICE: "on the device", Tier.HOST: "in RAM", Tier.DISK: "on NVMe"}
LINK_WORDS = {
    "disk_read": "NVMe read",
    "disk_write": "NVMe written",
    "h2d": "to the device",
    "d2h": "from the device",
    "sent": "sent to other ranks",
    "received": "received from other ranks",
}
REST = "rest"  # of a step: data, the scheduler, what the loop logs and saves


class MemoryKind(enum.Enum):
    """What bytes are for; the values are the words of pictures."""

    PARAM = "parameters"
    GRAD = "gradients"
    OPTIM_STATE = "optimizer state"
    UPDATE = "buffers of updates"
    COPIES = "copies on their way"
    ACTIVATION = "activations"
    SPARE = "spare extents"  # of the file: second places of what is written
    OTHER = "other"


KIND_OF = {
    Account.PARAM: MemoryKind.PARAM,
    Account.GRAD: MemoryKind.GRAD,
    Account.OPTIM_STATE: MemoryKind.OPTIM_STATE,
    Account.BUFFER: MemoryKind.UPDATE,
    Account.GATHERED: MemoryKind.COPIES,
    Account.SHARD: MemoryKind.COPIES,
    Account.BUCKET: MemoryKind.COPIES,
    Account.GRAD_SLOT: MemoryKind.COPIES,
    Account.LINK: MemoryKind.COPIES,
    Account.ACTIVATION: MemoryKind.ACTIVATION,
    Account.FILE: MemoryKind.SPARE,
    Account.INIT: MemoryKind.OTHER,
    Account.UNMANAGED: MemoryKind.OTHER,
}


@dataclass(frozen=True)
class MemorySample:
    """Bytes held at one moment.

    Attributes:
        at_s: of time.perf_counter().
        managed_bytes: by tier and account, what hetero holds.
        budget_bytes: by tier, as it is then; None: no budget.
        beside_bytes: on a DEVICE that is not RAM, what else torch holds there.
        rss_bytes: of the whole process.
    """

    at_s: float
    managed_bytes: Mapping[Tier, Mapping[Account, int]]
    budget_bytes: Mapping[Tier, int | None]
    beside_bytes: int
    rss_bytes: int

    def total(self, tier: Tier) -> int:
        """What hetero holds of the tier."""
        return sum(self.managed_bytes[tier].values())

    @property
    def held_bytes(self) -> int:
        """The bytes of all tiers, of the process, and of torch on a DEVICE."""
        return sum(map(self.total, self.managed_bytes)) + self.beside_bytes + self.rss_bytes

    def by_kind(self, tier: Tier, on_disk: Mapping[MemoryKind, int]) -> dict[MemoryKind, int]:
        """total() by kind; the file of all homes on NVMe has `on_disk`, and the rest is spare."""
        found: Counter[MemoryKind] = Counter()
        for account, nbytes in self.managed_bytes[tier].items():
            if account is Account.FILE:
                left = nbytes
                for kind, part in on_disk.items():
                    found[kind] += min(left, part)
                    left -= min(left, part)
                nbytes = left
            found[KIND_OF[account]] += nbytes
        return {kind: found[kind] for kind in MemoryKind if found[kind]}


@dataclass(frozen=True)
class StepPoint:
    """Figures of a step.

    Attributes:
        last: its number, from 1.
        loss: None if none was told.
        seconds: in all.
        parts_s: of these, what forward, backward and optimizer took; the rest is the loop's.
        tokens: None if their number was not told.
        traffic_bytes: by LINKS.
        gather_wait_s: in which compute waited for parameters that other ranks hold.
        update_s, update_wait_s: in which updates were made, and in which they were waited for.
        samples: of memory: after each forward and backward, and after the optimizer.
        on_disk: bytes of homes on NVMe by kind then.
        grad_norm, lr: the norm is that before clipping, None without it or if not finite.

    Times and bytes are those of this rank, loss, norm and tokens of all ranks together. What is not
    forward, backward or optimizer is the data, the scheduler, the measuring itself, and a
    checkpoint that was saved since the step before.
    """

    last: int
    loss: float | None
    seconds: float
    parts_s: Mapping[str, float]
    tokens: int | None
    traffic_bytes: Mapping[str, int]
    gather_wait_s: float
    update_s: float
    update_wait_s: float
    samples: tuple[MemorySample, ...]
    on_disk: Mapping[MemoryKind, int]
    grad_norm: float | None = None
    lr: float | None = None

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all ranks; 0 if their number was not told."""
        return (self.tokens or 0) / self.seconds

    def as_dict(self, begin_s: float) -> dict[str, Any]:
        """The step as JSON takes it; times of samples are since `begin_s`."""
        names = ("tokens", "traffic_bytes", "gather_wait_s", "update_s", "update_wait_s")
        return {
            "step": self.last,
            **{name: getattr(self, name) for name in ("loss", "grad_norm", "lr")},
            "step_s": self.seconds,
            **{f"{name}_s": seconds for name, seconds in self.parts_s.items()},
            **{name: getattr(self, name) for name in names},
            "memory": [
                {
                    "time_s": sample.at_s - begin_s,
                    "managed_bytes": {tier.value: sample.total(tier) for tier in Tier},
                    "budget_bytes": {tier.value: sample.budget_bytes[tier] for tier in Tier},
                    "rss_bytes": sample.rss_bytes,
                }
                for sample in self.samples
            ],
            "tokens_per_s": self.tokens_per_s,
        }

    @property
    def held_bytes(self) -> int:
        """The most that was held at once, of all tiers together and by the process."""
        return max((sample.held_bytes for sample in self.samples), default=0)


def thinned(points: Sequence[StepPoint], most: int) -> list[StepPoint]:
    """No more than `most` points: the first and the last, and of some in a row between them the one
    that held most memory."""
    if len(points) <= most:
        return list(points)
    inner = points[1:-1]
    stride = -(-len(inner) // (most - 2))
    groups = (inner[i : i + stride] for i in range(0, len(inner), stride))
    return [points[0], *(max(some, key=lambda p: p.held_bytes) for some in groups), points[-1]]


class PointList:
    """The points of a run, however long: from time to time half of them go."""

    def __init__(self, most: int = 2048) -> None:
        """Keeps between half of `most` and `most` points of a long run."""
        self._most = most
        self._kept: list[StepPoint] = []
        self._newest: list[StepPoint] = []  # one of `_stride` of them will be kept
        self._stride = 1

    def add(self, step: StepPoint) -> None:
        """Takes the next step."""
        self._last = step
        self._newest.append(step)
        if len(self._newest) == self._stride:
            self._kept.append(max(self._newest, key=lambda p: p.held_bytes))
            self._newest.clear()
        if len(self._kept) == self._most:
            self._kept = thinned(self._kept, self._most // 2 + 1)
            self._stride *= 2

    @property
    def points(self) -> list[StepPoint]:
        """Those that are kept, in order, and the last one."""
        is_there = not self._kept or self._kept[-1] is self._last
        return [*self._kept, *([] if is_there else [self._last])]


@dataclass(frozen=True)
class RunFacts:
    """What is known of a run whatever its steps did.

    Attributes:
        title: what is trained, in a few words.
        params: elements of all parameters.
        plain_bytes: the model state that plain PyTorch in fp32 would hold where it computes.
        plain_tier: where that is.
        dtype: of parameters and compute.
        policy: the placement policy.
        ranks: how many train together; all bytes are of the first one.
        rows: more of what is known, as label and value, for tables.
        planned_steps: None: unknown.
        trained_params: elements of those that are not frozen; None: unknown.
        losses_are_means: over all ranks; else they are the first one's.
        process_bytes: limit of the whole process; None: it has none.
        chance_loss: of guessing, in the unit of the losses; None: unknown.
        budget_bytes: by the name of a tier, at the beginning; None: no limit.
        notes: fallbacks worth knowing.
        run_dir: the run folder of one of the commands' trainings; "" of others.
        about: what else summary.json has of it.
    """

    title: str
    params: int
    plain_bytes: int
    plain_tier: Tier
    dtype: str
    policy: str
    ranks: int = 1
    rows: tuple[tuple[str, str], ...] = ()
    losses_are_means: bool = False
    process_bytes: int | None = None
    chance_loss: float | None = None
    planned_steps: int | None = None
    trained_params: int | None = None
    budget_bytes: Mapping[str, int | None] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    run_dir: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class RunRecord:
    """A run, from its first step to its last; a Recorder completes it.

    Attributes:
        budget_bytes, peak_bytes: by tier; None: no budget.
        largest_budget_bytes: by tier, where the budget was larger for a time than at the end.
        built_bytes: by tier, the most before the first step, while the model was built or loaded.
        peak_rss_bytes: the most that the process ever held.
        homes: bytes by tier and kind of state at the end, as state_by_tier() has them.
        changes: of homes: after which step, and why.
        predicted: figures() of a step, and by what; None: nothing says how fast anything is.
        timeline: of a step or two near the end; None: none was recorded.
        status: how the run ended, in a few words; of the commands' trainings "finished",
            "interrupted", "terminated" or "failed".
        error: what ended it early; None: nothing did.
        notes: what is worth knowing beside.
        total_bytes: what all steps moved, by LINKS.
        peak_rss_by_rank_bytes: of all ranks of a run that finished; of the commands' trainings, as
            is what follows. Other bytes are this rank's.
        checkpoint, model_folder: the last one that was saved, and that of the trained weights.
        eval_losses: after which step, and the loss.
        failure: what raised `error`.
        timeline_path: of a trace of the timeline, if one was asked for.
    """

    facts: RunFacts
    points: list[StepPoint] = field(default_factory=list)
    budget_bytes: Mapping[Tier, int | None] = field(default_factory=lambda: dict.fromkeys(Tier))
    peak_bytes: Mapping[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))
    peak_rss_bytes: int = 0
    homes: Mapping[Tier, Mapping[str, int]] = field(default_factory=dict)
    changes: tuple[tuple[int, str], ...] = ()
    predicted: Mapping[str, Any] | None = None
    timeline: Timeline | None = None
    status: str = "finished"
    error: str | None = None
    notes: tuple[str, ...] = ()
    largest_budget_bytes: Mapping[Tier, int | None] = field(default_factory=dict)
    built_bytes: Mapping[Tier, int] = field(default_factory=dict)
    total_bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LINKS, 0))
    peak_rss_by_rank_bytes: list[int] = field(default_factory=list)
    checkpoint: str | None = None
    model_folder: str | None = None
    eval_losses: list[tuple[int, float]] = field(default_factory=list)
    failure: Exception | None = None
    timeline_path: str | None = None

    def largest_budget(self, tier: Tier) -> int | None:
        """What the tier's peak is compared with; None: there was no budget, or not always."""
        return self.largest_budget_bytes.get(tier, self.budget_bytes[tier])

    def limit_words(self, tier: Tier) -> str:
        """The budget of a tier, with what it was before if that was more."""
        now, largest = self.budget_bytes[tier], self.largest_budget(tier)
        if now is None or largest is None:
            return "no budget"
        later = f", {format_bytes(now)} at the end" if now != largest else ""
        return f"of a budget of {format_bytes(largest)}{later}"

    def peak_words(self, tier: Tier) -> str:
        """The most that a tier held. If that was before the first step, so are the words, and the
        most of the steps comes first, as their samples have it."""
        peak = format_bytes(self.peak_bytes[tier])
        samples = [sample.total(tier) for point in self.points for sample in point.samples]
        held = format_bytes(max(samples, default=0))
        if held == peak or self.built_bytes.get(tier, 0) < self.peak_bytes[tier]:
            return f"at most {peak}"
        return f"{held} in steps; before them at most {peak}"

    @property
    def passed_budgets(self) -> list[Tier]:
        """The tiers that have held more than any of their budgets."""
        return [
            tier
            for tier in Tier
            if (budget := self.largest_budget(tier)) is not None and self.peak_bytes[tier] > budget
        ]

    @property
    def steps(self) -> int:
        """How many were made."""
        return self.points[-1].last - self.points[0].last + 1 if self.points else 0

    @property
    def steady(self) -> list[StepPoint]:
        """The points without the first, which also touches memory for the first time.

        After homes have moved those that came then, without the first of them.
        """
        moved = max((step for step, _ in self.changes), default=0)
        return [p for p in self.points if p.last > moved + 1] or self.points[1:] or self.points

    @property
    def step_s(self) -> float:
        """The median of the steady steps."""
        return max(1e-9, statistics.median(point.seconds for point in self.steady))

    @property
    def part_s(self) -> dict[str, float]:
        """Medians of the steady steps of each of PARTS, and what is left of step_s as REST."""
        parts = {name: statistics.median(p.parts_s[name] for p in self.steady) for name in PARTS}
        return {**parts, REST: max(0.0, self.step_s - sum(parts.values()))}

    def mean(self, name: str) -> float:
        """A figure of StepPoint, or bytes on one of LINKS, of a steady step on average; 0 without
        steps."""
        found = [p.traffic_bytes[name] if name in LINKS else getattr(p, name) for p in self.steady]
        return float(sum(found)) / max(1, len(found))

    @property
    def measured_over_predicted(self) -> float | None:
        """The median step over what was predicted."""
        if self.predicted is None or not self.points or not self.predicted["step_s"]:
            return None
        return float(self.step_s / self.predicted["step_s"])

    def used_links(self, among: Sequence[str] = LINKS) -> list[str]:
        """Those of `among` that moved anything."""
        return [link for link in among if any(p.traffic_bytes[link] for p in self.points)]

    @property
    def loss_words(self) -> str:
        """The loss at the beginning and at the end; "" if none was told."""
        losses = [point.loss for point in self.points if point.loss is not None]
        if not losses:
            return ""
        # One batch says little about the next one.
        count = max(1, len(losses) // 10)
        first, last = statistics.fmean(losses[:count]), statistics.fmean(losses[-count:])
        means = f" (means of {count} steps)" if count > 1 else ""
        return f"at first {first:.4g}, at last {last:.4g}{means}"

    @property
    def tokens_per_s(self) -> float | None:
        """Of the steady steps."""
        if any(point.tokens is None for point in self.steady):
            return None
        seconds = sum(point.seconds for point in self.steady)
        return sum(point.tokens or 0 for point in self.steady) / seconds if seconds else None

    @property
    def speed(self) -> tuple[str, str]:
        """How many of which in a second: tokens, or steps where tokens were not counted."""
        if self.tokens_per_s is None:
            return f"{1 / self.step_s:.3g}", "steps"
        return f"{self.tokens_per_s:,.0f}", "tokens"

    @property
    def used_tiers(self) -> list[Tier]:
        """Those that held anything."""
        return [tier for tier in Tier if self.peak_bytes[tier]]

    @property
    def bytes_per_step(self) -> dict[str, int]:
        """Mean traffic of the steady steps."""
        return {link: round(self.mean(link)) for link in LINKS}

    @property
    def placement_words(self) -> str:
        """Where each kind of state is at the end, in bytes; "" if that is not known."""
        parts = []
        for kind in (MemoryKind.PARAM, MemoryKind.GRAD, MemoryKind.OPTIM_STATE):
            places = [
                f"{format_bytes(kinds[kind.name])} {TIER_PLACES[tier]}"
                for tier, kinds in self.homes.items()
                if kinds[kind.name]
            ]
            if places:
                parts.append(f"{kind.value} {' and '.join(places)}")
        return "; ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """The object that `--json` prints and summary.json holds; of each step that is kept."""
        facts, steps, moved = self.facts, self.points, self.bytes_per_step
        names = (
            *("params", "dtype", "policy", "budget_bytes"),
            *("run_dir", "ranks", "trained_params", "process_bytes"),
        )
        return {
            "model": facts.title,
            "state_bytes": facts.plain_bytes,
            **{name: getattr(facts, name) for name in names},
            **facts.about,
            "status": self.status,
            "checkpoint": self.checkpoint,
            "model_folder": self.model_folder,
            "error": self.error,
            "steps": self.steps,
            "step_numbers": [step.last for step in steps],
            "losses": [step.loss for step in steps],
            "eval_losses": [list(each) for each in self.eval_losses],
            "grad_norms": [step.grad_norm for step in steps],
            "step_s": [step.seconds for step in steps],
            **{f"{part}_s": [step.parts_s[part] for step in steps] for part in PARTS},
            "tokens_per_s": self.tokens_per_s or 0.0,
            "peak_managed_bytes": {tier.value: self.peak_bytes[tier] for tier in Tier},
            "peak_rss_bytes": self.peak_rss_bytes,
            "peak_rss_by_rank_bytes": self.peak_rss_by_rank_bytes or [self.peak_rss_bytes],
            "bytes_per_step": moved,
            "sent_bytes_per_step": moved["sent"],
            "received_bytes_per_step": moved["received"],
            **{
                f"{name}_per_step": self.mean(name)
                for name in ("gather_wait_s", "update_s", "update_wait_s")
            },
            "total_bytes": self.total_bytes,
            "placement": self.placement_words or None,
            "changes": [why for _, why in self.changes],
            "predicted": self.predicted,
            "measured_over_predicted": self.measured_over_predicted,
            "notes": list(self.notes),
            "timeline": self.timeline_path,
        }


def fact_rows(facts: RunFacts) -> list[tuple[str, str]]:
    """What of the table of a run is known before its first step: labels and values."""
    trained = "" if facts.trained_params is None else f", {facts.trained_params:,} trained"
    params = f"{facts.params:,} parameters{trained if facts.trained_params != facts.params else ''}"
    plain = f"{format_bytes(facts.plain_bytes)} {TIER_PLACES[facts.plain_tier]}"
    each = f"{facts.plain_bytes / facts.params:.3g} bytes per parameter"
    table = [
        ("model", f"{facts.title}, {params}"),
        ("plain PyTorch's model state", f"{plain} ({each})"),
        ("policy, compute", f"{facts.policy}, {facts.dtype}"),
        *facts.rows,
    ]
    if facts.ranks > 1:
        table.append(("ranks", f"{facts.ranks}; bytes are of rank 0"))
    return table


def rows(record: RunRecord) -> list[tuple[str, str]]:
    """The table of a run, on its page and in the terminal: label and value of every line, in order.

    The record has at least one step.
    """
    facts, table = record.facts, fact_rows(record.facts)
    for tier in record.used_tiers:
        peak = f"{record.peak_words(tier)}, {record.limit_words(tier)}"
        table.append((f"model state {TIER_PLACES[tier]}", peak))
    limit = facts.process_bytes
    of_limit = "" if limit is None else f", of process_memory {format_bytes(limit)}"
    peak = f"at most {format_bytes(record.peak_rss_bytes)}{of_limit}"
    last_step = record.points[-1].last
    planned = "" if facts.planned_steps is None else f" of {facts.planned_steps:,}"
    if last_step != record.steps:  # the run was resumed
        planned += f" ({record.steps:,} of them now)"
    error = "" if record.error is None else f": {record.error}"
    split = ", ".join(f"{name} {seconds:.3f}" for name, seconds in record.part_s.items())
    update_s, waited_s = record.mean("update_s"), record.mean("update_wait_s")
    saved = f"overlap saved {max(0.0, update_s - waited_s):.3f} s per step"
    table += [
        ("whole process (RSS)", peak),
        ("steps", f"{last_step:,}{planned}, {record.status}{error}"),
        ("step time, median", f"{record.step_s:.3f} s: {split}"),
        ("updates", f"{update_s:.3f} s per step, {waited_s:.3f} of them waited for: {saved}"),
    ]
    if placed := record.placement_words:
        table.append(("placement", placed))
    changes = [why for _, why in record.changes]
    table += [("placed again", why) for why in changes]
    table += [("note", note) for note in record.notes if note not in changes]
    if record.predicted is not None and record.predicted["step_s"]:
        predicted_s, ratio = record.predicted["step_s"], record.measured_over_predicted
        split = "; ".join(f"{name} {s:.3f}" for name, s in record.predicted["phases_s"].items())
        words = f"{predicted_s:.3f} s: {split}; bound by {record.predicted['bound']}; measured is"
        ways = [format_bytes(record.predicted[f"nvme_{way}_bytes"]) for way in ("read", "written")]
        nvme = f"NVMe read {ways[0]} and written {ways[1]}, of model state alone"
        table += [
            ("predicted", f"{words} {ratio:.2f} times as much"),
            ("predicted per step", nvme),
        ]
    rate, unit = record.speed
    table.append(("speed", f"{rate} {unit} per second"))
    if links := record.used_links():
        moved = (f"{LINK_WORDS[link]} {format_bytes(record.mean(link))}" for link in links)
        table.append(("moved per step", ", ".join(moved)))
    if facts.ranks > 1:
        waited = f"{record.mean('gather_wait_s'):.3f} s per step"
        table.append(("waited for other ranks' parameters", waited))
    if record.loss_words:
        whose = " (of rank 0)" if facts.ranks > 1 and not facts.losses_are_means else ""
        table.append(("loss", f"{record.loss_words}{whose}"))
    if facts.ranks > 1 and record.peak_rss_by_rank_bytes:
        rss = record.peak_rss_by_rank_bytes
        words = f"{format_bytes(sum(rss))}, at most {format_bytes(max(rss))} each"
        table.append(("peak RSS of all ranks", words))
    if record.eval_losses:
        step, best = min(record.eval_losses, key=lambda each: each[1])
        last = f"{record.eval_losses[-1][1]:.3f} at last"
        table.append(("evaluation loss", f"{best:.3f} at best, after step {step}, {last}"))
    left = {
        "report": facts.run_dir and f"{facts.run_dir}/report.html, for a browser",
        "checkpoint": record.checkpoint,
        "trained weights": record.model_folder,
        "timeline": record.timeline_path,
    }
    return table + [(label, path) for label, path in left.items() if path]
