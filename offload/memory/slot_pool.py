"""Slots of an arena that are allocated and freed explicitly."""

from __future__ import annotations

from collections.abc import Callable

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


class DevicePool:
    """As SlotPool, of memory that is taken and given back as a whole.

    Slots up to the limit are in one arena. A run beyond the limit has an arena of its own.
    """

    def __init__(self, make: Callable[[int], HostArena], limit: int) -> None:
        """`make` makes an arena of so many slots, charged, which others close in the end."""
        self._make = make
        self._pool = SlotPool(make(limit), limit)
        self._beyond: dict[int, HostArena] = {}  # by the number of its first slot, a negative one
        self._spare: list[HostArena] = []  # for runs beyond the limit; without slots
        self._last = 0

    def take(self, run: int, beyond: bool = False) -> int | None:
        """As SlotPool.take()."""
        first = self._pool.take(run)
        if first is not None or not beyond:
            return first
        arena = self._spare.pop() if self._spare else self._make(0)
        try:
            arena.resize(run)
        except BaseException:
            self._spare.append(arena)
            raise
        self._last -= 1
        self._beyond[self._last] = arena
        return self._last

    def view(self, first: int, run: int, dtype: torch.dtype) -> torch.Tensor:
        """As SlotPool.view()."""
        if first < 0:
            return self._beyond[first].view(0, run, dtype)
        return self._pool.view(first, run, dtype)

    def refit(self, slots: int, limit: int) -> None:
        """As SlotPool.refit(); `slots` beyond the limit are made when they are needed."""
        assert not self._beyond
        self._pool.refit(limit, limit)

    def give_back(self, first: int, run: int) -> None:
        """Frees a run that take() allocated."""
        if first < 0:
            arena = self._beyond.pop(first)
            arena.resize(0)
            self._spare.append(arena)
        else:
            self._pool.give_back(first, run)
