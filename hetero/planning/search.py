"""The placement whose step is predicted to be the fastest, among those that fit the budgets.

plan() is pure: a problem (trace, layout, dtypes, budgets, profile, policy) in, a frozen `Plan`
out. The runtime carries the plan's placement out and decides nothing. Candidates are counts of
chunks per tier (`placement.py`); `cost.py` says what a step takes under each. They are looked at in
the order of a lower bound until none left can be faster; then the best one's counts are varied in
ever smaller steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hetero.planning.placement import (
    HEADROOMS,
    Candidate,
    Headroom,
    Maker,
    Placement,
    PlacementError,
    Split,
)
from hetero.planning.step_cost import CostModel, Problem, StepCost
from offload.memory.tiers import Tier

# Counts of a dimension that are looked at first; of so few chunks all counts are.
_GRID = 5
_GRID_WITH_DEVICE = 3
_FEW_CHUNKS = 8


@dataclass(frozen=True)
class Plan:
    """What the runtime carries out, and what it is expected to take.

    The optimizer goes through `host_updates` (chunk ids) in this order in one step and in the
    reverse in the next, so that what the buffers keep is what is needed first; `device_updates` are
    updated on DEVICE meanwhile. `looked_at` placements were compared.
    """

    problem: Problem
    placement: Placement
    cost: StepCost
    host_updates: tuple[int, ...]
    device_updates: tuple[int, ...]
    looked_at: int

    def explain(self) -> str:
        """A table for people; takes a few plans' time."""
        from hetero.planning.report import explain  # which plans, too

        return explain([self])


def as_placed(problem: Problem, made: Placement) -> Plan:
    """The plan of a placement that exists: what it is expected to take."""
    return _planned(problem, made, CostModel(problem).cost(made), 1)


def _planned(problem: Problem, made: Placement, cost: StepCost, looked_at: int) -> Plan:
    trained = [c.id for c in problem.layout.chunks if c.trainable]
    return Plan(
        problem=problem,
        placement=made,
        cost=cost,
        host_updates=tuple(c for c in trained if made.optim_state[c] is not Tier.DEVICE),
        device_updates=tuple(c for c in trained if made.optim_state[c] is Tier.DEVICE),
        looked_at=looked_at,
    )


def plan(problem: Problem) -> Plan:
    """The plan for `problem`. Raises PlacementError with the smallest budgets that work."""
    return _Search(problem).run()


def smallest_budgets(problem: Problem) -> tuple[int, int | None]:
    """(bytes of RAM, bytes of DEVICE or None) that are just enough, each with the other as it is.

    What is not in RAM goes to disk, as far as there is room. Raises PlacementError if no budget of
    RAM works, as under policy "nvme" without a disk.
    """
    host = 0
    try:
        _place(replace(problem, budgets=replace(problem.budgets, host=0)))
    except PlacementError as refusal:
        host = refusal.smallest_host_bytes
        _place(replace(problem, budgets=replace(problem.budgets, host=host)))
    if problem.budgets.device is None:
        return host, None
    budgets = replace(problem.budgets, device=0, host=1 << 62)
    try:
        _place(replace(problem, budgets=budgets))
    except PlacementError as refusal:
        return host, refusal.smallest_device_bytes
    return host, 0


def _place(problem: Problem) -> Placement:
    maker = _maker(problem)
    for candidate in maker.candidates():
        made = maker.checked(maker.placement(candidate))
        if made is not None:
            return made
    raise maker.refusal()


def _maker(problem: Problem) -> Maker:
    return Maker(
        problem.layout,
        problem.dtypes,
        problem.policy,
        problem.budgets,
        problem.min_gathered_slots,
        problem.held,
    )


# Seconds, then bytes written to NVMe, which wear it out, then RAM that others may want.
_Score = tuple[float, int, int]


class _Search:
    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._maker = _maker(problem)
        self._model = CostModel(problem)
        self._seen: set[Candidate] = set()
        self._best: tuple[_Score, Candidate, Placement, StepCost] | None = None

    def run(self) -> Plan:
        maker = self._maker
        found = [c for c in (*maker.candidates(), *self._grid()) if maker.fits(c)]
        self._look_at(found)
        if self._best is None:
            raise maker.refusal()
        if self._problem.policy in ("nvme", "auto"):
            self._refine()
        _, _, made, cost = self._best
        return _planned(self._problem, made, cost, len(self._seen))

    def _look_at(self, candidates: Iterable[Candidate]) -> None:
        """Keeps the best of all, predicting as few steps in full as possible."""
        bounded: list[tuple[float, int, Candidate, Placement]] = []
        for candidate in candidates:
            if candidate in self._seen:
                continue
            self._seen.add(candidate)
            made = self._maker.checked(self._maker.placement(candidate))
            if made is not None:
                bound_s = self._model.lower_bound_s(made)
                bounded.append((bound_s, len(bounded), candidate, made))
        for bound_s, _, candidate, made in sorted(bounded, key=lambda entry: entry[:2]):
            if self._best is not None and bound_s > self._best[0][0]:
                break
            cost = self._model.cost(made)
            # Not finer than a nanosecond: sums in another order are no reason.
            score = (round(cost.seconds, 9), cost.traffic.nvme_written, made.host_bytes)
            if self._best is None or score < self._best[0]:
                self._best = score, candidate, made, cost

    def _grid(self) -> Iterable[Candidate]:
        """Placements between those that are best on most machines."""
        if self._problem.policy not in ("nvme", "auto"):
            return
        chunks = len(self._problem.layout.chunks)
        count = _GRID_WITH_DEVICE if self._maker.separate else _GRID
        if chunks <= _FEW_CHUNKS:
            count = chunks + 1
        for headroom in (*HEADROOMS, *self._roomy()):
            least, most = self._maker.device_counts(headroom)
            for device in _spread(least, most, count):
                n = len(self._maker.ranked(device))
                for param in _spread(0, n, count):
                    for grad in _spread(0, n, count):
                        yield from self._made(Split(device, param, grad, 0), headroom)

    def _roomy(self) -> Sequence[Headroom]:
        """Room to fetch one or two of the largest chunks ahead, if these have several slots."""
        longest = max(c.slots for c in self._problem.layout.chunks)
        buffers, more_gathered, more_grad = HEADROOMS[0]
        return [(buffers, n * longest, more_grad) for n in (1, 2) if n * longest > more_gathered]

    def _made(self, split: Split, headroom: Headroom) -> Iterable[Candidate]:
        """Placements of so many parameters and gradients, filled up with optimizer states.

        These are at home in RAM or, where the order of updates repeats, kept by buffers: tile by
        tile, and just those that forward would wait for.
        """
        least, most = self._maker.device_counts(headroom)
        n = len(self._maker.ranked(split.device))
        inside = 0 <= split.param <= n and 0 <= split.grad <= n
        if least <= split.device <= most and inside and self._maker.allows(split):
            repeats = self._problem.overlap.repeats
            for homes in (True, False) if repeats else (True,):
                made = self._maker.with_optim_states(
                    split.device, split.param, split.grad, headroom, homes
                )
                if self._maker.fits(made):
                    yield made

    def _refine(self) -> None:
        """Varies the best one's counts in ever smaller steps."""
        chunks = len(self._problem.layout.chunks)
        step = max(1, chunks // 8)
        while True:
            assert self._best is not None
            before = self._best[0]
            at, headroom = self._best[1].split, self._best[1].headroom
            self._look_at(
                candidate
                for split in _neighbours(at, step)
                for candidate in self._made(split, headroom)
            )
            if self._best[0] == before:
                if step == 1:
                    return
                step //= 2


def _neighbours(at: Split, step: int) -> Iterable[Split]:
    for more in (step, -step):
        yield replace(at, param=at.param + more)
        yield replace(at, grad=at.grad + more)
        yield replace(at, param=at.param + more, grad=at.grad - more)
        # What goes to DEVICE is not among the others any more.
        yield replace(
            at,
            device=at.device + more,
            param=max(0, at.param - max(0, more)),
            grad=max(0, at.grad - max(0, more)),
        )


def _spread(least: int, most: int, count: int) -> Sequence[int]:
    """At most `count` numbers from `least` to `most`, both included, evenly."""
    if most - least < count:
        return range(least, most + 1)
    return sorted({least + (most - least) * i // (count - 1) for i in range(count)})
