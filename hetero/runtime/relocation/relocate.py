"""Moves the homes of an engine's chunk groups to other placements, on all ranks or on none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from hetero.chunk_groups.shared import Shared
from hetero.planning.placement import Placement
from hetero.runtime.modules.param_registry import ParamRegistry
from hetero.runtime.relocation.migration import InUseError, Migration
from offload.errors import BudgetError
from offload.memory.sizes import format_bytes
from offload.memory.tiers import Tier

# Bytes of homes by where they were and where they are.
Routes = Counter[tuple[Tier, Tier]]


@dataclass(frozen=True)
class Change:
    """Homes that moved.

    Attributes:
        step: after which step, from 1.
        why: in words.
        routes: bytes by where they were and where they are.
    """

    step: int
    why: str
    routes: Routes

    @property
    def moved_bytes(self) -> int:
        """Of all routes together."""
        return self.routes.total()

    def words(self) -> str:
        """A sentence for people."""
        ways = ", ".join(
            f"{format_bytes(n)} from {of.name} to {to.name}" for (of, to), n in self.routes.items()
        )
        return f"after step {self.step} homes moved ({ways or 'none'}): {self.why}"


class Relocation:
    """Carries out what was chosen, within the larger of the old and the new budgets."""

    def __init__(
        self,
        params: ParamRegistry,
        shared: Shared,
        pause: Callable[[], None],
        homes_moved: Callable[[], None],
    ) -> None:
        """Nothing has moved yet.

        Args:
            params: whose homes move; more of them may come.
            pause: waits until no update is under way. Raises InUseError while a forward is running.
            homes_moved: called when homes are elsewhere; whatever knows of them must look again.
        """
        self.chunk_groups = params.chunk_groups
        self.shared = shared
        self.world = self.chunk_groups[0].world
        self._params = params
        self._pause = pause
        self._homes_moved = homes_moved

    def go_over(self, placements: Sequence[Placement], wanted: Mapping[Tier, int]) -> Routes:
        """Moves homes until the chunk groups are placed as wanted; returns what has moved.

        Args:
            placements: one per chunk group.
            wanted: budgets in bytes that hold from then on.

        Raises:
            InUseError, BudgetError, StoreError, OSError: nothing is changed.
            HeteroError: another rank met one of these; or a read failed, after which what could not
                be read stays on NVMe.
        """
        ledger = self.shared.ledger
        before = {tier: ledger.budget_bytes[tier.value] for tier in wanted}
        self._pause()
        self._together(None)  # nobody asks for anything any more
        self._params.forget_gathers()
        for chunk_group in self.chunk_groups:
            # Copies beyond the plan, of one rank perhaps, need RAM.
            chunk_group.params.copies.cache.shrink()
        for tier, nbytes in wanted.items():
            old = before[tier]
            if old is not None and nbytes > old:
                ledger.set_budget(tier, nbytes)
        try:
            return self._migrate(placements, wanted)
        except BaseException:
            self.shared.backend.trim()  # of second homes that were freed
            for tier, old in before.items():
                if old is not None and ledger.in_use_bytes[tier.value] <= old:
                    ledger.set_budget(tier, old)
            raise

    def _migrate(self, placements: Sequence[Placement], wanted: Mapping[Tier, int]) -> Routes:
        ledger = self.shared.ledger
        host_bytes = wanted.get(Tier.HOST, ledger.budget_bytes[Tier.HOST.value] or 0)
        spare_bytes = host_bytes - sum(made.host_bytes for made in placements)
        migrations = [
            Migration(chunk_group, made)
            for chunk_group, made in zip(self.chunk_groups, placements, strict=True)
            if not same(chunk_group.placement, made)
        ]
        self._prepare(migrations)
        failure: BaseException | None = None
        moved: Routes = Counter()
        for migration in migrations:
            migration.leave()
        if migrations:
            self.shared.backend.trim()
        for migration in migrations:
            error = migration.arrive(spare_bytes)
            failure = failure or error
            moved += migration.moved_bytes
        self._homes_moved()
        for tier, nbytes in wanted.items():
            try:
                ledger.set_budget(tier, nbytes)
            except BudgetError as error:
                failure = failure or error
        self._together(failure)
        self._params.begin_gathers()
        return moved

    def _prepare(self, migrations: Sequence[Migration]) -> None:
        """All migrations of all ranks, or none."""
        begun: list[Migration] = []
        failure: Exception | None = None
        try:
            try:
                for migration in migrations:
                    migration.prepare()
                    begun.append(migration)
            except Exception as error:
                failure = error
            self._together(failure)
        except BaseException:
            for migration in begun:
                migration.abandon()
            raise

    def _together(self, failure: BaseException | None) -> None:
        """Returns when no rank has met a failure; raises as ProcessGroups.all_or_none()."""
        if self.world.everyone is not None:
            self._params.finish_transfers("moving homes")
        self.world.all_or_none(failure, "move homes", (InUseError,))


def same(one: Placement, other: Placement) -> bool:
    """Whether homes and slots are the same; bytes may differ by what construction took."""
    return replace(one, host_bytes=0) == replace(other, host_bytes=0)
