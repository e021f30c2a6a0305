"""What a step of placements that exist is expected to take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from hetero.chunks.dtypes import Dtypes
from hetero.chunks.layout import Layout
from hetero.planning.group_plans import ChunkGroupPlan
from hetero.planning.placement import Placement
from hetero.planning.step_cost import CostModel, Problem, StepCost
from hetero.planning.trace import Trace, Work, completed, expected_trace
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
class Computing:
    """Seconds of a step that compute takes alone, as they were measured without any transfer."""

    forward_s: float
    backward_s: float


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
    early_updates: bool = False,
    late_updates: bool = False,
) -> Prediction:
    """What a step of chunk groups takes on one rank.

    Args:
        chunk_groups: all of a model.
        profile: the rank's share of its machine.
        work: what it computes in a step.
        computing: seconds that computing takes; None: estimated from `work` and the profile's rate
            of products of matrices.
        grad_factors, prefetch, early_updates, late_updates: as `Problem` has them.

    Returns:
        The seconds and the bytes of one step.

    Raises:
        ValueError: the profile says nothing about what is used.
    """
    costs = []
    traces = expected_traces(chunk_groups, profile, work, computing)
    for chunk_group, trace in zip(chunk_groups, traces, strict=True):
        problem = Problem(
            trace=trace,
            layout=chunk_group.layout,
            dtypes=chunk_group.dtypes,
            profile=profile,
            grad_factors=grad_factors,
            prefetch=prefetch,
            early_updates=early_updates,
            late_updates=late_updates,
        )
        costs.append(_cost(problem, chunk_group.placement))
    return Prediction(tuple(costs), computing is not None)


def expected_traces(
    chunk_groups: Sequence[PlacedGroup],
    profile: Profile,
    work: Work,
    computing: Computing | None = None,
) -> list[Trace]:
    """Each chunk group's trace of a step that was not made yet; arguments as predict() has them.

    Raises:
        ValueError: the profile has no rate of products in a chunk group's dtype.
    """
    numel = sum(chunk_group.layout.numel for chunk_group in chunk_groups)
    traces = []
    for chunk_group in chunk_groups:
        flop_per_s = profile.rate("matmul_flop_per_s", chunk_group.dtypes.compute)
        trace = expected_trace([chunk_group.layout], work, flop_per_s)
        if computing is not None:
            part = chunk_group.layout.numel / numel
            trace = replace(
                trace,
                forward_s=computing.forward_s * part,
                backward_s=computing.backward_s * part,
                expected=False,
            )
        traces.append(trace)
    return traces


def measured_traces(chunk_groups: Sequence[PlacedGroup], trace: Trace) -> list[Trace]:
    """Each chunk group's part of a trace that was recorded of a step of all of them.

    Its seconds are divided by numbers of elements; uses of chunks that were at home where compute
    is, which no recording has, are added.
    """
    layouts = [chunk_group.layout for chunk_group in chunk_groups]
    whole = completed(trace, layouts)
    numel = sum(layout.numel for layout in layouts)
    return [whole.of_chunk_group(n, layout.numel / numel) for n, layout in enumerate(layouts)]


def _cost(problem: Problem, made: Placement) -> StepCost:
    cost, profile = CostModel(problem).cost(made), problem.profile
    moved = cost.traffic.nvme_read + cost.traffic.nvme_written
    if moved and profile.nvme_read_bytes_per_s is None:
        raise ValueError(f"the profile {profile.name!r} says nothing about NVMe; measure it again")
    return cost
