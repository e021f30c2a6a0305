"""Decides on placements of chunk groups by planning: what arrange() may take instead of place()."""

from __future__ import annotations

from collections.abc import Mapping

from hetero.chunks.dtypes import Dtypes
from hetero.chunks.layout import Layout
from hetero.config import Config
from hetero.overlap import OverlapUpdates
from hetero.planning.machine_profile import RankProfile
from hetero.planning.placement import Budgets, Placement
from hetero.planning.search import Plan, plan
from hetero.planning.step_cost import Problem
from hetero.planning.trace import Trace, Work, expected_trace
from offload.profile.machine_profile import Profile

# Per step, until one was traced: `hetero train`'s 8 sequences of 128. Few tokens make the first
# plan a careful one, that hides little behind computing.
EXPECTED_TOKENS = 1024


class Planner:
    """Plans each chunk group from a profile and the work of a step, and keeps the plans
    (`plan_of`).

    `profile` is one rank's share of its machine. `policy` takes the place of the one that
    arrange() passes on, if given. Computing goes by the trace that is expected before any step,
    until there are others (`traces`).
    """

    def __init__(
        self,
        profile: Profile,
        work: Work,
        policy: str | None = None,
        network_bytes_per_s: float | None = None,
        prefetch: bool = True,
        overlap: OverlapUpdates = OverlapUpdates.NONE,
    ) -> None:
        self.traces: Mapping[int, Trace] = {}  # by chunk group: its own uses and seconds
        self._profile = profile
        self._work = work
        self._policy = policy
        self._network_bytes_per_s = network_bytes_per_s
        self._prefetch = prefetch
        self._overlap = overlap
        self._plans: dict[tuple[Layout, Placement], Plan] = {}

    def __call__(
        self,
        layout: Layout,
        dtypes: Dtypes,
        policy: str,
        budgets: Budgets,
        min_gathered_slots: int,
        held: bool,
    ) -> Placement:
        """The placement of the plan for one chunk group. Raises PlacementError."""
        made = plan(self.problem(layout, dtypes, policy, budgets, min_gathered_slots, held))
        self._plans[layout, made.placement] = made
        return made.placement

    def problem(
        self,
        layout: Layout,
        dtypes: Dtypes,
        policy: str,
        budgets: Budgets,
        min_gathered_slots: int,
        held: bool,
    ) -> Problem:
        """What is planned for one chunk group."""
        trace = self.traces.get(layout.chunks[0].group_index)
        if trace is None:
            flop_per_s = self._profile.rate("matmul_flop_per_s", dtypes.compute)
            trace = expected_trace([layout], self._work, flop_per_s)
        return Problem(
            trace=trace,
            layout=layout,
            dtypes=dtypes,
            budgets=budgets,
            profile=self._profile,
            policy=self._policy or policy,
            min_gathered_slots=min_gathered_slots,
            held=held,
            prefetch=self._prefetch,
            overlap=self._overlap,
            network_bytes_per_s=self._network_bytes_per_s,
        )

    def plans(self, layout: Layout, placement: Placement) -> Plan | None:
        """plan_of(), or None."""
        return self._plans.get((layout, placement))

    def plan_of(self, layout: Layout, placement: Placement) -> Plan:
        """The plan that `placement` came of, or, after a change, what it is expected to take."""
        return self._plans[layout, placement]

    def forget(self) -> None:
        """Lets go of plans that nobody carries out."""
        self._plans.clear()


def planner_for(config: Config, found: RankProfile) -> Planner | None:
    """The planner of an engine; None without a profile."""
    if found.profile is None:
        return None
    return Planner(
        found.profile,
        Work(config.expected_tokens or EXPECTED_TOKENS),
        network_bytes_per_s=found.network_bytes_per_s,
        prefetch=config.prefetch,
        overlap=config.overlap,
    )


def planning_matters(config: Config) -> bool:
    """Whether there is anything to choose."""
    return config.placement_policy in ("auto", "nvme") or config.backend != "cpu"
