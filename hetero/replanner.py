"""Other placements for banks that exist, and how an engine goes over to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hetero.arrangement import Choose
from hetero.bank import Bank
from hetero.migration import InUseError, Migration
from hetero.placement import Budgets, Placement, PlacementError, SlotBytes, place
from hetero.planner import Planner
from offload.errors import BudgetError, HeteroError
from offload.sizes import format_bytes, parse_bytes
from offload.tiers import Tier

if TYPE_CHECKING:
    from hetero.engine import Engine


class Replanner:
    """Chooses placements for an engine's banks anew and carries them out.

    Of several ranks all must do so.
    """

    def __init__(self, engine: Engine, planner: Planner | None) -> None:
        """Without a `planner` placements are chosen by sizes, as place() does."""
        self._engine = engine
        self._planner = planner
        self._first_banks = len(engine.banks)
        self.moved_bytes = 0  # of homes, so far

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
        choose: Choose = self._planner or place
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
            raise BudgetError(
                f"host_memory cannot become {format_bytes(wanted)} ({wanted} bytes): the smallest "
                f"that works is {format_bytes(least)} ({least} bytes), under policy "
                f"{engine.config.placement_policy!r}, with {format_bytes(budgets.disk)} of NVMe"
            ) from None
        self.go_over(placements, wanted)

    def go_over(self, placements: Sequence[Placement], host_bytes: int) -> None:
        """Makes the banks what `placements` say, within the larger of both budgets of RAM.

        From then on `host_bytes` are the budget. Raises as Engine.set_budget(); if nothing could be
        written, or something is in use, nothing is changed.
        """
        engine, ledger = self._engine, self._engine.ledger
        before = ledger.budget_bytes[Tier.HOST.value]
        if engine._module_hooks.running:
            raise InUseError("homes cannot move while a forward is running; call it between steps")
        self._together(None)  # nobody asks for anything any more
        if before is not None and host_bytes > before:
            ledger.set_budget(Tier.HOST, host_bytes)
        try:
            self._migrate(placements, host_bytes)
            ledger.set_budget(Tier.HOST, host_bytes)
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
        failure: Exception | None = None
        for _, migration in ways:
            migration.leave()
        for bank, migration in ways:
            bank.placement, error = migration.arrive(spare_bytes)
            failure = failure or error
            self.moved_bytes += migration.moved_bytes
        for hooks in engine._model_hooks:
            hooks.cover(engine.model)
        for bank, made in zip(engine.banks, placements, strict=True):
            bank.plan = self._planner.plans(bank.layout, made) if self._planner else None
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

    def _together(self, failure: Exception | None) -> None:
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


def _same(one: Placement, other: Placement) -> bool:
    """Whether homes and slots are the same; bytes may differ by what construction took."""
    return replace(one, host_bytes=0) == replace(other, host_bytes=0)
