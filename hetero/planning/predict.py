"""What a step of placements that exist is expected to take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hetero.overlap import OverlapUpdates
from hetero.planning.collective_cost import Network
from hetero.planning.group_plans import ChunkGroupPlan
from hetero.planning.placement import Placement
from hetero.planning.step_cost import CostModel, StepCost
from hetero.planning.step_problem import PhaseCost, Problem
from hetero.planning.trace import Computing, Trace, Work, expected_trace
from offload.profile.machine_profile import Rates


@dataclass(frozen=True)
class Plan:
    """A chunk group's placement, and the step that it is predicted to take."""

    group: ChunkGroupPlan
    problem: Problem
    cost: StepCost

    @property
    def placement(self) -> Placement:
        """Where the chunk group's state is."""
        return self.group.placement


def predict(
    groups: Sequence[ChunkGroupPlan],
    rates: Rates,
    work: Work,
    computing: Computing | None = None,
    *,
    prefetch: bool = True,
    overlap: OverlapUpdates = OverlapUpdates.NONE,
    grad_factors: bool = False,
    network: Network | None = None,
    network_bytes_per_s: float | None = None,
    undoable_steps: bool = False,
) -> list[Plan]:
    """What a step of chunk groups takes on one rank.

    Args:
        groups: all of a model.
        rates: the rank's share of its machine; a Profile where `computing` is None.
        work: what it computes in a step.
        computing: seconds that computing takes, which are divided by numbers of elements; None:
            estimated from `work` and the profile's rate of products of matrices.
        prefetch, overlap, grad_factors, network, undoable_steps: as `Problem` has them.
        network_bytes_per_s: what a rank sends to any others, where no more is known of a network.

    Returns:
        A plan for each chunk group.

    Raises:
        ValueError: the profile says nothing about what is used.
    """
    numel = sum(group.layout.numel for group in groups)
    plans = []
    for group in groups:
        layout, dtypes = group.layout, group.dtypes
        ranks = layout.shard.ranks * layout.shard.replicas
        if network is None and network_bytes_per_s is not None:
            network = Network.flat(ranks, network_bytes_per_s)
        if computing is None:
            flop_per_s = rates.rate("matmul_flop_per_s", dtypes.compute)
            trace = expected_trace(layout, work, flop_per_s)
        else:
            part = layout.numel / numel
            seconds = computing.forward_s * part, computing.backward_s * part
            trace = Trace(*seconds, work.micro_batches)
        problem = Problem(
            trace=trace,
            layout=layout,
            dtypes=dtypes,
            profile=rates,
            prefetch=prefetch,
            overlap=overlap,
            grad_factors=grad_factors,
            network=network,
            undoable_steps=undoable_steps,
        )
        cost = CostModel(problem).cost(group.placement)
        moved = cost.traffic["nvme_read"] + cost.traffic["nvme_written"]
        if moved and rates.nvme_read_bytes_per_s is None:
            raise ValueError(
                f"the profile {rates.name!r} says nothing about NVMe; measure it again"
            )
        plans.append(Plan(group, problem, cost))
    return plans


def whole_step(plans: Sequence[Plan]) -> StepCost:
    """The steps of all chunk groups as one, in which phases of one name are added."""
    phases: dict[str, PhaseCost] = {}
    traffic: Counter[str] = Counter()
    for plan in plans:
        traffic.update(plan.cost.traffic)
        for phase in plan.cost.phases:
            phases[phase.name] = phases[phase.name].plus(phase) if phase.name in phases else phase
    return StepCost(tuple(phases.values()), traffic)


def figures(plans: Sequence[Plan]) -> dict[str, Any]:
    """Seconds and bytes of the whole step, for programs; phases that go on together are one."""
    step = whole_step(plans)
    return {
        "step_s": step.seconds,
        "phases_s": {phase.name: phase.seconds for phase in step.phases},
        "bound": step.bound,
        "measured_computing": not any(plan.problem.trace.expected for plan in plans),
        "nvme_read_bytes": step.traffic["nvme_read"],
        "nvme_written_bytes": step.traffic["nvme_written"],
    }
