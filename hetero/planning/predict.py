"""What a step of placements that exist is expected to take, beside what it took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from hetero.chunks.dtypes import Dtypes
from hetero.chunks.layout import Layout
from hetero.overlap import OverlapUpdates
from hetero.planning.placement import Budgets, Placement
from hetero.planning.step_cost import COMPUTE, NVME, CostModel, Problem, StepCost
from hetero.planning.trace import Phase, Trace, Work, expected_trace
from offload.profile.machine_profile import Profile

_NO_BUDGETS = Budgets(0, 0)  # what is placed is placed


class Placed(Protocol):
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


def predict(
    chunk_groups: Sequence[Placed],
    profile: Profile,
    work: Work,
    computing: Computing | None = None,
    grad_factors: bool = False,
    prefetch: bool = True,
    overlap: OverlapUpdates = OverlapUpdates.NONE,
) -> Prediction:
    """What a step of `chunk groups` takes on one rank whose share of its machine is `profile`.

    Without `computing` it is estimated, from the profile's rate of products of matrices. Raises
    ValueError for a profile that says nothing about what is used.
    """
    if profile.nvme_read_bytes_per_s is None and any(b.placement.disk_bytes for b in chunk_groups):
        raise ValueError(f"the profile {profile.name!r} says nothing about NVMe; measure it again")
    numel = sum(chunk_group.layout.numel for chunk_group in chunk_groups)
    costs = []
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
        problem = Problem(
            trace=trace,
            layout=chunk_group.layout,
            dtypes=chunk_group.dtypes,
            budgets=_NO_BUDGETS,
            profile=profile,
            policy="auto",
            grad_factors=grad_factors,
            prefetch=prefetch,
            overlap=overlap,
        )
        costs.append(CostModel(problem).cost(chunk_group.placement))
    return Prediction(tuple(costs), computing is not None)


def computing_alone(problem: Problem, made: Placement) -> Trace:
    """The trace that was measured under `made`, without what its transfers took from computing.

    Where the CPU computes, transfers slow it down, by the profile's interference; the prediction of
    a placement adds what its own transfers take.
    """
    trace, share = problem.trace, problem.profile.compute_interference
    if problem.profile.separate or not share:
        return trace
    lost_s = dict.fromkeys((phase.value for phase in Phase), 0.0)
    for phase in CostModel(problem).cost(made).phases:
        if phase.name in lost_s:
            computing_s, nvme_s = (phase.busy_s.get(name, 0.0) for name in (COMPUTE, NVME))
            lost_s[phase.name] = share * min(nvme_s, computing_s / (1 + share))
    return replace(
        trace,
        forward_s=max(0.0, trace.forward_s - lost_s[Phase.FORWARD.value]),
        backward_s=max(0.0, trace.backward_s - lost_s[Phase.BACKWARD.value]),
    )
