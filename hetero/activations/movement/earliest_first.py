"""Activations that can give up their slots, of which the earliest is the next one."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from hetero.activations.activation import Activation


class EarliestFirst:
    """A set from which the activation is taken that was saved first: backward needs it last."""

    def __init__(self, may_be_taken: Callable[[Activation], bool]) -> None:
        """`may_be_taken` says it of one that is in the set, at the time."""
        self._may_be_taken = may_be_taken
        self._members: dict[int, Activation] = {}  # by number
        self._numbers: list[int] = []  # a heap, with some of which none is in the set

    def add(self, activation: Activation) -> None:
        """It is in the set from now on."""
        if activation.number not in self._members:
            heapq.heappush(self._numbers, activation.number)
        self._members[activation.number] = activation

    def discard(self, activation: Activation) -> None:
        """It is not any more."""
        self._members.pop(activation.number, None)

    def take(self, before: int | None = None) -> Activation | None:
        """Removes the earliest one that may be taken; None if none was saved before that number."""
        passed, found = [], None
        while self._numbers and found is None:
            number = self._numbers[0]
            if before is not None and number >= before:
                break
            heapq.heappop(self._numbers)
            member = self._members.get(number)
            if member is not None and self._may_be_taken(member):
                found = self._members.pop(number)
            elif member is not None:
                passed.append(number)
        for number in passed:
            heapq.heappush(self._numbers, number)
        return found
