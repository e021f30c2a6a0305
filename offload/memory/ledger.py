"""Bytes in use per tier and account, checked against the budgets at every change."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping

from offload import timeline
from offload.errors import BudgetError
from offload.memory.sizes import format_bytes
from offload.memory.tiers import Account, Tier

# How timelines call what a tier holds, by account.
_TRACKS = {
    Tier.DEVICE: "device, bytes held",
    Tier.HOST: "RAM, bytes held",
    Tier.DISK: "NVMe, bytes held",
}


class Ledger:
    """Who holds how many bytes. `charge` refuses what a budget cannot hold, before it is taken."""

    def __init__(
        self,
        budgets: Mapping[Tier, int | None],
        relieve: Callable[[Tier, int], object] | None = None,
    ) -> None:
        """
        Args:
            budgets: Bytes of each tier; None or no entry: as many as there are.
            relieve: Called with a tier and a number of bytes when a charge does not fit, before it
                is refused: frees that many if it can. (Parameters under construction move to disk.)
        """
        self._budgets = {tier: budgets.get(tier) for tier in Tier}
        self._largest_budgets = dict(self._budgets)
        self._accounts: Counter[tuple[Tier, Account]] = Counter()
        self._in_use = dict.fromkeys(Tier, 0)
        self._peak = dict.fromkeys(Tier, 0)
        self._recent_peak = dict.fromkeys(Tier, 0)  # since take_peak()
        self._lock = threading.RLock()
        self._relieve = relieve

    def charge(self, tier: Tier, account: Account, nbytes: int) -> None:
        """Takes `nbytes`. Raises BudgetError, with nothing taken, if that passes the budget."""
        with self._lock:
            missing = self._missing(tier, nbytes)
            if missing > 0 and self._relieve is not None:
                self._relieve(tier, missing)
                missing = self._missing(tier, nbytes)
            if missing > 0:
                held = ", ".join(
                    f"{a.value} {format_bytes(n)}"
                    for (t, a), n in self._accounts.items()
                    if t is tier and n
                )
                raise BudgetError(
                    f"{format_bytes(nbytes)} more for {account.value} would pass the "
                    f"{tier.value} budget of {format_bytes(self._budgets[tier] or 0)} by "
                    f"{missing} bytes (in use: {held or 'nothing'}); raise the budget"
                )
            self._change(tier, account, nbytes)

    def release(self, tier: Tier, account: Account, nbytes: int) -> None:
        """Gives back `nbytes` that were charged."""
        with self._lock:
            assert self._accounts[tier, account] >= nbytes, (tier, account, nbytes)
            self._change(tier, account, -nbytes)

    def set_budget(self, tier: Tier, nbytes: int) -> None:
        """From now on `tier` has `nbytes`. Raises BudgetError, with nothing changed, if more are in
        use."""
        with self._lock:
            if (excess := self._in_use[tier] - nbytes) > 0:
                raise BudgetError(
                    f"the {tier.value} budget cannot become {format_bytes(nbytes)}: {excess} bytes "
                    f"more are in use"
                )
            self._budgets[tier] = nbytes
            largest = self._largest_budgets[tier]
            self._largest_budgets[tier] = None if largest is None else max(nbytes, largest)

    def _missing(self, tier: Tier, nbytes: int) -> int:
        budget = self._budgets[tier]
        return 0 if budget is None else self._in_use[tier] + nbytes - budget

    def _change(self, tier: Tier, account: Account, nbytes: int) -> None:
        self._accounts[tier, account] += nbytes
        self._in_use[tier] += nbytes
        self._peak[tier] = max(self._peak[tier], self._in_use[tier])
        self._recent_peak[tier] = max(self._recent_peak[tier], self._in_use[tier])
        if timeline.is_recording():
            timeline.sample(_TRACKS[tier], self._named(tier))

    def _named(self, tier: Tier) -> dict[str, int]:
        return {a.value: n for (t, a), n in self._accounts.items() if t is tier}

    def sample(self) -> None:
        """Tells a timeline that begins what is held; changes tell it by themselves."""
        with self._lock:
            for tier, track in _TRACKS.items():
                timeline.sample(track, self._named(tier))

    @property
    def by_account(self) -> dict[Tier, dict[Account, int]]:
        """Bytes of each tier now by account, those that are not 0."""
        with self._lock:
            found: dict[Tier, dict[Account, int]] = {tier: {} for tier in Tier}
            for (tier, account), nbytes in self._accounts.items():
                if nbytes:
                    found[tier][account] = nbytes
            return found

    def take_peak(self, tier: Tier) -> int:
        """The most bytes of `tier` at any time since this was asked last."""
        with self._lock:
            peak, self._recent_peak[tier] = self._recent_peak[tier], self._in_use[tier]
            return peak

    def used(self, tier: Tier, account: Account) -> int:
        """Bytes of one account now."""
        return self._accounts[tier, account]

    @property
    def budget_bytes(self) -> dict[str, int | None]:
        """Budget of each tier by name; None: not limited by the user."""
        return {tier.value: nbytes for tier, nbytes in self._budgets.items()}

    @property
    def largest_budget_bytes(self) -> dict[str, int | None]:
        """The largest budget that each tier has had, by name: peak_bytes are compared with these,
        because budgets move. None: there was a time without one."""
        return {tier.value: nbytes for tier, nbytes in self._largest_budgets.items()}

    @property
    def in_use_bytes(self) -> dict[str, int]:
        """Bytes of each tier now, by name."""
        return {tier.value: nbytes for tier, nbytes in self._in_use.items()}

    @property
    def peak_bytes(self) -> dict[str, int]:
        """The most bytes each tier has held, by name."""
        return {tier.value: nbytes for tier, nbytes in self._peak.items()}
