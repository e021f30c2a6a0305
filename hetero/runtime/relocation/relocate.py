"""From placements to others: the chunk groups of an engine go over together, on all ranks or on
none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hetero.planning.placement import Placement
from hetero.runtime.relocation.migration import Migration
from hetero.runtime.relocation.moves import InUseError
from offload.errors import BudgetError
from offload.memory.sizes import format_bytes
from offload.memory.tiers import Tier

if TYPE_CHECKING:
    from hetero.runtime.engine import Engine

# Bytes of homes by where they were and where they are.
Routes = Counter[tuple[Tier, Tier]]


@dataclass(frozen=True)
class Change:
    """Homes that moved after step number `step` (from 1), with the seconds predicted for a step.

    `routes` are bytes by where they were and where they are.
    """

    step: int
    why: str
    routes: Routes
    before_s: float | None = None
    after_s: float | None = None

    @property
    def moved_bytes(self) -> int:
        """Of all routes together."""
        return self.routes.total()

    def words(self) -> str:
        """A sentence for people."""
        ways = ", ".join(
            f"{format_bytes(n)} from {of.name} to {to.name}" for (of, to), n in self.routes.items()
        )
        said = f"after step {self.step} homes moved ({ways or 'none'}): {self.why}"
        if self.before_s is None or self.after_s is None:
            return said
        return f"{said} is predicted to take {self.after_s:.3f} s instead of {self.before_s:.3f} s"


class Relocation:
    """Carries out what was chosen, within the larger of the old and the new budgets."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.moved: Routes = Counter()  # so far

    def go_over(self, placements: Sequence[Placement], wanted: Mapping[Tier, int]) -> None:
        """Makes the chunk groups what `placements` say; from then on budgets are as `wanted` says.

        Raises as Engine.set_budget(); if nothing could be written, or something is in use, nothing
        is changed.
        """
        engine, ledger = self._engine, self._engine.ledger
        before = {tier: ledger.budget_bytes[tier.value] for tier in wanted}
        if engine.is_running:
            raise InUseError("homes cannot move while a forward is running; call it between steps")
        engine.finish_updates()
        self._together(None)  # nobody asks for anything any more
        for chunk_group in engine.chunk_groups:
            chunk_group.params.shrink()  # copies beyond the plan, of one rank perhaps, need RAM
        for tier, nbytes in wanted.items():
            old = before[tier]
            if old is not None and nbytes > old:
                ledger.set_budget(tier, nbytes)
        try:
            self._migrate(placements, wanted)
        except BaseException:
            engine.backend.trim()  # of second homes that were given up
            for tier, old in before.items():
                if old is not None and ledger.in_use_bytes[tier.value] <= old:
                    ledger.set_budget(tier, old)
            raise

    def _migrate(self, placements: Sequence[Placement], wanted: Mapping[Tier, int]) -> None:
        engine = self._engine
        host_bytes = wanted.get(Tier.HOST, engine.ledger.budget_bytes[Tier.HOST.value] or 0)
        spare_bytes = host_bytes - sum(made.host_bytes for made in placements)
        migrations = [
            Migration(chunk_group, made)
            for chunk_group, made in zip(engine.chunk_groups, placements, strict=True)
            if not same(chunk_group.placement, made)
        ]
        self._prepare(migrations)
        failure: BaseException | None = None
        for migration in migrations:
            migration.leave()
        if migrations:
            engine.backend.trim()
        for migration in migrations:
            error = migration.arrive(spare_bytes)
            failure = failure or error
            self.moved += migration.moved_bytes
        engine.homes_moved()
        for chunk_group in engine.chunk_groups:
            chunk_group.note_plan(engine.replanner.plan_of(chunk_group))
        for tier, nbytes in wanted.items():
            try:
                engine.ledger.set_budget(tier, nbytes)
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
        """Returns when no rank has met a failure; raises as ProcessGroups.all_or_none()."""
        world = self._engine.world
        if world.everyone is not None:
            self._engine.params.settle()
        world.all_or_none(failure, "move homes", (InUseError,))


def same(one: Placement, other: Placement) -> bool:
    """Whether homes and slots are the same; bytes may differ by what construction took."""
    return replace(one, host_bytes=0) == replace(other, host_bytes=0)
