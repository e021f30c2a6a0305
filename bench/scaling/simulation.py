"""A discrete-event simulation of one training step of many ranks, in the order that they agreed on.

Every rank computes one use after the other, and has a disk and a link of its own, which work on one
transfer after the other. A collective begins when the last of its ranks has issued it and the one
before it in its stream has ended; after its latency it moves its bytes. All-gathers and means of a
shard group that move bytes at the same time get half of the bandwidth each. Means over replicas
have other links, and begin when the last shard group is there.

Events are those of shard groups; what belongs to a rank is an array over the group's ranks. So a
collective is a few operations of numpy, however many ranks there are. The cost model
(hetero/planning/step_problem.py) has the same seconds per transfer, and knows neither a rank that
is late, nor how two streams share links from one moment to the next, nor that buckets run out.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hetero.planning.collective_cost import CollectiveCost

Seconds = npt.NDArray[np.float64]
UP, DOWN, DISK = "link to device", "link to RAM", "NVMe"


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
    clock = _Clock()
    arrived: defaultdict[int, int] = defaultdict(int)  # shard groups that have made a mean
    count = schedule.shard_ranks

    def meet(number: int) -> None:
        """A shard group has its mean of that number: the last one begins that over replicas."""
        arrived[number] += 1
        if arrived[number] == len(groups):
            for group in groups:
                clock.at(clock.now_s + schedule.means[number].replicas_s, group.end_mean, number)

    groups = [
        _ShardGroup(schedule, computing_s[:, first : first + count], clock, meet)
        for first in range(0, count * schedule.replicas, count)
    ]
    for group in groups:
        group.advance()
    clock.run()
    return max(group.ended_s() for group in groups) + schedule.end_s


class _Clock:
    """What happens when, in order; of what happens at once, in the order in which it was told."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, time_s: float, action: Callable[..., None], *given: object) -> None:
        self._count += 1
        then: Callable[[], None] = partial(action, *given)
        heapq.heappush(self._events, (max(time_s, self.now_s), self._count, then))

    def run(self) -> None:
        while self._events:
            self.now_s, _, action = heapq.heappop(self._events)
            action()


class _Network:
    """A shard group's streams of collectives, which share the links."""

    def __init__(self, clock: _Clock) -> None:
        self._clock = clock
        self._waiting: defaultdict[str, deque[tuple[float, CollectiveCost, Callable[[], None]]]]
        self._waiting = defaultdict(deque)
        self._busy: set[str] = set()
        self._carried: dict[str, tuple[float, Callable[[], None]]] = {}  # seconds left, then what
        self._seen_s = 0.0
        self._changes = 0

    def issue(
        self, stream: str, ready_s: float, cost: CollectiveCost, then: Callable[[], None]
    ) -> None:
        """Does `then` when a collective has ended, which all have issued at `ready_s`."""
        self._waiting[stream].append((ready_s, cost, then))
        self._next(stream)

    def end(self, stream: str) -> None:
        """The stream's next one can begin."""
        self._busy.remove(stream)
        self._next(stream)

    def _next(self, stream: str) -> None:
        if self._waiting[stream] and stream not in self._busy:
            self._busy.add(stream)
            ready_s, cost, then = self._waiting[stream].popleft()
            begin_s = max(ready_s, self._clock.now_s) + cost.latency_s
            self._clock.at(begin_s, self._carry, stream, cost.transfer_s, then)

    def _carry(self, stream: str, seconds: float, then: Callable[[], None]) -> None:
        self._catch_up()
        self._carried[stream] = seconds, then
        self._expect_end()

    def _catch_up(self) -> None:
        done_s = (self._clock.now_s - self._seen_s) / max(1, len(self._carried))
        self._carried = {name: (s - done_s, then) for name, (s, then) in self._carried.items()}
        self._seen_s = self._clock.now_s

    def _expect_end(self) -> None:
        self._changes += 1
        if self._carried:
            stream, (left_s, _) = min(self._carried.items(), key=lambda each: each[1][0])
            at_s = self._clock.now_s + max(0.0, left_s) * len(self._carried)
            self._clock.at(at_s, self._end, self._changes, stream)

    def _end(self, change: int, stream: str) -> None:
        if change != self._changes:  # another one has come meanwhile, so this is not the time
            return
        self._catch_up()
        _, then = self._carried.pop(stream)
        self._expect_end()
        then()


class _ShardGroup:
    """The ranks that share chunks; all times are arrays over them."""

    def __init__(
        self, schedule: Schedule, computing_s: Seconds, clock: _Clock, meet: Callable[[int], None]
    ) -> None:
        self._schedule, self._clock, self._meet = schedule, clock, meet
        self._computing_s = computing_s
        self._network = _Network(clock)
        self._now_s = np.zeros(computing_s.shape[1])  # of compute
        self._home_s = np.zeros_like(self._now_s)  # of gradients
        self._free_s = {name: np.zeros_like(self._now_s) for name in (UP, DOWN, DISK)}
        self._use = 0
        self._demanded = -1
        self._arrived_s: dict[int, Seconds] = {}  # gathers that are there and not yet used
        self._averaged_s: list[float] = []  # by mean

    def ended_s(self) -> float:
        """When the last rank had computed, and its gradients were home."""
        assert self._use == len(self._schedule.uses)
        assert len(self._averaged_s) == len(self._schedule.means)
        return float(np.maximum(self._now_s, self._home_s).max())

    def advance(self) -> None:
        """Computes as far as gathers have arrived and buckets are free."""
        uses, means = self._schedule.uses, self._schedule.means
        while self._use < len(uses):
            use = uses[self._use]
            if self._demanded < self._use:
                self._demanded = self._use
                for number in use.demanded:
                    self._begin_gather(number)
            if use.gather is not None and use.gather not in self._arrived_s:
                return
            bucket = -1 if use.mean is None else means[use.mean].bucket
            if bucket >= len(self._averaged_s):
                return
            if use.gather is not None:
                self._now_s = np.maximum(self._now_s, self._arrived_s.pop(use.gather))
            if bucket >= 0:
                self._now_s = np.maximum(self._now_s, self._averaged_s[bucket])
            for number in use.prefetched:
                self._begin_gather(number)
            self._now_s = self._now_s + self._computing_s[self._use]
            self._use += 1
            if use.mean is not None:
                mean = means[use.mean]
                ready_s = self._move(mean.before, self._now_s).max()
                then = self._meet if self._schedule.replicas > 1 else self.end_mean
                self._network.issue("means", ready_s, mean.cost, partial(then, use.mean))

    def _begin_gather(self, number: int) -> None:
        gather = self._schedule.gathers[number]
        ready_s = self._move(gather.before, self._now_s).max()
        self._network.issue("gathers", ready_s, gather.cost, partial(self._end_gather, number))

    def _end_gather(self, number: int) -> None:
        self._network.end("gathers")
        there_s = np.full_like(self._now_s, self._clock.now_s)
        self._arrived_s[number] = self._move(self._schedule.gathers[number].after, there_s)
        self.advance()

    def end_mean(self, number: int) -> None:
        """All ranks have the mean of their shards."""
        self._averaged_s.append(self._clock.now_s)
        there_s = np.full_like(self._now_s, self._clock.now_s)
        home_s = self._move(self._schedule.means[number].after, there_s)
        self._home_s = np.maximum(self._home_s, home_s)
        self._network.end("means")
        self.advance()

    def _move(self, parts: tuple[tuple[str, float], ...], ready_s: Seconds) -> Seconds:
        """Keeps each rank's resources busy from when they are free and all is ready; the end."""
        for resource, seconds in parts:
            ready_s = np.maximum(self._free_s[resource], ready_s) + seconds
            self._free_s[resource] = ready_s
        return ready_s
