"""Other placements for chunk groups that exist: when an engine looks for one, and goes over to it.

After the second step of a training, whose trace has seconds without what is done but once, after a
new sequence of uses was seen twice, and when computing takes another time than it was planned with,
all is planned again with the trace; if that is predicted to save more than 5 % of the step, homes
move. Each time that it changes little, the next look is twice as many steps away.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hetero.chunk_groups.chunk_group import ChunkGroup
from hetero.planning.group_plans import Choose
from hetero.planning.placement import Budgets, Placement, PlacementError, SlotBytes, place
from hetero.planning.planner import Planner, planning_matters
from hetero.planning.predict import computing_alone
from hetero.planning.refusal import SAID, cannot_become, too_much
from hetero.planning.search import Plan, as_placed
from hetero.planning.step_cost import Problem
from hetero.planning.trace import Moment, Phase, Trace, Use, completed
from hetero.runtime.relocation.memory_limit import BesideMemory, MemoryLimit, usable_device_bytes
from hetero.runtime.relocation.moves import InUseError
from hetero.runtime.relocation.relocate import Change, Relocation, same
from hetero.runtime.step_tracer import Seen, StepTracer
from offload.errors import BudgetError, HeteroError, PeerError
from offload.memory.c_heap import trim_heap
from offload.memory.sizes import format_bytes, parse_bytes
from offload.memory.tiers import Tier

if TYPE_CHECKING:
    from hetero.runtime.engine import Engine

_FIRST_LOOK = 2  # steps: the first has things to do that no other has
_LEAST_GAIN = 0.05  # of the step's seconds: predictions are not better than that
_OTHER_SECONDS = 0.25  # of computing, more or less than was planned with
_NO_LIMIT = (1 << 63) - 1  # bytes


class Replanner:
    """Chooses placements for an engine's chunk groups anew and carries them out.

    Of several ranks all must do so.
    """

    def __init__(self, engine: Engine, planner: Planner | None) -> None:
        """Without a `planner` placements are chosen by sizes, as place() does."""
        self._engine = engine
        self._beside = BesideMemory(engine.ledger, engine.backend)
        self.tracer = StepTracer(engine.model, engine.chunk_groups, self._beside)
        self._planner = planner
        self._first_chunk_groups = len(engine.chunk_groups)
        self._relocation = Relocation(engine)
        self.changes: list[Change] = []
        self._steps = 0
        self._next_look = _FIRST_LOOK  # the first step after which it is looked again
        self._patience = _FIRST_LOOK  # steps until the look after that
        self._planned_with: Trace | None = None
        self._waiting = False  # homes were in use when they were to move
        self._keeps_optim_states = (
            engine.config.host_memory is not None
        )  # in RAM that the user gave
        try:
            self.limits = self._make_limits()
        except BaseException:
            self.remove()
            raise

    def _make_limits(self) -> dict[Tier, MemoryLimit]:
        """All ranks have the same limits, or none: they ask each other when they have one."""
        engine, config = self._engine, self._engine.config
        found = {}
        for tier, own in (
            (Tier.HOST, config.process_bytes(engine.world.local_ranks)),
            (Tier.DEVICE, usable_device_bytes(engine.backend)),
        ):
            limit = engine.world.agree(_NO_LIMIT if own is None else own, min, "a limit")
            if limit != _NO_LIMIT:
                wanted = config.budget(tier) or limit
                found[tier] = MemoryLimit(tier, limit, wanted, self._beside)
        return found

    @property
    def moved_bytes(self) -> int:
        """Of homes, so far."""
        return self._relocation.moved.total()

    @property
    def chooser(self) -> Choose:
        """What decides on a placement."""
        return self._planner or place

    def plan_of(self, chunk_group: ChunkGroup) -> Plan | None:
        """The plan that the chunk group's placement came of, if there is a profile."""
        if self._planner is None:
            return None
        return self._planner.plans(chunk_group.layout, chunk_group.placement)

    # When

    @property
    def traces(self) -> list[Trace]:
        """What different steps use, and how long they compute; the last seen is the last."""
        return list(self.tracer.traces)

    def remove(self) -> None:
        """Looks at the model no more."""
        self.tracer.remove()
        self._beside.remove()

    def end_step(self) -> None:
        """A step is over.

        Raises BudgetError if the process needs more than it may have, once all else is done, and
        what a migration met that could not be undone.
        """
        seen = self.tracer.end_step()
        needed = {tier: self._needed_bytes(tier, seen) for tier in self.limits}
        self._beside.reset()
        for chunk_group in self._engine.chunk_groups:
            chunk_group.order.end_step()
        self._steps += 1
        refusal = None
        for tier, limit in self.limits.items():
            refusal = self._keep_within(limit, needed[tier]) or refusal
        if self._steps == _FIRST_LOOK and self._planner is None:
            self._raise_device()
        if self._planner is not None and planning_matters(self._engine.config):
            trace = self._worth_a_look(seen)
            if trace is not None:
                self._look(trace)
        if refusal is not None:
            raise refusal

    def _worth_a_look(self, seen: Seen | None) -> Trace | None:
        """The trace to plan with; None: not now. The same on all ranks: the first one's."""
        everyone = self._engine.world.everyone
        if self._steps < self._next_look:
            return None
        if everyone is not None:
            # Ranks look at once and not whenever one of them has a reason.
            self._look_later()
            mine = b"" if seen is None else _encoded(seen.trace)
            first = everyone.all_gather_bytes(mine, "a step's trace")[0]
            return _decoded(first) if first else None
        if seen is None or (self._planned_with is not None and not self._differs(seen)):
            return None
        return seen.trace

    def _differs(self, seen: Seen) -> bool:
        """Whether a step is another one than was planned for, and not just once."""
        planned, now = self._planned_with, seen.trace
        assert planned is not None
        if self._waiting:
            return True
        if (planned.micro_batches, planned.uses) != (now.micro_batches, now.uses):
            return seen.times >= max(2, self._times_of(planned))
        before_s = planned.forward_s + planned.backward_s
        return abs(now.forward_s + now.backward_s - before_s) > _OTHER_SECONDS * before_s

    def _times_of(self, trace: Trace) -> int:
        """How often it was seen; what most steps do is planned for."""
        return self.tracer.traces.times(trace)

    def _look_later(self) -> None:
        self._next_look = self._steps + self._patience
        self._patience *= 2

    def _look(self, trace: Trace) -> None:
        """Plans with the trace, and goes over to what is better by so much."""
        planner, engine, agree = self._planner, self._engine, self._engine.world.agree
        assert planner is not None
        wanted = {tier: self._raised(limit) for tier, limit in self.limits.items()}
        planner.forget()
        budgets = self.budgets(wanted)
        planner.traces = self._by_chunk_group(trace)
        planner.traces = {
            number: computing_alone(self._problem(chunk_group, budgets), chunk_group.placement)
            for number, chunk_group in enumerate(engine.chunk_groups)
        }
        placements = self.choose(budgets)
        now = [self._as_placed(chunk_group, budgets) for chunk_group in engine.chunk_groups]
        plans = [
            planner.plans(chunk_group.layout, made)
            for chunk_group, made in zip(engine.chunk_groups, placements, strict=True)
        ]
        before_s = sum(each.cost.seconds for each in now)
        after_s = sum(each.cost.seconds for each in plans if each is not None)
        self._planned_with, self._waiting = trace, False
        gains = agree(int(before_s - after_s > _LEAST_GAIN * before_s), min, "a gain")
        changed = gains and self._change(placements, wanted, "a traced step", before_s, after_s)
        if not changed:
            for chunk_group, plan in zip(engine.chunk_groups, now, strict=True):
                chunk_group.note_plan(plan)
        if engine.world.everyone is None:
            self._look_later()

    def _change(
        self,
        placements: Sequence[Placement],
        wanted: Mapping[Tier, int],
        why: str,
        before_s: float | None = None,
        after_s: float | None = None,
    ) -> bool:
        """Goes over, and says so; or says why not: the step was made, and would be made twice by
        whom an error tells to make it again.

        Raises what a migration met that could not be undone, and PeerError.
        """
        before = [chunk_group.placement for chunk_group in self._engine.chunk_groups]
        try:
            self._go_over(placements, wanted, why, before_s, after_s)
        except (HeteroError, OSError) as error:
            undone = before == [chunk_group.placement for chunk_group in self._engine.chunk_groups]
            if isinstance(error, PeerError) or not undone:
                raise
            self._waiting = True  # for a user's tensor or graph, or for space; perhaps not for ever
            note = f"homes could not move for {why}: {error}"
            if not isinstance(error, InUseError) and note not in self._engine.notes:
                self._engine.notes.append(note)
            return False
        self._engine.notes.append(self.changes[-1].words())
        return True

    def _go_over(
        self,
        placements: Sequence[Placement],
        wanted: Mapping[Tier, int],
        why: str,
        before_s: float | None = None,
        after_s: float | None = None,
    ) -> None:
        """Goes over, and remembers it. Raises as Relocation.go_over()."""
        moved = self._relocation.moved.copy()
        try:
            self._relocation.go_over(placements, wanted)
        finally:
            self._beside.reset()  # what it took meanwhile is no step's
        routes = self._relocation.moved - moved
        self.changes.append(Change(self._steps, why, routes, before_s, after_s))

    def _by_chunk_group(self, trace: Trace) -> dict[int, Trace]:
        """Each chunk group's uses, what stayed where compute is included, and its part of the
        seconds.
        """
        layouts = [chunk_group.layout for chunk_group in self._engine.chunk_groups]
        whole = completed(trace, layouts)
        numel = sum(layout.numel for layout in layouts)
        return {
            n: whole.of_chunk_group(n, layout.numel / numel) for n, layout in enumerate(layouts)
        }

    def _as_placed(self, chunk_group: ChunkGroup, budgets: Budgets) -> Plan:
        """What the chunk group's placement now is expected to take."""
        return as_placed(self._problem(chunk_group, budgets), chunk_group.placement)

    def _problem(self, chunk_group: ChunkGroup, budgets: Budgets) -> Problem:
        assert self._planner is not None
        chunk_groups = self._engine.chunk_groups
        others = [each.placement for each in chunk_groups[chunk_groups.index(chunk_group) + 1 :]]
        return self._planner.problem(
            chunk_group.layout,
            chunk_group.dtypes,
            self._engine.config.placement_policy,
            replace(
                budgets,
                taken_host=sum(made.host_bytes for made in others),
                taken_disk=sum(made.disk_bytes for made in others),
                taken_device=sum(made.device_bytes for made in others),
            ),
            chunk_group.min_gathered_slots,
            chunk_group.reduce_at_end,
        )

    # What a process, and a device, hold altogether

    def _needed_bytes(self, tier: Tier, seen: Seen | None) -> int:
        """The most that the step had beside the model state."""
        peak = Moment(0, 0, 0) if seen is None else seen.trace.peak()
        if tier is Tier.DEVICE:
            return max(peak.device_bytes, self._beside.device_bytes())
        return max(peak.host_bytes, self.tracer.take_beside_bytes())

    def _keep_within(self, limit: MemoryLimit, needed: int) -> BudgetError | None:
        """Lowers a budget if its limit is passed, or was in the step that had `needed` beside it.

        Returns what is to be raised if it cannot be so low.
        """
        engine, agree, tier = self._engine, self._engine.world.agree, limit.tier
        needed = agree(needed, max, "memory")
        limit.peak_bytes = max(limit.peak_bytes, needed)
        # What is charged may differ between ranks.
        if not agree(int(limit.passed(needed)), max, "a limit"):
            return None
        if tier is Tier.HOST:
            trim_heap()  # what the allocator keeps counts, too
        left = agree(limit.state_bytes(needed), min, "a budget")
        before = engine.ledger.budget_bytes[tier.value] or 0
        try:
            placements = self.choose(self.budgets({tier: max(1, left)}))
        except PlacementError as refusal:
            return BudgetError(too_much(tier, limit.limit, needed, left, refusal))
        who, name = SAID[tier]
        why = (
            f"the {who} needs {format_bytes(needed)} beside the model state, so {name} "
            f"is {format_bytes(left)} instead of {format_bytes(before)}"
        )
        # If it cannot be now, the next step tries again.
        self._change(placements, {tier: left}, why)
        return None

    def _raised(self, limit: MemoryLimit) -> int:
        """The budget of the limit's tier; once it may be more: at first a part was left for what
        nobody knew."""
        budget = self._engine.ledger.budget_bytes[limit.tier.value] or 0
        allowed = self._engine.world.agree(limit.state_bytes(limit.peak_bytes), min, "a budget")
        if not limit.was_raised:
            budget = max(budget, allowed)
        limit.was_raised = True
        return budget

    def _raise_device(self) -> None:
        """Without a profile, too, a device is used as far as steps have shown that it can be."""
        limit = self.limits.get(Tier.DEVICE)
        if limit is None or limit.was_raised:
            return
        wanted = {Tier.DEVICE: self._raised(limit)}
        placements = self.choose(self.budgets(wanted))
        now = [chunk_group.placement for chunk_group in self._engine.chunk_groups]
        if not all(map(same, now, placements)):
            left = format_bytes(limit.peak_bytes)
            self._change(placements, wanted, f"a step needs {left} of the device beside the state")

    # Choosing

    def budgets(self, wanted: Mapping[Tier, int]) -> Budgets:
        """The engine's, but for those that are `wanted`."""
        engine = self._engine
        limits = {tier: engine.ledger.budget_bytes[tier.value] for tier in Tier} | dict(wanted)
        later = sum(
            chunk_group.placement.host_bytes
            for chunk_group in engine.chunk_groups[self._first_chunk_groups :]
        )
        device = limits[Tier.DEVICE]
        return Budgets(
            host=limits[Tier.HOST] or 0,
            disk=limits[Tier.DISK] or 0,
            gathered=None if engine.backend.separate else device,
            device=device if engine.backend.separate else None,
            keep_optim_states=self._keeps_optim_states,
            reserved_host=max(0, engine.config.reserve_bytes - later),
            under_construction=False,
        )

    def choose(self, budgets: Budgets) -> list[Placement]:
        """A placement for each chunk group, as plan_banks() does: the last first, the first gets
        the rest.

        Raises PlacementError.
        """
        chunk_groups = self._engine.chunk_groups
        for thrifty in (False, True):
            taken = budgets
            made: list[Placement] = []
            try:
                for number in reversed(range(len(chunk_groups))):
                    chunk_group = chunk_groups[number]
                    made.append(self._choose_for(chunk_group, taken, thrifty and number > 0))
                    slot = SlotBytes.of(chunk_group.layout, chunk_group.dtypes)
                    gathered = made[-1].gathered_slots * slot.gathered
                    taken = replace(
                        taken,
                        taken_host=taken.taken_host + made[-1].host_bytes,
                        taken_disk=taken.taken_disk + made[-1].disk_bytes,
                        taken_gathered=taken.taken_gathered + gathered,
                        taken_device=taken.taken_device + made[-1].device_bytes,
                    )
            except PlacementError:
                if thrifty or len(chunk_groups) == 1:
                    raise
            else:
                return made[::-1]
        raise AssertionError("unreachable")

    def _choose_for(self, chunk_group: ChunkGroup, budgets: Budgets, smallest: bool) -> Placement:
        def placed(budgets: Budgets) -> Placement:
            return self.chooser(
                chunk_group.layout,
                chunk_group.dtypes,
                self._engine.config.placement_policy,
                budgets,
                chunk_group.min_gathered_slots,
                chunk_group.reduce_at_end,
            )

        if not smallest:
            return placed(budgets)
        try:
            return placed(replace(budgets, host=0))
        except PlacementError as refusal:
            return placed(replace(budgets, host=refusal.smallest_host_bytes))

    def set_budget(
        self, host_memory: int | str | None = None, device_memory: int | str | None = None
    ) -> None:
        """As Engine.set_budget()."""
        engine = self._engine
        engine.schedule.require_whole("set_budget()")
        wanted: dict[Tier, int] = {}
        for tier, value in ((Tier.HOST, host_memory), (Tier.DEVICE, device_memory)):
            if value is not None:
                try:
                    wanted[tier] = parse_bytes(value)
                except ValueError as error:
                    raise ValueError(f"{tier.value}_memory: {error}") from None
        if not wanted:
            raise ValueError("set_budget() needs host_memory, device_memory, or both")
        wanted = {t: engine.world.agree(nbytes, min, "a budget") for t, nbytes in wanted.items()}
        budgets = self.budgets(wanted)
        if Tier.HOST in wanted:
            budgets = replace(budgets, keep_optim_states=True)
        try:
            placements = self.choose(budgets)
        except PlacementError as refusal:
            policy = engine.config.placement_policy
            raise BudgetError(cannot_become(wanted, budgets, policy, refusal)) from None
        words = [f"{t.value}_memory={format_bytes(nbytes)}" for t, nbytes in wanted.items()]
        self._go_over(placements, wanted, f"set_budget({', '.join(words)})")
        self._keeps_optim_states = budgets.keep_optim_states
        # The user has decided: it is lowered if it must be, and not raised.
        for tier, limit in self.limits.items():
            if tier in wanted:
                limit.was_raised = True
                limit.wanted_bytes = wanted[tier]


def _encoded(trace: Trace) -> bytes:
    uses = [(use.group_index, use.chunk, use.phase.value) for use in trace.uses]
    return json.dumps([uses, trace.micro_batches, trace.forward_s, trace.backward_s]).encode()


def _decoded(content: bytes) -> Trace:
    uses, micro_batches, forward_s, backward_s = json.loads(content)
    return Trace(
        tuple(Use(chunk_group, chunk, Phase(phase)) for chunk_group, chunk, phase in uses),
        micro_batches,
        forward_s,
        backward_s,
    )
