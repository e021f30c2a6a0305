"""A discrete-event simulation of one training step of many ranks, in the agreed order.

Every rank computes one use after the other, and has a disk and a link of its own, which work on one
transfer after the other. A collective begins when the last of its ranks has issued it and the one
before it in its stream has ended; after its latency it moves its bytes. All-gathers and means of a
shard group that move bytes at the same time get half of the bandwidth each. Means over replicas
have other links, and begin when the last shard group is there.

Events are those of shard groups; what belongs to a rank is an array over the group's ranks. So a
collective is a few operations of numpy, however many ranks there are. The cost model
(hetero/planning/step_timeline.py) has the same seconds per transfer, and knows neither a rank that
is late, nor how two streams share links from one moment to the next, nor that buckets run out.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from bench.scaling.schedule import Schedule
from bench.scaling.stragglers import Seconds, Stragglers

_LINK_UP, _LINK_DOWN, _DISK = "link to device", "link to RAM", "NVMe"


@dataclass(frozen=True)
class SimulatedStep:
    """What came of it.

    Attributes:
        seconds: of the whole step, the agreement and the update at its end included.
        computing_s: by rank.
        ended_s: by rank, when it had computed and its gradients were home.
        gathered_s, averaged_s: when the last all-gather and the last mean of all ended.
    """

    seconds: float
    computing_s: Seconds
    ended_s: Seconds
    gathered_s: float
    averaged_s: float


def simulate(schedule: Schedule, stragglers: Stragglers | None = None) -> SimulatedStep:
    """One step from its first use; nothing is left over from a step before."""
    computing_s = (stragglers or Stragglers()).computing_s(schedule)
    return _Simulation(schedule, computing_s).run()


class _Clock:
    """What happens when, in order; of what happens at once, in the order in which it was told."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (max(time_s, self.now_s), self._count, action))

    def run(self) -> None:
        while self._events:
            self.now_s, _, action = heapq.heappop(self._events)
            action()


class _SharedLink:
    """Carries several collectives at once, each at an equal part of the bandwidth."""

    def __init__(self, clock: _Clock) -> None:
        self._clock = clock
        self._carried: list[tuple[list[float], Callable[[], None]]] = []  # seconds left, then what
        self._seen_s = 0.0
        self._changes = 0

    def carry(self, seconds: float, then: Callable[[], None]) -> None:
        """Does `then` when the link has carried what would take it `seconds` alone."""
        self._catch_up()
        self._carried.append(([seconds], then))
        self._expect_end()

    def _catch_up(self) -> None:
        if self._carried:
            done_s = (self._clock.now_s - self._seen_s) / len(self._carried)
            for left, _ in self._carried:
                left[0] -= done_s
        self._seen_s = self._clock.now_s

    def _expect_end(self) -> None:
        self._changes += 1
        if self._carried:
            least_s = max(0.0, min(left[0] for left, _ in self._carried))
            at_s = self._clock.now_s + least_s * len(self._carried)
            self._clock.at(at_s, partial(self._end, self._changes))

    def _end(self, change: int) -> None:
        if change != self._changes:  # another one has come meanwhile, so this is not the time
            return
        self._catch_up()
        first = min(range(len(self._carried)), key=lambda n: self._carried[n][0][0])
        _, then = self._carried.pop(first)
        self._expect_end()
        then()


class _Stream:
    """Collectives, one after the other, each not before its last rank has issued it."""

    def __init__(self, clock: _Clock) -> None:
        self._clock = clock
        self._waiting: deque[tuple[float, Callable[[], None]]] = deque()
        self._is_busy = False

    def issue(self, ready_s: float, begin: Callable[[], None]) -> None:
        self._waiting.append((ready_s, begin))
        self._next()

    def end(self) -> None:
        """The collective that it is busy with has ended."""
        self._is_busy = False
        self._next()

    def _next(self) -> None:
        if self._waiting and not self._is_busy:
            self._is_busy = True
            self._clock.at(*self._waiting.popleft())


class _Simulation:
    """All shard groups of a step."""

    def __init__(self, schedule: Schedule, computing_s: Seconds) -> None:
        self.schedule = schedule
        self.clock = _Clock()
        self._computing_s = computing_s
        ranks = schedule.shard_ranks
        self._groups = [
            _ShardGroup(self, computing_s[:, first : first + ranks])
            for first in range(0, schedule.ranks, ranks)
        ]
        self._arrived: dict[int, int] = {}  # shard groups that have made a mean, by its number

    def run(self) -> SimulatedStep:
        for group in self._groups:
            group.advance()
        self.clock.run()
        assert all(group.is_done for group in self._groups)
        ended_s = np.concatenate([group.ended_s for group in self._groups])
        return SimulatedStep(
            seconds=float(ended_s.max(initial=0.0)) + self.schedule.end_s,
            computing_s=self._computing_s.sum(axis=0),
            ended_s=ended_s,
            gathered_s=max(group.gathered_s for group in self._groups),
            averaged_s=max(group.averaged_s for group in self._groups),
        )

    def average_replicas(self, number: int) -> None:
        """One more shard group has its means of that chunk."""
        self._arrived[number] = self._arrived.get(number, 0) + 1
        if self._arrived[number] == len(self._groups):
            at_s = self.clock.now_s + self.schedule.means[number].replicas_s
            for group in self._groups:
                self.clock.at(at_s, partial(group.end_mean, number))


class _ShardGroup:
    """The ranks that share chunks; all times are arrays over them."""

    def __init__(self, simulation: _Simulation, computing_s: Seconds) -> None:
        self._simulation = simulation
        self._schedule, self._clock = simulation.schedule, simulation.clock
        self._computing_s = computing_s
        self._gathers, self._means = _Stream(self._clock), _Stream(self._clock)
        self._link = _SharedLink(self._clock)
        ranks = computing_s.shape[1]
        self._now_s = np.zeros(ranks)  # of compute
        self._free_s = {name: np.zeros(ranks) for name in (_LINK_UP, _LINK_DOWN, _DISK)}
        self._use = 0
        self._demanded = -1
        self._arrived_s: dict[int, Seconds] = {}  # gathers that are there and not yet used
        self._averaged_s: list[float] = []  # by mean
        self._home_s = np.zeros(ranks)
        self.gathered_s = self.averaged_s = 0.0

    @property
    def is_done(self) -> bool:
        """Whether all has been computed and averaged."""
        schedule = self._schedule
        averaged = len(self._averaged_s) == len(schedule.means)
        return self._use == len(schedule.uses) and averaged

    @property
    def ended_s(self) -> Seconds:
        """When each rank had computed, and its gradients were home."""
        return np.maximum(self._now_s, self._home_s)

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
            after = -1 if use.mean is None else means[use.mean].after
            if after >= len(self._averaged_s):
                return
            if use.gather is not None:
                self._now_s = np.maximum(self._now_s, self._arrived_s.pop(use.gather))
            if after >= 0:
                self._now_s = np.maximum(self._now_s, self._averaged_s[after])
            for number in use.prefetched:
                self._begin_gather(number)
            self._now_s = self._now_s + self._computing_s[self._use]
            self._use += 1
            if use.mean is not None:
                self._begin_mean(use.mean)

    def _begin_gather(self, number: int) -> None:
        gather = self._schedule.gathers[number]
        ready_s = self._move(_DISK, gather.disk_s, self._now_s)
        ready_s = self._move(_LINK_UP, gather.link_before_s, ready_s)
        if gather.cost is None:
            self._arrived_s[number] = self._move(_LINK_UP, gather.link_after_s, ready_s)
            return

        def end() -> None:
            self.gathered_s = self._clock.now_s
            self._gathers.end()
            at_s = np.full_like(ready_s, self._clock.now_s)
            self._arrived_s[number] = self._move(_LINK_UP, gather.link_after_s, at_s)
            self.advance()

        carry = partial(self._link.carry, gather.cost.transfer_s, end)
        latency_s = gather.cost.latency_s
        self._gathers.issue(
            float(ready_s.max()), lambda: self._clock.at(self._clock.now_s + latency_s, carry)
        )

    def _begin_mean(self, number: int) -> None:
        mean = self._schedule.means[number]
        ready_s = self._move(_LINK_DOWN, mean.link_before_s, self._now_s)
        if self._schedule.ranks == 1:
            self._come_home(number, ready_s)
            self._averaged_s.append(float(ready_s.max()))
            return

        end = partial(self._end_shard_mean, number)
        if mean.shard_cost is None:
            self._means.issue(float(ready_s.max()), end)
            return
        carry = partial(self._link.carry, mean.shard_cost.transfer_s, end)
        latency_s = mean.shard_cost.latency_s
        self._means.issue(
            float(ready_s.max()), lambda: self._clock.at(self._clock.now_s + latency_s, carry)
        )

    def _end_shard_mean(self, number: int) -> None:
        if self._schedule.replicas > 1:
            self._simulation.average_replicas(number)
        else:
            self.end_mean(number)

    def end_mean(self, number: int) -> None:
        """All ranks have the mean of their shards."""
        self.averaged_s = self._clock.now_s
        self._averaged_s.append(self._clock.now_s)
        self._come_home(number, np.full_like(self._now_s, self._clock.now_s))
        self._means.end()
        self.advance()

    def _come_home(self, number: int, ready_s: Seconds) -> None:
        mean = self._schedule.means[number]
        ready_s = self._move(_LINK_DOWN, mean.link_after_s, ready_s)
        self._home_s = np.maximum(self._home_s, self._move(_DISK, mean.disk_s, ready_s))

    def _move(self, resource: str, seconds: float, ready_s: Seconds) -> Seconds:
        """Keeps each rank's resource busy from when it is free and all is ready; when it ends."""
        if not seconds:
            return ready_s
        self._free_s[resource] = np.maximum(self._free_s[resource], ready_s) + seconds
        return self._free_s[resource]
