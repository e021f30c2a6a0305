"""Saved tensors that stay as they are, and which of them leaves next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import torch

from hetero.activations.activation import Activation, ActivationState
from offload.memory.ledger import Ledger
from offload.memory.tiers import Account, Tier

_LOOKS = 2  # at so many that others hold, for each tensor that is saved


class KeptTensors:
    """The activations whose tensors are kept, charged by the bytes of their storages.

    Backward needs them in the reverse order of saving, so the earliest leaves first: it is needed
    last. One that somebody else holds, too, does not leave, because that would free nothing, and is
    not charged: the loop's inputs, what modules have, what the running forward still uses. When the
    others have let go of it, it is charged again.
    """

    def __init__(self, ledger: Ledger, tier: Tier, may_leave: Callable[[int], bool]) -> None:
        """`tier` is where compute happens; `may_leave` says it of a number of bytes."""
        self._ledger = ledger
        self._tier = tier
        self._may_leave = may_leave
        self._by_storage: dict[int, Activation] = {}
        self._candidates: deque[Activation] = deque()  # in the order of saving
        self._held: deque[Activation] = deque()  # by others, too
        self.nbytes = 0  # charged
        self.largest_bytes = 0  # of all that there ever were

    def find(self, tensor: torch.Tensor) -> Activation | None:
        """The activation whose storage `tensor` views, if it is kept."""
        return self._by_storage.get(tensor.untyped_storage()._cdata)

    def add(self, activation: Activation) -> None:
        """It is kept from now on. Raises BudgetError."""
        self._count(activation)
        self._by_storage[activation.storage] = activation
        if self._may_leave(activation.nbytes):
            self._candidates.append(activation)

    def _count(self, activation: Activation) -> None:
        self._ledger.charge(self._tier, Account.ACTIVATION, activation.nbytes)
        activation.is_counted = True
        self.nbytes += activation.nbytes
        self.largest_bytes = max(self.largest_bytes, activation.nbytes)

    def _discount(self, activation: Activation) -> None:
        if activation.is_counted:
            self._ledger.release(self._tier, Account.ACTIVATION, activation.nbytes)
            activation.is_counted = False
            self.nbytes -= activation.nbytes

    def remove(self, activation: Activation) -> None:
        """Its tensors are not kept any more."""
        self._discount(activation)
        del self._by_storage[activation.storage]

    def next_to_leave(self) -> Activation | None:
        """The earliest one that frees memory when it leaves; the caller has it leave."""
        while self._candidates:
            activation = self._candidates.popleft()
            if activation.state is not ActivationState.KEPT:
                continue
            if not activation.is_held_by_others():
                return activation
            self._discount(activation)
            self._held.append(activation)
        return None

    def put_back(self, activation: Activation) -> None:
        """What next_to_leave() gave, or let_go_by_others(), cannot leave now."""
        if activation.is_counted:
            self._candidates.appendleft(activation)
        else:  # looked at again later
            self._held.append(activation)

    def let_go_by_others(self) -> Iterator[Activation]:
        """Some that others held and do not hold any more; the caller counts each, or has it leave.

        It looks at a few at each call, by turns.
        """
        for _ in range(min(_LOOKS, len(self._held))):
            activation = self._held.popleft()
            if activation.state is not ActivationState.KEPT:
                continue
            if activation.is_held_by_others():
                self._held.append(activation)
            else:
                yield activation

    def count_again(self, activation: Activation) -> None:
        """It is charged, and may leave next. Raises BudgetError."""
        self._candidates.appendleft(activation)
        self._count(activation)
