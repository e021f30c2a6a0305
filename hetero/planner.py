"""Decides on placements of banks by planning: what arrange() may take instead of place()."""

from __future__ import annotations

from hetero.cost import Problem
from hetero.dtypes import Dtypes
from hetero.layout import Layout
from hetero.placement import Budgets, Placement
from hetero.plan import Plan, plan
from hetero.trace import Work, expected_trace
from offload.profile import Profile


class Planner:
    """Plans each bank from a profile and the work of a step, and keeps the plans (`plan_of`).

    `profile` is one rank's share of its machine. `policy` takes the place of the one that
    arrange() passes on, if given. Computing goes by the trace that is expected before any step.
    """

    def __init__(
        self,
        profile: Profile,
        work: Work,
        policy: str | None = None,
        network_bytes_per_s: float | None = None,
        prefetch: bool = True,
    ) -> None:
        self._profile = profile
        self._work = work
        self._policy = policy
        self._network_bytes_per_s = network_bytes_per_s
        self._prefetch = prefetch
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
        """The placement of the plan for one bank. Raises PlacementError."""
        flop_per_s = self._profile.rate("matmul_flop_per_s", dtypes.compute)
        made = plan(
            Problem(
                trace=expected_trace([layout], self._work, flop_per_s),
                layout=layout,
                dtypes=dtypes,
                budgets=budgets,
                profile=self._profile,
                policy=self._policy or policy,
                min_gathered_slots=min_gathered_slots,
                held=held,
                prefetch=self._prefetch,
                network_bytes_per_s=self._network_bytes_per_s,
            )
        )
        self._plans[layout, made.placement] = made
        return made.placement

    def plan_of(self, layout: Layout, placement: Placement) -> Plan:
        """The plan that `placement` came of."""
        return self._plans[layout, placement]
