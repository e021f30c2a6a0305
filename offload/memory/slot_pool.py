"""Slots of an arena that are taken and given back by hand."""

from __future__ import annotations

from offload.memory.arena import HostArena


class SlotPool:
    """First fit over the slots of an arena, of which the first `limit` are for every day.

    The others are charged when they are taken and given up at once when they are given back.
    """

    def __init__(self, arena: HostArena, limit: int) -> None:
        self.arena = arena
        self._limit = limit
        self._taken = [False] * arena.slots
        arena.commit(0, limit)

    def take(self, run: int, beyond: bool = False) -> int | None:
        """The first of `run` consecutive free slots, or None. `beyond`: also past the limit.

        Raises BudgetError if there is no budget for slots past the limit.
        """
        end = self.arena.slots if beyond else self._limit
        for first in range(end - run + 1):
            if not any(self._taken[first : first + run]):
                self.arena.commit(first, run)
                self._taken[first : first + run] = [True] * run
                return first
        return None

    def reserve(self, more: int) -> None:
        """`more` slots are for every day from now on. Raises BudgetError, with nothing changed."""
        self.arena.commit(self._limit, more)
        self._limit += more

    @property
    def is_free(self) -> bool:
        """Whether no slot is taken."""
        return not any(self._taken)

    def refit(self, slots: int, limit: int) -> None:
        """The arena has `slots` slots from now on, `limit` for every day, if none is taken.

        Raises BudgetError.
        """
        assert self.is_free
        if slots != self.arena.slots:
            self.arena.resize(slots)
            self._taken = [False] * slots
        elif limit < self._limit:
            self.arena.decommit(limit, self._limit - limit)
        self._limit = limit
        self.arena.commit(0, limit)

    def give_back(self, first: int, run: int) -> None:
        """Undoes take()."""
        assert all(self._taken[first : first + run])
        self._taken[first : first + run] = [False] * run
        extra = max(first, self._limit)
        if extra < first + run:
            self.arena.decommit(extra, first + run - extra)

    def close(self) -> None:
        """Frees the arena."""
        self.arena.close()
