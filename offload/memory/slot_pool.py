"""Slots of arenas that are allocated and freed explicitly."""

from __future__ import annotations

from collections.abc import Callable

import torch

from offload.memory.arena import HostArena


class SlotPool:
    """First-fit allocation of runs of slots.

    Slots up to the limit are in one arena, and always charged. A run beyond the limit has an arena
    of its own, which is charged while the run is allocated.
    """

    def __init__(self, make: Callable[[int], HostArena], limit: int) -> None:
        """`make` makes an arena of so many slots. Raises BudgetError."""
        self._make = make
        self._arena = make(limit)
        self._arena.commit_all()
        self._taken = [False] * limit
        self._beyond: dict[int, HostArena] = {}  # by the number of its first slot, a negative one
        self._spare: list[HostArena] = []  # for runs beyond the limit; without slots
        self._last = 0

    def take(self, run: int, beyond: bool = False) -> int | None:
        """Allocates `run` consecutive slots; `beyond`: also past the limit.

        Returns the first of them, or None if there are none. Raises BudgetError if the budget has
        no room for slots past the limit.
        """
        for first in range(len(self._taken) - run + 1):
            if not any(self._taken[first : first + run]):
                self._taken[first : first + run] = [True] * run
                return first
        if not beyond:
            return None
        arena = self._spare.pop() if self._spare else self._make(0)
        try:
            arena.resize(run)
            arena.commit_all()
        except BaseException:
            arena.resize(0)
            self._spare.append(arena)
            raise
        self._last -= 1
        self._beyond[self._last] = arena
        return self._last

    def view(self, first: int, run: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor over a run that take() allocated; it is no pin."""
        if first < 0:
            return self._beyond[first].view(0, run, dtype)
        return self._arena.view(first, run, dtype)

    def refit(self, limit: int) -> None:
        """Gives the pool another limit, while nothing is allocated. Raises BudgetError."""
        assert not any(self._taken)
        assert not self._beyond
        if limit != self._arena.slots:
            self._arena.resize(limit)
            self._taken = [False] * limit
        self._arena.commit_all()

    def give_back(self, first: int, run: int) -> None:
        """Frees a run that take() allocated."""
        if first < 0:
            arena = self._beyond.pop(first)
            arena.resize(0)
            self._spare.append(arena)
        else:
            assert all(self._taken[first : first + run])
            self._taken[first : first + run] = [False] * run

    def close(self) -> None:
        """Frees all slots, also those that are allocated; idempotent."""
        for arena in (self._arena, *self._beyond.values(), *self._spare):
            arena.close()
