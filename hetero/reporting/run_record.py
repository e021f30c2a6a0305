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


def _no_budgets() -> dict[Tier, int | None]:
    return dict.fromkeys(Tier)


@dataclass
class RunRecord:
    """A run, from its first step to its last; a Recorder completes it.

    Attributes:
        budget_bytes, peak_bytes: by tier; None: no budget.
        largest_budget_bytes: by tier, where the budget was larger for a time than at the end.
        peak_rss_bytes: the most that the process ever held.
        homes: bytes by tier and kind of state at the end, as state_by_tier() has them.
        changes: of homes: after which step, and why.
        predicted: figures() of a step, and by what; None: nothing says how fast anything is.
        timeline: of a step or two near the end; None: none was recorded.
        status: how the run ended, in a few words.
        error: what ended it early; None: nothing did.
        notes: what is worth knowing beside.
    """

    facts: RunFacts
    points: list[StepPoint] = field(default_factory=list)
    budget_bytes: Mapping[Tier, int | None] = field(default_factory=_no_budgets)
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
