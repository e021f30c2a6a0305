"""Models on clusters: what is planned and predicted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from bench.scaling.simulation import Collective, Schedule
from hetero.cli.job.job import arrange_shape
from hetero.cli.job.models import build_shape, model_config, wanted_vocab_size
from hetero.cli.job.options import TrainOptions
from hetero.cli.job.ranks import Ranks
from hetero.config import Config
from hetero.overlap import OverlapUpdates
from hetero.planning.collective_cost import CollectiveCost, Network, all_to_all
from hetero.planning.predict import Plan, predict
from hetero.planning.trace import Work
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
        return replace(mean, cost=CollectiveCost(latency_s, transfer_s, sent, crosses_nodes=True))

    return replace(schedule, means=tuple(map(two_levels, schedule.means)))


@lru_cache
def _model(name: str) -> tuple[TrainOptions, torch.nn.Module]:
    options = TrainOptions(model=name, vocab_size=wanted_vocab_size(name, None, None))
    return options, build_shape(model_config(options))
