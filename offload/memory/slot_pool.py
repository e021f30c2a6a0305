"""Slots of an arena that are allocated and freed explicitly."""

from __future__ import annotations

import torch

from offload.memory.arena import HostArena


class SlotPool:
    """First-fit allocation of runs of slots.

    The first `limit` slots are always charged. The others are charged while they are allocated.
    """

    def __init__(self, arena: HostArena, limit: int) -> None:
        self.arena = arena
        self._limit = limit
        self._taken = [False] * arena.slots
        arena.commit(0, limit)

    def take(self, run: int, beyond: bool = False) -> int | None:
        """Allocates `run` consecutive slots; `beyond`: also past the limit.

        Returns the first of them, or None if there are none. Raises BudgetError if the budget has
        no room for slots past the limit.
        """
        end = self.arena.slots if beyond else self._limit
        for first in range(end - run + 1):
            if not any(self._taken[first : first + run]):
                self.arena.commit(first, run)
                self._taken[first : first + run] = [True] * run
                return first
        return None

    def view(self, first: int, run: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor over a run that take() allocated; it is no pin."""
        return self.arena.view(first, run, dtype)

    def reserve(self, more: int) -> None:
        """Raises the limit by `more` slots. Raises BudgetError, with nothing changed."""
        self.arena.commit(self._limit, more)
        self._limit += more

    def refit(self, slots: int, limit: int) -> None:
        """Gives the arena `slots` slots and a new limit, while none is allocated.

        Raises BudgetError.
        """
        assert not any(self._taken)
        if slots != self.arena.slots:
            self.arena.resize(slots)
            self._taken = [False] * slots
        elif limit < self._limit:
            self.arena.decommit(limit, self._limit - limit)
        self._limit = limit
        self.arena.commit(0, limit)

    def give_back(self, first: int, run: int) -> None:
        """Frees a run that take() allocated."""
        assert all(self._taken[first : first + run])
        self._taken[first : first + run] = [False] * run
        extra = max(first, self._limit)
        if extra < first + run:
            self.arena.decommit(extra, first + run - extra)
