"""How many gradients a parameter gets in a step, and so which gradients are final."""

from __future__ import annotations

from collections.abc import Iterable

from hetero.state.managed_param import ManagedParam


class GradCounts:
    """Counts the gradients that autograd adds up for a parameter until the optimizer's step.

    Usually one; several if the parameter is used by several backward calls, or inside and outside
    of a reentrant checkpoint. The number is not known in advance, so the steps so far are the rule:
    a gradient is final when it is the sum of as many as the most that any step brought. In the
    first step none is.
    """

    def __init__(self) -> None:
        self._most: dict[ManagedParam, int] = {}  # in any step before this one
        self._now: dict[ManagedParam, int] = {}  # gradients in the sum that is kept now

    def note(self, managed: ManagedParam, added: bool, counts: bool) -> None:
        """A gradient came: it was `added` to the one that is kept, or is the first.

        It `counts` unless more are known to come, as inside no_sync().
        """
        self._now[managed] = (self._now.get(managed, 0) if added else 0) + counts

    def expected(self, managed: ManagedParam) -> int:
        """How many gradients of the parameter a step brings; 0 if that is not known."""
        return self._most.get(managed, 0)

    def are_final(self, members: Iterable[ManagedParam]) -> bool:
        """Whether all of `members` have the gradient that the step will use."""
        return all(m.has_grad and 0 < self.expected(m) == self._now.get(m) for m in members)

    def end_step(self) -> None:
        """The step was made with the gradients that are kept now."""
        for managed, count in self._now.items():
            if managed.has_grad:
                self._most[managed] = max(count, self.expected(managed))
        self._now.clear()
