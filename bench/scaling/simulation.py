"""A discrete-event simulation of one training step of many ranks, in the order that they agreed on.

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
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from hetero.overlap import OverlapUpdates
from hetero.planning.belady import PREFETCH_CHUNKS, step_fetches
from hetero.planning.collective_cost import CollectiveCost, agreement_s
from hetero.planning.placement import Placement, SlotBytes
from hetero.planning.step_cost import CostModel
from hetero.planning.step_timeline import Collectives, Problem, disk_rates
from hetero.planning.trace import use_order
from offload.memory.tiers import Tier

Seconds = npt.NDArray[np.float64]
_UP, _DOWN, _DISK = "link to device", "link to RAM", "NVMe"


@dataclass(frozen=True)
class Collective:
    """A chunk's all-gather, or the mean of its gradient, and its way there and away.

    Attributes:
        cost: of the collective of the ranks that share the chunk.
        before, after: seconds of each rank's link or disk, in order.
        replicas_s: of the mean over replicas, which follows.
        bucket: of a mean, the mean at whose end there is room for its gradient; -1: there is.
    """

    cost: CollectiveCost
    before: tuple[tuple[str, float], ...] = ()
    after: tuple[tuple[str, float], ...] = ()
    replicas_s: float = 0.0
    bucket: int = -1


@dataclass(frozen=True)
class Use:
    """Forward or backward of one chunk.

    Attributes:
        computing_s: on a rank that nothing disturbs.
        gather: which it waits for; None if the chunk is there.
        demanded: gathers that begin before it waits.
        prefetched: gathers that begin when it computes.
        mean: which it is followed by.
    """

    computing_s: float
    gather: int | None = None
    demanded: tuple[int, ...] = ()
    prefetched: tuple[int, ...] = ()
    mean: int | None = None


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
    def ranks(self) -> int:
        """All ranks."""
        return self.shard_ranks * self.replicas

    @property
    def computing_s(self) -> float:
        """Seconds that a rank computes which nothing disturbs."""
        return sum(use.computing_s for use in self.uses)


def schedule_of(problem: Problem, made: Placement) -> Schedule:
    """The step that `problem` is under the placement `made` of its chunks.

    Raises ValueError for what is not simulated: one rank, other stages than 3, updates that overlap
    with compute, and shard groups that share adapters with replicas.
    """
    shard, network = problem.layout.shard, problem.network
    if network is None or not (shard.ranks > 1 and shard.grads and shard.params):
        raise ValueError("only stage 3 is simulated: all ranks share parameters and gradients")
    if problem.overlap is not OverlapUpdates.NONE:
        raise ValueError("updates that overlap with compute are not simulated")
    if shard.replicas > 1 and shard.ranks > network.local_ranks:
        raise ValueError("replicas of several machines each are not simulated")
    order, trace = use_order(problem.layout), problem.trace
    numel = {c.id: sum(s.param.numel for s in c.slices) for c in problem.layout.chunks}
    chunks = {chunk.id: chunk for chunk in problem.layout.chunks}
    gathered = CostModel(problem).gathered(made)
    step = [(chunk, False) for chunk in order] + [(chunk, True) for chunk in reversed(order)]
    step *= trace.micro_batches
    fetched = [chunk for chunk, _ in step if chunk in gathered]
    gathers: list[Collective] = []
    of_use: dict[int, int] = {}
    demanded: defaultdict[int, list[int]] = defaultdict(list)
    prefetched: defaultdict[int, list[int]] = defaultdict(list)
    begin = 0
    for number, fetch in enumerate(step_fetches(fetched, problem.layout, made.gathered_slots)):
        gathers.append(_gather(problem, made, fetched[fetch.use], chunks[fetched[fetch.use]].slots))
        of_use[fetch.use] = number
        # Gathers begin in the order of their uses, each when it is near and its room is free.
        ahead = PREFETCH_CHUNKS if problem.prefetch else 0
        begin = min(fetch.use, max(begin, fetch.use - ahead, fetch.after + 1))
        (prefetched if begin < fetch.use else demanded)[begin].append(number)
    uses: list[Use] = []
    means: list[Collective] = []
    buckets: list[int] = []  # slots of each mean's gradient
    use = 0  # of a gathered chunk
    for chunk, backward in step:
        mean = None
        if backward and chunks[chunk].trainable:
            mean = len(means)
            buckets.append(chunks[chunk].slots)
            first = len(uses) < 2 * len(order)
            made_mean = _mean(problem, made, chunk, buckets[-1], numel[chunk], first)
            means.append(replace(made_mean, bucket=_bucket(buckets, made.bucket_slots)))
        whole_s = trace.backward_s if backward else trace.forward_s
        computing_s = whole_s * numel[chunk] / problem.layout.numel / trace.micro_batches
        if chunk in gathered:
            begins = tuple(demanded[use]), tuple(prefetched[use])
            uses.append(Use(computing_s, of_use.get(use), *begins, mean))
            use += 1
        else:
            uses.append(Use(computing_s, mean=mean))
    update_s = CostModel(replace(problem, network=None)).cost(made).phases[-1].seconds
    end_s = update_s + agreement_s(network)
    return Schedule(tuple(uses), tuple(gathers), tuple(means), shard.ranks, shard.replicas, end_s)


def _bucket(taken: list[int], slots: int) -> int:
    """The last mean that must have ended before the newest of `taken` has room; first come, first
    served. -1 if there is room; no `slots` are no limit."""
    for mean in range(len(taken) - 1, -1, -1) if slots else ():
        slots -= taken[mean]
        if slots < 0:
            return mean
    return -1


def _gather(problem: Problem, made: Placement, chunk: int, slots: int) -> Collective:
    """The chunk's way into its slot; the link comes first if collectives are between devices."""
    assert problem.network is not None
    slot, rates = SlotBytes.of(problem.layout, problem.dtypes), problem.profile
    home, first = made.param[chunk], problem.network.between_devices
    disk = [(_DISK, slots * slot.param / disk_rates(rates, False)[0])] * (home is Tier.DISK)
    link = []
    if home is not Tier.DEVICE and rates.h2d_bytes_per_s is not None:
        link = [(_UP, slots * (slot.param if first else slot.gathered) / rates.h2d_bytes_per_s)]
    cost = Collectives(problem).gather(slots)
    return Collective(cost, tuple(disk + link * first), tuple(link * (not first)))


def _mean(
    problem: Problem, made: Placement, chunk: int, slots: int, numel: int, first: bool
) -> Collective:
    """The gradient's way home; the first of a step is not added to what is there."""
    assert problem.network is not None
    slot, rates = SlotBytes.of(problem.layout, problem.dtypes), problem.profile
    home, last = made.grad[chunk], problem.network.between_devices
    cost, *over_replicas = Collectives(problem).mean(slots)
    link, disk = [], []
    if home is not Tier.DEVICE and rates.d2h_bytes_per_s is not None:
        nbytes = slots * slot.grad if last else numel * problem.dtypes.param_bytes
        link = [(_DOWN, nbytes / rates.d2h_bytes_per_s)]
    if home is Tier.DISK:
        reading, writing = disk_rates(rates, True)
        disk = [(_DISK, slots * slot.grad * (1 / writing + (0.0 if first else 1 / reading)))]
    replicas_s = sum(each.seconds for each in over_replicas)
    return Collective(cost, tuple(link * (not last)), tuple(link * last + disk), replicas_s)


@dataclass(frozen=True)
class Stragglers:
    """Disturbances of compute; none by default.

    Attributes:
        jitter: standard deviation of each use on each rank, as a share of it; normally distributed,
            and never below zero.
        slower: by which share one rank is slower than the others, always.
        stall_s: for which one rank stands still once, in the middle of backward.
        seed: of the random numbers.
    """

    jitter: float = 0.0
    slower: float = 0.0
    stall_s: float = 0.0
    seed: int = 0

    def computing_s(self, schedule: Schedule) -> Seconds:
        """Seconds by use and rank. The slower rank is the first, the one that stalls the last."""
        alone = np.array([use.computing_s for use in schedule.uses])
        found = np.repeat(alone[:, None], schedule.ranks, axis=1)
        if self.jitter:
            random = np.random.default_rng(self.seed)
            found *= np.maximum(0.0, 1 + self.jitter * random.standard_normal(found.shape))
        found[:, 0] *= 1 + self.slower
        found[len(found) * 3 // 4, -1] += self.stall_s
        return found


def simulate(schedule: Schedule, stragglers: Stragglers | None = None) -> float:
    """Seconds of one step from its first use, its end included."""
    computing_s = (stragglers or Stragglers()).computing_s(schedule)
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
        for first in range(0, schedule.ranks, count)
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
        for stream, (left_s, then) in self._carried.items():
            done_s = (self._clock.now_s - self._seen_s) / len(self._carried)
            self._carried[stream] = left_s - done_s, then
        self._seen_s = self._clock.now_s

    def _expect_end(self) -> None:
        self._changes += 1
        if self._carried:
            least_s = max(0.0, min(left_s for left_s, _ in self._carried.values()))
            at_s = self._clock.now_s + least_s * len(self._carried)
            self._clock.at(at_s, self._end, self._changes)

    def _end(self, change: int) -> None:
        if change != self._changes:  # another one has come meanwhile, so this is not the time
            return
        self._catch_up()
        _, then = self._carried.pop(min(self._carried, key=lambda each: self._carried[each][0]))
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
        self._free_s = {name: np.zeros_like(self._now_s) for name in (_UP, _DOWN, _DISK)}
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
