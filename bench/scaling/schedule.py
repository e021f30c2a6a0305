"""The order of one training step on which all ranks have agreed, and what each part of it takes.

Two streams of collectives, all-gathers and gradient means, have an order each; uses of chunks begin
the one and are followed by the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetero.overlap import OverlapUpdates
from hetero.planning.belady import PREFETCH_CHUNKS, step_fetches
from hetero.planning.collective_cost import CollectiveCost, agreement_s
from hetero.planning.placement import Placement, SlotBytes
from hetero.planning.step_cost import CostModel
from hetero.planning.step_timeline import Collectives, Problem, disk_rates
from hetero.planning.trace import use_order
from offload.memory.tiers import Tier


@dataclass(frozen=True)
class Gather:
    """A chunk's way into its slot: seconds on each rank's disk and link, and of the all-gather.

    The link is before the all-gather if that is between devices, else after it. `cost` is None on
    a rank that has its chunks alone.
    """

    disk_s: float
    link_before_s: float
    cost: CollectiveCost | None
    link_after_s: float


@dataclass(frozen=True)
class Mean:
    """A chunk's gradient on its way home; seconds as Gather has them.

    Attributes:
        after: the mean at whose end its bucket is free; -1 if one is free at once.
        shard_cost: of the mean over the ranks that share the chunk; None if there is one.
        replicas_s: of the mean over their replicas.
    """

    after: int
    link_before_s: float
    shard_cost: CollectiveCost | None
    replicas_s: float
    link_after_s: float
    disk_s: float


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
    gather: int | None
    demanded: tuple[int, ...]
    prefetched: tuple[int, ...]
    mean: int | None


@dataclass(frozen=True)
class Schedule:
    """A step of `replicas` groups of `shard_ranks` ranks, which share its chunks.

    `end_s` is what comes when all ranks are there: they agree on the step, and update.
    """

    uses: tuple[Use, ...]
    gathers: tuple[Gather, ...]
    means: tuple[Mean, ...]
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


def schedule_of(
    problem: Problem, made: Placement, prefetch_chunks: int = PREFETCH_CHUNKS
) -> Schedule:
    """The step that `problem` is under the placement `made`.

    Args:
        problem: stage 3, and updates that overlap with nothing.
        made: of its chunks.
        prefetch_chunks: how many uses ahead of its own a gather may begin.

    Raises:
        ValueError: for other problems, or for shard groups that share adapters with replicas.
    """
    _check(problem)
    order = use_order(problem.layout)
    gathered = CostModel(problem).gathered(made)
    chunk_of_use: list[tuple[int, bool]] = []
    for _ in range(problem.trace.micro_batches):
        chunk_of_use += [(chunk, False) for chunk in order]
        chunk_of_use += [(chunk, True) for chunk in reversed(order)]
    costs = _Costs(problem, made)
    of_slots = [number for number, (chunk, _) in enumerate(chunk_of_use) if chunk in gathered]
    begins = _Begins(problem, made, [chunk_of_use[n][0] for n in of_slots], prefetch_chunks)
    gathers = tuple(costs.gather(chunk) for chunk in begins.chunks)
    uses: list[Use] = []
    means: list[Mean] = []
    buckets = _Buckets(made.bucket_slots)
    number = 0  # of the next use of a gathered chunk
    for chunk, backward in chunk_of_use:
        mean = None
        if backward and costs.is_trained(chunk):
            mean = len(means)
            after = buckets.mean_before(costs.slots(chunk))
            means.append(costs.mean(chunk, after, first=len(uses) < 2 * len(order)))
        computing_s = costs.computing_s(chunk, backward)
        if chunk in gathered:
            uses.append(
                Use(
                    computing_s,
                    begins.gather_of_use.get(number),
                    tuple(begins.demanded[number]),
                    tuple(begins.prefetched[number]),
                    mean,
                )
            )
            number += 1
        else:
            uses.append(Use(computing_s, None, (), (), mean))
    shard = problem.layout.shard
    return Schedule(
        tuple(uses), gathers, tuple(means), shard.ranks, shard.replicas, _end_s(problem, made)
    )


def _check(problem: Problem) -> None:
    shard, network = problem.layout.shard, problem.network
    if not (shard.grads and shard.params):
        raise ValueError("only stage 3 is simulated: all ranks share parameters and gradients")
    if problem.overlap is not OverlapUpdates.NONE:
        raise ValueError("updates that overlap with compute are not simulated")
    if network is not None and shard.replicas > 1 and shard.ranks > network.local_ranks:
        raise ValueError("replicas of several machines each are not simulated")


def _end_s(problem: Problem, made: Placement) -> float:
    """The agreement and the update of one rank, which all make at the same time."""
    update = CostModel(replace(problem, network=None)).cost(made).phases[-1].seconds
    return update + (0.0 if problem.network is None else agreement_s(problem.network))


class _Begins:
    """Which gathers there are, and at which uses of gathered chunks each of them begins."""

    def __init__(
        self, problem: Problem, made: Placement, chunks: Sequence[int], prefetch_chunks: int
    ) -> None:
        self.chunks: list[int] = []
        self.gather_of_use: dict[int, int] = {}
        self.demanded: defaultdict[int, list[int]] = defaultdict(list)
        self.prefetched: defaultdict[int, list[int]] = defaultdict(list)
        ahead = prefetch_chunks if problem.prefetch else 0
        begin = 0
        planned = step_fetches(chunks, problem.layout, made.gathered_slots)
        for gather, fetch in enumerate(planned):
            self.chunks.append(chunks[fetch.use])
            self.gather_of_use[fetch.use] = gather
            # Gathers begin in the order of their uses, each when it is near and its room is free.
            begin = max(begin, fetch.use - ahead, fetch.after + 1)
            if begin < fetch.use:
                self.prefetched[begin].append(gather)
            else:
                begin = fetch.use
                self.demanded[begin].append(gather)


class _Buckets:
    """Room for gradients that wait for their mean, or are in it: first come, first served."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._taken: list[int] = []  # by mean

    def mean_before(self, slots: int) -> int:
        """The last mean that must have ended before the next one, of so many slots, has room."""
        self._taken.append(slots)
        room = self._slots
        if room:
            for mean in range(len(self._taken) - 1, -1, -1):
                room -= self._taken[mean]
                if room < 0:
                    return mean
        return -1


class _Costs:
    """Seconds of what happens to a chunk."""

    def __init__(self, problem: Problem, made: Placement) -> None:
        self._problem = problem
        self._made = made
        self._slot = SlotBytes.of(problem.layout, problem.dtypes)
        self._chunks = {chunk.id: chunk for chunk in problem.layout.chunks}
        self._numel = {c.id: sum(s.param.numel for s in c.slices) for c in problem.layout.chunks}
        self._collectives = Collectives(problem)
        self._between_devices = problem.network is not None and problem.network.between_devices
        self._several = problem.layout.shard.ranks > 1

    def slots(self, chunk: int) -> int:
        return self._chunks[chunk].slots

    def is_trained(self, chunk: int) -> bool:
        return self._chunks[chunk].trainable

    def computing_s(self, chunk: int, backward: bool) -> float:
        trace = self._problem.trace
        seconds = trace.backward_s if backward else trace.forward_s
        share = self._numel[chunk] / self._problem.layout.numel
        return seconds * share / trace.micro_batches

    def gather(self, chunk: int) -> Gather:
        slots, home, rates = self.slots(chunk), self._made.param[chunk], self._problem.profile
        disk_s = link_s = 0.0
        if home is Tier.DISK:
            disk_s = slots * self._slot.param / disk_rates(rates, False)[0]
        before = self._several and self._between_devices
        if home is not Tier.DEVICE and rates.h2d_bytes_per_s is not None:
            nbytes = slots * (self._slot.param if before else self._slot.gathered)
            link_s = nbytes / rates.h2d_bytes_per_s
        cost = self._collectives.gather(slots) if self._several else None
        return Gather(disk_s, link_s if before else 0.0, cost, 0.0 if before else link_s)

    def mean(self, chunk: int, after: int, first: bool) -> Mean:
        slots, home, rates = self.slots(chunk), self._made.grad[chunk], self._problem.profile
        costs = self._collectives.mean(slots)
        shard_cost = costs.pop(0) if self._several else None
        link_s = disk_s = 0.0
        averages = self._several or bool(costs)
        if home is not Tier.DEVICE and rates.d2h_bytes_per_s is not None:
            nbytes = self._numel[chunk] * self._problem.dtypes.param_bytes
            if averages and self._between_devices:
                nbytes = slots * self._slot.grad
            link_s = nbytes / rates.d2h_bytes_per_s
        if home is Tier.DISK:
            reading, writing = disk_rates(rates, True)
            disk_s = slots * self._slot.grad * (1 / writing + (0.0 if first else 1 / reading))
        last = averages and self._between_devices
        return Mean(
            after if averages else -1,
            0.0 if last else link_s,
            shard_cost,
            sum(cost.seconds for cost in costs),
            link_s if last else 0.0,
            disk_s,
        )
