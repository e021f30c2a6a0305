"""Models on clusters: what is planned and predicted, and the schedule that is simulated."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from bench.scaling.simulation import Collective, Schedule, Use
from hetero.config import Config
from hetero.job.job import arrange_shape
from hetero.job.models import build_shape, model_config, wanted_vocab_size
from hetero.job.options import TrainOptions
from hetero.job.ranks import Ranks
from hetero.overlap import OverlapUpdates
from hetero.planning.belady import PREFETCH_CHUNKS, step_fetches
from hetero.planning.collective_cost import CollectiveCost, Network, agreement_s, all_to_all
from hetero.planning.placement import Placement, SlotBytes
from hetero.planning.step_cost import CostModel, Plan, predict
from hetero.planning.step_problem import (
    D2H,
    H2D,
    NVME,
    CollectiveCosts,
    Problem,
    Work,
    disk_rates,
    use_order,
)
from offload.memory.tiers import Tier
from offload.profile.machine_profile import Profile

LOCAL_RANKS = 8
_SHARE = 0.8  # of RAM and of a device's memory, as `hetero plan` takes it
_SEQ_LEN = 4096


@dataclass(frozen=True)
class Case:
    """A model on `nodes` machines of LOCAL_RANKS ranks each.

    Attributes:
        model: by name.
        nodes: machines.
        hybrid: the ranks of a machine share each chunk, and machines are replicas.
        chunk_numel: elements of a chunk; None: as hetero chooses.
        host_bytes, device_bytes: RAM and DEVICE of a rank for model state; None: what `hetero plan`
            takes. What fits neither is on NVMe, if the profile has any.
        sequences: of 4096 tokens in a micro-batch of a rank.
        micro_batches: of a step.
    """

    model: str
    nodes: int
    hybrid: bool = False
    chunk_numel: int | None = None
    host_bytes: int | None = None
    device_bytes: int | None = None
    sequences: int = 1
    micro_batches: int = 1

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.nodes * LOCAL_RANKS

    def plan(self, profile: Profile) -> Plan:
        """What `hetero plan` says of machines with this profile, with checkpointing and updates
        that overlap with nothing. Raises BudgetError if nothing fits."""
        mine = profile.share(LOCAL_RANKS)
        host, device = self.host_bytes, self.device_bytes
        if host is None:
            host = int(mine.host_bytes * _SHARE)
        if device is None and mine.device_bytes is not None:
            device = int(mine.device_bytes * _SHARE)
        options, shape = _model(self.model)
        shard_ranks = LOCAL_RANKS if self.hybrid else self.ranks
        arranged = arrange_shape(
            shape,
            options,
            Config(host_memory=host, chunk_numel=self.chunk_numel),
            Ranks(0, shard_ranks),
            host,
            mine.nvme_bytes or 0,
            device,
            policy="auto",
            replicas=self.ranks // shard_ranks,
        )
        (plan,) = predict(
            arranged.chunk_groups,
            mine,
            Work(_SEQ_LEN * self.sequences, self.micro_batches, checkpointing=True),
            overlap=OverlapUpdates.NONE,
            network=Network.of(mine, LOCAL_RANKS, self.nodes),
        )
        return plan


def schedule_of(problem: Problem, made: Placement) -> Schedule:
    """The step that `problem`, of stage 3, is under the placement `made` of its chunks."""
    shard, network = problem.layout.shard, problem.network
    assert network is not None
    order, trace = use_order(problem.layout), problem.trace
    numel = {c.id: sum(s.param.numel for s in c.slices) for c in problem.layout.chunks}
    chunks = {chunk.id: chunk for chunk in problem.layout.chunks}
    gathered = CostModel(problem).gathered(made)
    step = [(chunk, False) for chunk in order] + [(chunk, True) for chunk in reversed(order)]
    step *= trace.micro_batches
    fetched = [chunk for chunk, _ in step if chunk in gathered]
    gathers: list[Collective] = []
    of_use: dict[int, int] = {}  # the gather of each use of a gathered chunk
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
        whole_s = trace.backward_s if backward else trace.forward_s
        made_use = Use(whole_s * numel[chunk] / problem.layout.numel / trace.micro_batches)
        if backward and chunks[chunk].trainable:
            made_use = made_use._replace(mean=len(means))
            buckets.append(chunks[chunk].slots)
            first = len(uses) < 2 * len(order)
            mean = _mean(problem, made, chunk, buckets[-1], numel[chunk], first)
            means.append(mean._replace(bucket=_bucket(buckets, made.bucket_slots)))
        if chunk in gathered:
            begins, others = tuple(demanded[use]), tuple(prefetched[use])
            made_use = made_use._replace(gather=of_use.get(use), demanded=begins, prefetched=others)
            use += 1
        uses.append(made_use)
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
    disk = [(NVME, slots * slot.param / disk_rates(rates, False)[0])] * (home is Tier.DISK)
    link = []
    if home is not Tier.DEVICE and rates.h2d_bytes_per_s is not None:
        link = [(H2D, slots * (slot.param if first else slot.gathered) / rates.h2d_bytes_per_s)]
    cost = CollectiveCosts(problem).gather(slots)
    return Collective(cost, tuple(disk + link * first), tuple(link * (not first)))


def _mean(
    problem: Problem, made: Placement, chunk: int, slots: int, numel: int, first: bool
) -> Collective:
    """The gradient's way home; the first of a step is not added to what is there."""
    assert problem.network is not None
    slot, rates = SlotBytes.of(problem.layout, problem.dtypes), problem.profile
    home, last = made.grad[chunk], problem.network.between_devices
    cost, *over_replicas = CollectiveCosts(problem).mean(slots)
    link, disk = [], []
    if home is not Tier.DEVICE and rates.d2h_bytes_per_s is not None:
        nbytes = slots * slot.grad if last else numel * problem.dtypes.param_bytes
        link = [(D2H, nbytes / rates.d2h_bytes_per_s)]
    if home is Tier.DISK:
        reading, writing = disk_rates(rates, True)
        disk = [(NVME, slots * slot.grad * (1 / writing + (0.0 if first else 1 / reading)))]
    replicas_s = sum(each.seconds for each in over_replicas)
    return Collective(cost, tuple(link * (not last)), tuple(link * last + disk), replicas_s)


def two_level_means(schedule: Schedule, plan: Plan) -> Schedule:
    """The schedule if means were made inside each machine first, then between machines.

    Then a rank's adapter carries what its machine has added up. hetero does not do that: the order
    of additions, and so the last bit, would depend on the machines. With hybrid sharding it is the
    same schedule.
    """
    network, shard = plan.problem.network, plan.problem.layout.shard
    if network is None or shard.replicas > 1 or network.nodes == 1:
        return schedule
    inside = network.shard_group(network.local_ranks)
    between = network.replica_group(network.local_ranks)

    def two_levels(mean: Collective) -> Collective:
        nbytes = mean.cost.bytes_sent * shard.ranks / (shard.ranks - 1)
        first, second = all_to_all(inside, nbytes), all_to_all(between, nbytes / inside.ranks)
        sent = first.bytes_sent + second.bytes_sent
        latency_s = first.latency_s + second.latency_s
        transfer_s = first.transfer_s + second.transfer_s
        return mean._replace(cost=CollectiveCost(latency_s, transfer_s, sent, crosses_nodes=True))

    return replace(schedule, means=tuple(map(two_levels, schedule.means)))


@lru_cache
def _model(name: str) -> tuple[TrainOptions, torch.nn.Module]:
    options = TrainOptions(model=name, vocab_size=wanted_vocab_size(name, None, None))
    return options, build_shape(model_config(options))
