"""What a step of placements that exist is expected to take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hetero.chunks.dtypes import Dtypes
from hetero.chunks.layout import Layout
from hetero.overlap import OverlapUpdates
from hetero.planning.group_plans import ChunkGroupPlan
from hetero.planning.placement import Placement
from hetero.planning.step_cost import CostModel, Problem, StepCost
from hetero.planning.trace import Computing, Trace, Work, expected_trace, expected_uses
from offload.profile.machine_profile import Profile


class PlacedGroup(Protocol):
    """A chunk group, or the plan of one."""

    @property
    def layout(self) -> Layout: ...
    @property
    def dtypes(self) -> Dtypes: ...
    @property
    def placement(self) -> Placement: ...


@dataclass(frozen=True)
class Prediction:
    """Of one rank's step, by phase; `measured_computing`: computing was measured, not estimated."""

    costs: tuple[StepCost, ...]  # per chunk group
    measured_computing: bool

    @property
    def step_s(self) -> float:
        """Seconds of the whole step."""
        return sum(cost.seconds for cost in self.costs)

    @property
    def phases_s(self) -> dict[str, float]:
        """Seconds of "forward", "backward" and "update"; of those that go on together, as one, such
        as "backward and update"."""
        seconds: dict[str, float] = {}
        for cost in self.costs:
            for phase in cost.phases:
                seconds[phase.name] = seconds.get(phase.name, 0.0) + phase.seconds
        return seconds

    @property
    def bound(self) -> str:
        """The resource that is busiest."""
        busy: dict[str, float] = {}
        for cost in self.costs:
            for name, seconds in cost.busy_s.items():
                busy[name] = busy.get(name, 0.0) + seconds
        return max(busy, key=busy.__getitem__)

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        return {
            "step_s": self.step_s,
            "phases_s": self.phases_s,
            "bound": self.bound,
            "measured_computing": self.measured_computing,
            "nvme_read_bytes": sum(cost.traffic.nvme_read for cost in self.costs),
            "nvme_written_bytes": sum(cost.traffic.nvme_written for cost in self.costs),
        }


@dataclass(frozen=True)
class Plan:
    """A chunk group's placement, and the step that it is predicted to take."""

    group: ChunkGroupPlan
    problem: Problem
    cost: StepCost

    @classmethod
    def of(cls, group: ChunkGroupPlan, problem: Problem) -> Plan:
        """The prediction for `group`, whose step `problem` describes.

        Raises:
            ValueError: the problem's profile says nothing about what the placement uses.
        """
        return cls(group, problem, _cost(problem, group.placement))

    @property
    def placement(self) -> Placement:
        """Where the chunk group's state is."""
        return self.group.placement


def predict(
    chunk_groups: Sequence[PlacedGroup],
    profile: Profile,
    work: Work,
    computing: Computing | None = None,
    grad_factors: bool = False,
    prefetch: bool = True,
    overlap: OverlapUpdates = OverlapUpdates.NONE,
) -> Prediction:
    """What a step of chunk groups takes on one rank.

    Args:
        chunk_groups: all of a model.
        profile: the rank's share of its machine.
        work: what it computes in a step.
        computing: seconds that computing takes; None: estimated from `work` and the profile's rate
            of products of matrices.
        grad_factors, prefetch, overlap: as `Problem` has them.

    Returns:
        The seconds and the bytes of one step.

    Raises:
        ValueError: the profile says nothing about what is used.
    """
    costs = []
    traces = traces_of(chunk_groups, work, computing or profile)
    for chunk_group, trace in zip(chunk_groups, traces, strict=True):
        problem = Problem(
            trace=trace,
            layout=chunk_group.layout,
            dtypes=chunk_group.dtypes,
            profile=profile,
            grad_factors=grad_factors,
            prefetch=prefetch,
            overlap=overlap,
        )
        costs.append(_cost(problem, chunk_group.placement))
    return Prediction(tuple(costs), computing is not None)


def traces_of(
    chunk_groups: Sequence[PlacedGroup], work: Work, by: Computing | Profile
) -> list[Trace]:
    """Each chunk group's part of a step.

    Args:
        chunk_groups: all of a model.
        work: what a rank computes in the step.
        by: the seconds of computing, which are divided by numbers of elements; or the profile by
            whose rate of products they are estimated.

    Raises:
        ValueError: the profile has no rate of products in a chunk group's dtype.
    """
    numel = sum(chunk_group.layout.numel for chunk_group in chunk_groups)
    traces = []
    for chunk_group in chunk_groups:
        layout = chunk_group.layout
        if isinstance(by, Computing):
            part = layout.numel / numel
            seconds = by.forward_s * part, by.backward_s * part
            uses = expected_uses(layout, work.micro_batches)
            traces.append(Trace(uses, work.micro_batches, *seconds))
        else:
            flop_per_s = by.rate("matmul_flop_per_s", chunk_group.dtypes.compute)
            traces.append(expected_trace(layout, work, flop_per_s))
    return traces


def _cost(problem: Problem, made: Placement) -> StepCost:
    cost, profile = CostModel(problem).cost(made), problem.profile
    moved = cost.traffic.nvme_read + cost.traffic.nvme_written
    if moved and profile.nvme_read_bytes_per_s is None:
        raise ValueError(f"the profile {profile.name!r} says nothing about NVMe; measure it again")
    return cost
