"""Slots of an arena that are allocated and freed explicitly."""

from __future__ import annotations

from collections.abc import Callable

import torch

from offload.memory.arena import HostArena

_EACH = 1 << 32  # numbers of slots for each arena of a DevicePool


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


class DevicePool:
    """As SlotPool, of memory that is taken and given back as a whole.

    Slots up to the limit are in one arena, and in one more for each reserve(). A run beyond the
    limit has an arena of its own.
    """

    def __init__(self, make: Callable[[int], HostArena], limit: int) -> None:
        """`make` makes an arena of so many slots, charged, which others close in the end."""
        self._make = make
        self._pools = [SlotPool(make(limit), limit)]
        self._beyond: dict[int, HostArena] = {}  # by the number of its first slot, a negative one
        self._spare: list[HostArena] = []  # for runs beyond the limit; without slots
        self._last = 0

    def take(self, run: int, beyond: bool = False) -> int | None:
        """As SlotPool.take()."""
        for number, pool in enumerate(self._pools):
            first = pool.take(run)
            if first is not None:
                return number * _EACH + first
        if not beyond:
            return None
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
        return self._pools[first // _EACH].view(first % _EACH, run, dtype)

    def reserve(self, more: int) -> None:
        """As SlotPool.reserve()."""
        if more:
            self._pools.append(SlotPool(self._make(more), more))

    def refit(self, slots: int, limit: int) -> None:
        """As SlotPool.refit(); `slots` beyond the limit are made when they are needed."""
        assert not self._beyond
        for pool in self._pools[1:]:
            pool.refit(0, 0)
        del self._pools[1:]
        self._pools[0].refit(limit, limit)

    def give_back(self, first: int, run: int) -> None:
        """Frees a run that take() allocated."""
        if first < 0:
            arena = self._beyond.pop(first)
            arena.resize(0)
            self._spare.append(arena)
        else:
            self._pools[first // _EACH].give_back(first % _EACH, run)
