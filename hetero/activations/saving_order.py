"""The activations that graphs have, in the order in which they were saved."""

from __future__ import annotations

from collections.abc import Iterator

from hetero.activations.activation import Activation


class SavingOrder:
    """A list from which any activation can be removed, and that is walked from any one back."""

    def __init__(self) -> None:
        self._last: Activation | None = None
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def append(self, activation: Activation) -> None:
        """It was saved after all others."""
        activation.earlier = self._last
        if self._last is not None:
            self._last.later = activation
        self._last = activation
        self._count += 1

    def remove(self, activation: Activation) -> None:
        """No graph has it any more."""
        earlier, later = activation.earlier, activation.later
        if earlier is not None:
            earlier.later = later
        if later is not None:
            later.earlier = earlier
        else:
            self._last = earlier
        activation.earlier = activation.later = None
        self._count -= 1

    def before(self, activation: Activation) -> Iterator[Activation]:
        """Those that were saved before it, the last one first: the order of backward."""
        found = activation.earlier
        while found is not None:
            # First, because the caller may remove what it is given.
            earlier = found.earlier
            yield found
            found = earlier

    def __iter__(self) -> Iterator[Activation]:
        """All, the last one first."""
        if self._last is not None:
            yield from (self._last, *self.before(self._last))
