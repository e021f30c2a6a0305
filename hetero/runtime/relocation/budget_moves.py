"""When an engine's budgets change, and homes with them: by the user's wish, or to keep a limit.

Of several ranks all do so together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hetero.chunk_groups.chunk_group import ChunkGroup
from hetero.planning.group_plans import ChunkGroupPlan, SpecsWithin, place_groups
from hetero.planning.placement import Budgets, GroupSpec, Placement, PlacementError
from hetero.planning.refusal import SAID, cannot_become, too_much
from hetero.runtime.relocation.memory_limit import BesideMemory, MemoryLimit, usable_device_bytes
from hetero.runtime.relocation.moves import InUseError
from hetero.runtime.relocation.relocate import Change, MovingEngine, Relocation, same
from offload.errors import BudgetError, HeteroError, PeerError
from offload.memory.c_heap import trim_heap
from offload.memory.sizes import format_bytes, parse_bytes
from offload.memory.tiers import Tier

_FIRST_STEPS = 2  # the first one does things that no other does
_NO_LIMIT = (1 << 63) - 1  # bytes


class BudgetMoves:
    """Chooses placements for other budgets, and moves homes there."""

    def __init__(self, engine: MovingEngine, beside: BesideMemory) -> None:
        """Nothing has moved yet.

        Args:
            engine: whose homes these are.
            beside: measures what a process and a device hold beside model state.
        """
        self._engine = engine
        self._beside = beside
        self._first_chunk_groups = len(engine.chunk_groups)
        self._relocation = Relocation(engine)
        self.changes: list[Change] = []
        self._steps = 0
        # Optimizer states are kept in RAM that the user has given.
        self._keeps_optim_states = engine.config.host_memory is not None
        self.limits = self._make_limits()

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

    def remove(self) -> None:
        """Measures memory no more."""
        self._beside.remove()

    # What a process, and a device, hold altogether

    def end_step(self, host_bytes: int, device_bytes: int) -> None:
        """A step is over.

        Args:
            host_bytes: the most RAM that it had beside the model state.
            device_bytes: the same on a DEVICE with memory of its own.

        Raises:
            BudgetError: the process needs more than it may have; all else is done.
            HeteroError: a move failed that could not be undone.
        """
        device_bytes = max(device_bytes, self._beside.device_bytes())
        needed = {Tier.HOST: host_bytes, Tier.DEVICE: device_bytes}
        self._beside.reset()
        self._steps += 1
        refusal = None
        for tier, limit in self.limits.items():
            refusal = self._keep_within(limit, needed[tier]) or refusal
        if self._steps >= _FIRST_STEPS:
            self._raise_once()
        if refusal is not None:
            raise refusal

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
            placements = self._place({tier: max(1, left)})
        except PlacementError as refusal:
            return BudgetError(too_much(tier, limit.limit, needed, left, refusal))
        # If it cannot be now, the next step tries again.
        self._change(placements, {tier: left}, _why(tier, needed, left, before))
        return None

    def _raise_once(self) -> None:
        """Budgets of which a part was left for what steps need become what steps have shown."""
        ledger, agree = self._engine.ledger, self._engine.world.agree
        for tier, limit in self.limits.items():
            if limit.was_raised:
                continue
            before = ledger.budget_bytes[tier.value] or 0
            allowed = agree(limit.state_bytes(limit.peak_bytes), min, "a budget")
            limit.was_raised = True
            if allowed <= before:
                continue
            try:
                placements = self._place({tier: allowed})
            except PlacementError:  # with more of this, more is needed of what there is no more of
                continue
            now = [chunk_group.placement for chunk_group in self._engine.chunk_groups]
            if not all(map(same, now, placements)):
                why = _why(tier, limit.peak_bytes, allowed, before)
                failure = self._change(placements, {tier: allowed}, why)
                limit.was_raised = not isinstance(failure, InUseError)  # else the next step tries

    def _change(
        self, placements: Sequence[Placement], wanted: Mapping[Tier, int], why: str
    ) -> Exception | None:
        """Moves homes and notes it; or says why not, and notes that.

        The step was made: an error would tell the user to make it again.

        Returns:
            What prevented it; None if homes have moved.

        Raises:
            PeerError, HeteroError, OSError: a move failed that could not be undone.
        """
        engine = self._engine
        before = [chunk_group.placement for chunk_group in engine.chunk_groups]
        try:
            self._go_over(placements, wanted, why)
        except (HeteroError, OSError) as error:
            undone = before == [chunk_group.placement for chunk_group in engine.chunk_groups]
            if isinstance(error, PeerError) or not undone:
                raise
            note = f"homes could not move, although {why}: {error}"
            if not isinstance(error, InUseError) and note not in engine.notes:
                engine.notes.append(note)
            return error
        engine.notes.append(self.changes[-1].words())
        return None

    def _go_over(
        self, placements: Sequence[Placement], wanted: Mapping[Tier, int], why: str
    ) -> None:
        """Moves homes, and remembers it. Raises as Relocation.go_over()."""
        moved = self._relocation.moved.copy()
        try:
            self._relocation.go_over(placements, wanted)
        finally:
            self._beside.reset()  # what it took meanwhile is no step's
        self.changes.append(Change(self._steps, why, self._relocation.moved - moved))

    # The user's wish

    def set_budget(
        self, host_memory: int | str | None = None, device_memory: int | str | None = None
    ) -> None:
        """Makes these the budgets, and moves homes; what is not given stays.

        Args:
            host_memory: of RAM, as hetero.Config takes it.
            device_memory: of DEVICE.

        Raises:
            ValueError: neither is given, or one is no size.
            BudgetError: no placement fits; it has the smallest budget that works.
            HeteroError, OSError: as Relocation.go_over() raises them.
        """
        engine = self._engine
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
        keeps = self._keeps_optim_states or Tier.HOST in wanted
        try:
            placements = self._place(wanted, keeps)
        except PlacementError as refusal:
            policy, budgets = engine.config.placement_policy, self._budgets(wanted)
            raise BudgetError(cannot_become(wanted, budgets, policy, refusal)) from None
        words = [f"{t.value}_memory={format_bytes(nbytes)}" for t, nbytes in wanted.items()]
        self._go_over(placements, wanted, f"set_budget({', '.join(words)})")
        self._keeps_optim_states = keeps
        # The user has decided: it is lowered if it must be, and not raised.
        for tier, limit in self.limits.items():
            if tier in wanted:
                limit.was_raised = True
                limit.wanted_bytes = wanted[tier]

    # Placements

    def group_plans(self) -> list[ChunkGroupPlan]:
        """The chunk groups as they are placed, each with the budgets that the later ones leave."""
        left = self._budgets({})
        plans = []
        for chunk_group in reversed(self._engine.chunk_groups):
            plans.append(ChunkGroupPlan(self._spec(chunk_group, left), chunk_group.placement))
            left = left.minus(chunk_group.placement, plans[-1].spec.slot)
        return plans[::-1]

    def _place(
        self, wanted: Mapping[Tier, int], keeps_optim_states: bool | None = None
    ) -> list[Placement]:
        """A placement for each chunk group within the budgets, of which some are `wanted`.

        Raises:
            PlacementError: nothing fits; it has the smallest budgets that work.
        """

        def specs_of(chunk_group: ChunkGroup) -> SpecsWithin:
            return lambda left: [self._spec(chunk_group, left)]

        budgets = self._budgets(wanted)
        if keeps_optim_states is not None:
            budgets = replace(budgets, keep_optim_states=keeps_optim_states)
        groups = [specs_of(chunk_group) for chunk_group in self._engine.chunk_groups]
        return [plan.placement for plan in place_groups(groups, budgets)]

    def _spec(self, chunk_group: ChunkGroup, budgets: Budgets) -> GroupSpec:
        config = self._engine.config
        return GroupSpec(
            chunk_group.layout,
            chunk_group.dtypes,
            config.placement_policy,
            budgets,
            chunk_group.plan.min_gathered_slots,
            reduce_at_end=chunk_group.reduce_at_end,
            overlaps_updates=config.overlap.repeats,
        )

    def _budgets(self, wanted: Mapping[Tier, int]) -> Budgets:
        """The engine's budgets, but for those that are `wanted`."""
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


def _why(tier: Tier, needed: int, left: int, before: int) -> str:
    owner, budget = SAID[tier]
    return (
        f"the {owner} needs {format_bytes(needed)} beside the model state, so {budget} is "
        f"{format_bytes(left)} instead of {format_bytes(before)}"
    )
