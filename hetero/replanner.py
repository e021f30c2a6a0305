"""Other placements for banks that exist: when an engine looks for one, and goes over to it.

After the second step of a training, whose trace has seconds without what is done but once, after a
new sequence of uses was seen twice, and when computing takes another time than it was planned with,
all is planned again with the trace; if that is predicted to save more than 5 % of the step, homes
move. Each time that it changes little, the next look is twice as many steps away.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from hetero.arrangement import Choose
from hetero.bank import Bank
from hetero.cost import Problem
from hetero.memory_limit import BesideMemory, MemoryLimit
from hetero.migration import InUseError, Migration
from hetero.placement import Budgets, Placement, PlacementError, SlotBytes, place
from hetero.plan import Plan, as_placed
from hetero.planner import Planner, planning_matters
from hetero.prediction import computing_alone
from hetero.trace import Phase, Trace, Use, completed
from hetero.traces import Seen, StepTracer
from offload.errors import BudgetError, HeteroError, PeerError
from offload.heap import trim_heap
from offload.sizes import format_bytes, parse_bytes
from offload.tiers import Tier

if TYPE_CHECKING:
    from hetero.engine import Engine

_FIRST_LOOK = 2  # steps: the first has things to do that no other has
_LEAST_GAIN = 0.05  # of the step's seconds: predictions are not better than that
_OTHER_SECONDS = 0.25  # of computing, more or less than was planned with
_NO_LIMIT = (1 << 63) - 1  # bytes


@dataclass(frozen=True)
class Change:
    """Homes that moved after step number `step` (from 1), with the seconds predicted for a step."""

    step: int
    why: str
    moved_bytes: int
    before_s: float | None = None
    after_s: float | None = None

    def words(self) -> str:
        """A sentence for people."""
        said = f"after step {self.step} homes of {format_bytes(self.moved_bytes)} moved: {self.why}"
        if self.before_s is None or self.after_s is None:
            return said
        return f"{said} is predicted to take {self.after_s:.3f} s instead of {self.before_s:.3f} s"


class Replanner:
    """Chooses placements for an engine's banks anew and carries them out.

    Of several ranks all must do so.
    """

    def __init__(self, engine: Engine, planner: Planner | None) -> None:
        """Without a `planner` placements are chosen by sizes, as place() does."""
        config = engine.config
        self._engine = engine
        self._beside = BesideMemory(engine.ledger, engine.backend)
        self.tracer = StepTracer(engine.model, engine.banks, self._beside)
        self._planner = planner
        self._first_banks = len(engine.banks)
        self.moved_bytes = 0  # of homes, so far
        self.changes: list[Change] = []
        self._steps = 0
        self._next_look = _FIRST_LOOK  # the first step after which it is looked again
        self._patience = _FIRST_LOOK  # steps until the look after that
        self._planned_with: Trace | None = None
        self._waiting = False  # homes were in use when they were to move
        # All ranks have the same limit, or none: they ask each other when they have one.
        own_limit = config.process_bytes(engine.world.local_ranks)
        limit = engine.world.agree(_NO_LIMIT if own_limit is None else own_limit, min, "a limit")
        self.limit: MemoryLimit | None = None
        if limit != _NO_LIMIT:
            self.limit = MemoryLimit(limit, config.budget(Tier.HOST) or limit, self._beside)
        self._peak_bytes = 0  # the most RAM beside model state
        self._was_raised = False

    @property
    def chooser(self) -> Choose:
        """What decides on a placement."""
        return self._planner or place

    def plan_of(self, bank: Bank) -> Plan | None:
        """The plan that the bank's placement came of, if there is a profile."""
        if self._planner is None:
            return None
        return self._planner.plans(bank.layout, bank.placement)

    # When

    @property
    def traces(self) -> list[Trace]:
        """What different steps use, and how long they compute; the last seen is the last."""
        return list(self.tracer.traces)

    def cover(self, model: torch.nn.Module) -> None:
        """Nothing: the model is the same."""

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
        self._beside.reset()
        for bank in self._engine.banks:
            bank.order.end_step()
        self._steps += 1
        refusal = None
        if self.limit is not None:
            refusal = self._keep_within(self.limit, seen, self.tracer.take_beside_bytes())
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
        host_bytes = engine.ledger.budget_bytes[Tier.HOST.value] or 0
        if self.limit is not None:
            # At first a part was left for what nobody knew.
            allowed = agree(self.limit.host_bytes(self._peak_bytes), min, "a budget")
            if not self._was_raised:
                host_bytes = max(host_bytes, allowed)
            self._was_raised = True
        planner.forget()
        budgets = self.budgets(host_bytes)
        planner.traces = self._by_bank(trace)
        planner.traces = {
            number: computing_alone(self._problem(bank, budgets), bank.placement)
            for number, bank in enumerate(engine.banks)
        }
        placements = self.choose(budgets)
        now = [self._as_placed(bank, budgets) for bank in engine.banks]
        plans = [
            planner.plans(bank.layout, made)
            for bank, made in zip(engine.banks, placements, strict=True)
        ]
        before_s = sum(each.cost.seconds for each in now)
        after_s = sum(each.cost.seconds for each in plans if each is not None)
        self._planned_with, self._waiting = trace, False
        gains = agree(int(before_s - after_s > _LEAST_GAIN * before_s), min, "a gain")
        changed = gains and self._change(placements, host_bytes, "a traced step", before_s, after_s)
        if not changed:
            for bank, plan in zip(engine.banks, now, strict=True):
                bank.plan = plan
        if engine.world.everyone is None:
            self._look_later()

    def _change(
        self,
        placements: Sequence[Placement],
        host_bytes: int,
        why: str,
        before_s: float | None = None,
        after_s: float | None = None,
    ) -> bool:
        """Goes over, and says so; or says why not: the step was made, and would be made twice by
        whom an error tells to make it again.

        Raises what a migration met that could not be undone, and PeerError.
        """
        moved, before = self.moved_bytes, [bank.placement for bank in self._engine.banks]
        try:
            self.go_over(placements, host_bytes)
        except (HeteroError, OSError) as error:
            undone = before == [bank.placement for bank in self._engine.banks]
            if isinstance(error, PeerError) or not undone:
                raise
            self._waiting = True  # for a user's tensor or graph, or for space; perhaps not for ever
            note = f"homes could not move for {why}: {error}"
            if not isinstance(error, InUseError) and note not in self._engine.notes:
                self._engine.notes.append(note)
            return False
        change = Change(self._steps, why, self.moved_bytes - moved, before_s, after_s)
        self.changes.append(change)
        self._engine.notes.append(change.words())
        return True

    def _by_bank(self, trace: Trace) -> dict[int, Trace]:
        """Each bank's uses, what stayed where compute is included, and its part of the seconds."""
        layouts = [bank.layout for bank in self._engine.banks]
        whole = completed(trace, layouts)
        numel = sum(layout.numel for layout in layouts)
        return {n: whole.of_bank(n, layout.numel / numel) for n, layout in enumerate(layouts)}

    def _as_placed(self, bank: Bank, budgets: Budgets) -> Plan:
        """What the bank's placement now is expected to take."""
        return as_placed(self._problem(bank, budgets), bank.placement)

    def _problem(self, bank: Bank, budgets: Budgets) -> Problem:
        assert self._planner is not None
        banks = self._engine.banks
        others = [each.placement for each in banks[banks.index(bank) + 1 :]]
        return self._planner.problem(
            bank.layout,
            bank.dtypes,
            self._engine.config.placement_policy,
            replace(
                budgets,
                taken_host=sum(made.host_bytes for made in others),
                taken_disk=sum(made.disk_bytes for made in others),
                taken_device=sum(made.device_bytes for made in others),
            ),
            bank.min_gathered_slots,
            bank.held,
        )

    # The process's memory

    def _keep_within(
        self, limit: MemoryLimit, seen: Seen | None, beside_bytes: int
    ) -> BudgetError | None:
        """Lowers the budget of RAM if the process has passed its limit, or did in the step.

        Returns what is to be raised if it cannot be so low.
        """
        engine, agree = self._engine, self._engine.world.agree
        needed = max(beside_bytes, 0 if seen is None else seen.trace.peak().host_bytes)
        needed = agree(needed, max, "memory")
        self._peak_bytes = max(self._peak_bytes, needed)
        # What is charged may differ between ranks.
        if not agree(int(limit.passed(needed)), max, "a limit"):
            return None
        trim_heap()  # what the allocator keeps counts, too
        host_bytes = agree(limit.host_bytes(needed), min, "a budget")
        before = engine.ledger.budget_bytes[Tier.HOST.value] or 0
        try:
            placements = self.choose(self.budgets(max(1, host_bytes)))
        except PlacementError as refusal:
            least = refusal.smallest_host_bytes
            return BudgetError(
                f"process_memory is {format_bytes(limit.limit)} ({limit.limit} bytes), and a step "
                f"needs {format_bytes(needed)} beside the model state, for activations, "
                f"temporaries and libraries; that leaves {format_bytes(max(0, host_bytes))} for "
                f"model state, and the smallest that works is {format_bytes(least)} ({least} "
                f"bytes); raise process_memory, or use smaller or checkpointed micro-batches (this "
                f"step was made: do not make it again)"
            )
        why = (
            f"the process needs {format_bytes(needed)} beside the model state, so host_memory "
            f"is {format_bytes(host_bytes)} instead of {format_bytes(before)}"
        )
        self._change(placements, host_bytes, why)  # if it did not, the next step tries again
        return None

    # Choosing

    def budgets(self, host_bytes: int) -> Budgets:
        """The engine's, with other RAM."""
        engine, limits = self._engine, self._engine.ledger.budget_bytes
        later = sum(bank.placement.host_bytes for bank in engine.banks[self._first_banks :])
        device = limits[Tier.DEVICE.value]
        return Budgets(
            host=host_bytes,
            disk=limits[Tier.DISK.value] or 0,
            gathered=None if engine.backend.separate else device,
            device=device if engine.backend.separate else None,
            keep_records=engine.config.host_memory is not None,
            reserved_host=max(0, engine.config.reserve_bytes - later),
            under_construction=False,
        )

    def choose(self, budgets: Budgets) -> list[Placement]:
        """A placement for each bank, as plan_banks() does: the last first, the first gets the rest.

        What is on DEVICE stays there. Raises PlacementError.
        """
        banks = self._engine.banks
        for thrifty in (False, True):
            taken = budgets
            made: list[Placement] = []
            try:
                for number in reversed(range(len(banks))):
                    bank = banks[number]
                    made.append(self._choose_for(bank, taken, thrifty and number > 0))
                    slot = SlotBytes.of(bank.layout, bank.dtypes)
                    gathered = made[-1].gathered_slots * slot.gathered
                    taken = replace(
                        taken,
                        taken_host=taken.taken_host + made[-1].host_bytes,
                        taken_disk=taken.taken_disk + made[-1].disk_bytes,
                        taken_gathered=taken.taken_gathered + gathered,
                        taken_device=taken.taken_device + made[-1].device_bytes,
                    )
            except PlacementError:
                if thrifty or len(banks) == 1:
                    raise
            else:
                return made[::-1]
        raise AssertionError("unreachable")

    def _choose_for(self, bank: Bank, budgets: Budgets, smallest: bool) -> Placement:
        choose = self.chooser
        policy, before = self._engine.config.placement_policy, bank.placement
        budgets = replace(budgets, on_device=before.param.count(Tier.DEVICE))

        def placed(budgets: Budgets) -> Placement:
            return choose(
                bank.layout, bank.dtypes, policy, budgets, bank.min_gathered_slots, bank.held
            )

        if smallest:
            try:
                made = placed(replace(budgets, host=0))
            except PlacementError as refusal:
                made = placed(replace(budgets, host=refusal.smallest_host_bytes))
        else:
            made = placed(budgets)
        if not self._engine.backend.separate:
            return made
        # Slots on DEVICE stay, too.
        kept = replace(
            made,
            gathered_slots=before.gathered_slots,
            drain_bytes=before.drain_bytes,
            device_bytes=before.device_bytes,
        )
        if self._planner is not None:
            self._planner.changed(bank.layout, made, kept)
        return kept

    # Carrying out

    def set_budget(self, host_memory: int | str) -> None:
        """As Engine.set_budget()."""
        engine = self._engine
        engine.early.require_whole("set_budget()")
        try:
            wanted = parse_bytes(host_memory)
        except ValueError as error:
            raise ValueError(f"host_memory: {error}") from None
        wanted = engine.world.agree(wanted, min, "a budget")
        budgets = replace(self.budgets(wanted), keep_records=True)
        try:
            placements = self.choose(budgets)
        except PlacementError as refusal:
            least = refusal.smallest_host_bytes
            if least <= wanted:  # it is the disk
                raise BudgetError(
                    f"host_memory cannot become {format_bytes(wanted)} ({wanted} bytes): {refusal}"
                ) from None
            raise BudgetError(
                f"host_memory cannot become {format_bytes(wanted)} ({wanted} bytes): the smallest "
                f"that works is {format_bytes(least)} ({least} bytes), under policy "
                f"{engine.config.placement_policy!r}, with {format_bytes(budgets.disk)} of NVMe"
            ) from None
        self.go_over(placements, wanted)
        # The user has decided: it is lowered if it must be, and not raised.
        self._was_raised = True
        if self.limit is not None:
            self.limit.wanted_bytes = wanted

    def go_over(self, placements: Sequence[Placement], host_bytes: int) -> None:
        """Makes the banks what `placements` say, within the larger of both budgets of RAM.

        From then on `host_bytes` are the budget. Raises as Engine.set_budget(); if nothing could be
        written, or something is in use, nothing is changed.
        """
        engine, ledger = self._engine, self._engine.ledger
        before = ledger.budget_bytes[Tier.HOST.value]
        if engine._module_hooks.running:
            raise InUseError("homes cannot move while a forward is running; call it between steps")
        engine.unfinished.finish_all()
        self._together(None)  # nobody asks for anything any more
        for bank in engine.banks:
            bank.params.shrink()  # copies beyond the plan, of one rank perhaps, need RAM
        if before is not None and host_bytes > before:
            ledger.set_budget(Tier.HOST, host_bytes)
        try:
            self._migrate(placements, host_bytes)
        except BaseException:
            if before is not None and ledger.in_use_bytes[Tier.HOST.value] <= before:
                ledger.set_budget(Tier.HOST, before)
            raise

    def _migrate(self, placements: Sequence[Placement], host_bytes: int) -> None:
        engine = self._engine
        spare_bytes = host_bytes - sum(made.host_bytes for made in placements)
        ways = [
            (bank, Migration(bank.movable, bank.placement, made))
            for bank, made in zip(engine.banks, placements, strict=True)
            if not _same(bank.placement, made)
        ]
        self._prepare([migration for _, migration in ways])
        failure: BaseException | None = None
        for _, migration in ways:
            migration.leave()
        for bank, migration in ways:
            bank.placement, error = migration.arrive(spare_bytes)
            failure = failure or error
            self.moved_bytes += migration.moved_bytes
        for hooks in engine._model_hooks:
            hooks.cover(engine.model)
        for bank in engine.banks:
            bank.plan = self.plan_of(bank)
        try:
            engine.ledger.set_budget(Tier.HOST, host_bytes)
        except BudgetError as error:
            failure = failure or error
        self._together(failure)

    def _prepare(self, migrations: Sequence[Migration]) -> None:
        """All migrations of all ranks, or none."""
        begun: list[Migration] = []
        failure: Exception | None = None
        try:
            for migration in migrations:
                migration.prepare()
                begun.append(migration)
        except Exception as error:
            failure = error
        except BaseException:
            for migration in begun:
                migration.abandon()
            raise
        try:
            self._together(failure)
        except BaseException:
            for migration in begun:
                migration.abandon()
            raise

    def _together(self, failure: BaseException | None) -> None:
        """Until all ranks are here; raises what this one met, or that another one met something."""
        engine = self._engine
        everyone = engine.world.everyone
        if everyone is None:
            if failure is not None:
                raise failure
            return
        engine.params.settle()
        mine = "" if failure is None else f"{isinstance(failure, InUseError):d}{failure}"
        found = everyone.all_gather_bytes(mine.encode(), "moving homes")
        if failure is not None:
            raise failure
        for peer, theirs in enumerate(found):
            if theirs:
                kind = InUseError if theirs[:1] == b"1" else HeteroError
                raise kind(f"{everyone.name(peer)} cannot move homes: {theirs[1:].decode()}")


def _encoded(trace: Trace) -> bytes:
    uses = [(use.bank, use.chunk, use.phase.value) for use in trace.uses]
    return json.dumps([uses, trace.micro_batches, trace.forward_s, trace.backward_s]).encode()


def _decoded(content: bytes) -> Trace:
    uses, micro_batches, forward_s, backward_s = json.loads(content)
    return Trace(
        tuple(Use(bank, chunk, Phase(phase)) for bank, chunk, phase in uses),
        micro_batches,
        forward_s,
        backward_s,
    )


def _same(one: Placement, other: Placement) -> bool:
    """Whether homes and slots are the same; bytes may differ by what construction took."""
    return replace(one, host_bytes=0) == replace(other, host_bytes=0)
