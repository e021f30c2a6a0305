"""Simulates one training step of many ranks, in the order that they agreed on.

Every rank computes one use after the other, and has a disk and a link of its own, which work on one
transfer after the other. A collective begins when the last of its ranks has issued it and the one
before it in its stream has ended; after its latency it moves its bytes. All-gathers and means of a
shard group share the links: who issued first moves first, and the other one whenever the links are
free. Means over replicas have other links, and begin when the last shard group is there.

As all ranks issue collectives in one order, times follow from each other in that order, and no
queue of events is needed; what belongs to a rank is an array over a group's ranks. The cost model
(hetero/planning/step_problem.py) has the same seconds per transfer, and knows neither a rank that
is late, nor how two streams share links from one moment to the next, nor that buckets run out.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hetero.planning.collective_cost import CollectiveCost

Seconds = npt.NDArray[np.float64]


class Collective(NamedTuple):
    """A chunk's all-gather, or the mean of its gradient, and its way there and away."""

    cost: CollectiveCost  # of the ranks that share the chunk
    before: tuple[tuple[str, float], ...] = ()  # seconds of each rank's link or disk, in order
    after: tuple[tuple[str, float], ...] = ()
    replicas_s: float = 0.0  # of the mean over replicas, which follows
    bucket: int = -1  # the mean at whose end there is room for this one's gradient; -1: there is


class Use(NamedTuple):
    """Forward or backward of one chunk."""

    computing_s: float  # on a rank that nothing disturbs
    gather: int | None = None  # which it waits for; None if the chunk is there
    demanded: tuple[int, ...] = ()  # gathers that begin before it waits
    prefetched: tuple[int, ...] = ()  # gathers that begin when it computes
    mean: int | None = None  # which it is followed by


@dataclass(frozen=True)
class Schedule:
    """A step of `replicas` groups of `shard_ranks` ranks, two or more, which share its chunks.

    All-gathers and means have an order each. `end_s` is what comes when all ranks are there: they
    agree on the step, and update.
    """

    uses: tuple[Use, ...]
    gathers: tuple[Collective, ...]
    means: tuple[Collective, ...]
    shard_ranks: int
    replicas: int
    end_s: float

    @property
    def computing_s(self) -> float:
        """Seconds that a rank computes which nothing disturbs."""
        return sum(use.computing_s for use in self.uses)


def disturbed_s(
    schedule: Schedule,
    slower: float = 0.0,
    jitter: float = 0.0,
    stall_s: float = 0.0,
    seed: int = 0,
) -> Seconds:
    """Seconds of compute by use and rank.

    The first rank is slower than the others by a share, always; each use on each rank varies by the
    share `jitter`, its standard deviation, never below zero; and the last rank stands still once,
    in the middle of backward.
    """
    alone = np.array([use.computing_s for use in schedule.uses])
    found = np.repeat(alone[:, None], schedule.shard_ranks * schedule.replicas, axis=1)
    if jitter:
        random = np.random.default_rng(seed)
        found *= np.maximum(0.0, 1 + jitter * random.standard_normal(found.shape))
    found[:, 0] *= 1 + slower
    found[len(found) * 3 // 4, -1] += stall_s
    return found


def simulate(schedule: Schedule, computing_s: Seconds | None = None) -> float:
    """Seconds of one step from its first use, its end included; by default nothing is disturbed."""
    computing_s = disturbed_s(schedule) if computing_s is None else computing_s
    groups = [_ShardGroup(schedule) for _ in range(schedule.replicas)]
    averaged_s: list[float] = []  # by mean
    for use, seconds in zip(schedule.uses, computing_s, strict=True):
        for group, own_s in zip(groups, np.split(seconds, schedule.replicas), strict=True):
            group.compute(use, own_s, averaged_s)
        if use.mean is not None:
            mean = schedule.means[use.mean]
            averaged_s.append(max(group.average(mean) for group in groups) + mean.replicas_s)
            for group in groups:
                group.end_mean(mean, averaged_s[-1])
    return max(group.ended_s() for group in groups) + schedule.end_s


class _ShardGroup:
    """The ranks that share chunks; times are arrays over them."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._now_s = np.zeros(schedule.shard_ranks)  # of compute
        self._free_s: defaultdict[str, Seconds]  # by resource
        self._free_s = defaultdict(lambda: np.zeros(schedule.shard_ranks))
        self._links_busy_s: list[tuple[float, float]] = []  # from and to, in order
        self._gathers_end_s = self._means_end_s = 0.0  # of the streams' last
        self._arrived_s: dict[int, Seconds] = {}  # gathers that are not yet used
        self._on_their_way: deque[tuple[Collective, float]] = deque()  # means, and their ends
        self._home_s = np.zeros(schedule.shard_ranks)  # of gradients

    def compute(self, use: Use, seconds: Seconds, averaged_s: list[float]) -> None:
        """Computes when its chunk has arrived and a bucket is free."""
        for number in use.demanded:
            self._gather(number)
        if use.gather is not None:
            self._now_s = np.maximum(self._now_s, self._arrived_s.pop(use.gather))
        bucket = -1 if use.mean is None else self._schedule.means[use.mean].bucket
        if bucket >= 0:
            self._now_s = np.maximum(self._now_s, averaged_s[bucket])
        for number in use.prefetched:
            self._gather(number)
        self._now_s = self._now_s + seconds

    def _gather(self, number: int) -> None:
        gather = self._schedule.gathers[number]
        self._bring_home(float(self._now_s.max()))  # what comes first has the disk first
        ready_s = float(self._move(gather.before, self._now_s).max())
        self._gathers_end_s = self._carry(max(ready_s, self._gathers_end_s), gather.cost)
        there_s = np.full_like(self._now_s, self._gathers_end_s)
        self._arrived_s[number] = self._move(gather.after, there_s)

    def average(self, mean: Collective) -> float:
        """When the group's ranks have the mean of their shards."""
        ready_s = float(self._move(mean.before, self._now_s).max())
        return self._carry(max(ready_s, self._means_end_s), mean.cost)

    def end_mean(self, mean: Collective, end_s: float) -> None:
        """All replicas have the mean at `end_s`, and it goes home."""
        self._means_end_s = end_s
        self._on_their_way.append((mean, end_s))

    def ended_s(self) -> float:
        """When the last rank had computed, and its gradients were home."""
        self._bring_home(np.inf)
        return float(np.maximum(self._now_s, self._home_s).max())

    def _bring_home(self, until_s: float) -> None:
        while self._on_their_way and self._on_their_way[0][1] <= until_s:
            mean, end_s = self._on_their_way.popleft()
            home_s = self._move(mean.after, np.full_like(self._now_s, end_s))
            self._home_s = np.maximum(self._home_s, home_s)

    def _move(self, parts: tuple[tuple[str, float], ...], ready_s: Seconds) -> Seconds:
        """Keeps each rank's resources busy from when they are free and all is ready; the end."""
        for resource, seconds in parts:
            ready_s = np.maximum(self._free_s[resource], ready_s) + seconds
            self._free_s[resource] = ready_s
        return ready_s

    def _carry(self, begin_s: float, cost: CollectiveCost) -> float:
        """Moves a collective's bytes after its latency, whenever the links are free; the end."""
        begin_s += cost.latency_s
        end_s, left_s = begin_s, cost.transfer_s
        now_s = float(self._now_s.max())  # none begins earlier any more
        known = [each for each in self._links_busy_s if each[1] > now_s]
        before = [each for each in known if each[1] <= begin_s]
        later = known[len(before) :]
        while later and later[0][0] < end_s + left_s:
            from_s, to_s = later.pop(0)
            left_s -= max(0.0, from_s - end_s)
            begin_s, end_s = min(begin_s, from_s), to_s
        end_s += left_s
        self._links_busy_s = [*before, (begin_s, end_s), *later]
        return end_s
