"""Parameters that get no place in a chunk: they stay where compute happens, and count."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from offload.errors import BudgetError
from offload.memory.ledger import Ledger
from offload.memory.sizes import format_bytes
from offload.memory.tiers import Account, Tier


class UnmanagedParams:
    """The charges of parameters of integers, bools and complex numbers.

    Each rank has them whole, in RAM, or on a DEVICE with memory of its own, and their bytes count
    against that budget for as long as they live.
    """

    def __init__(self, ledger: Ledger) -> None:
        """None is charged yet."""
        self._ledger = ledger
        # By id(param): what releases the charge when the parameter is gone, the tier, and bytes.
        self._charged: dict[int, tuple[weakref.finalize[..., Any], Tier, int]] = {}

    def charge(self, param: torch.Tensor, tier: Tier, name: str) -> None:
        """Charges a parameter that is on `tier`, or is going there. Idempotent.

        Raises BudgetError, with nothing changed, if it does not fit.
        """
        key, nbytes = id(param), param.numel() * param.element_size()
        if key in self._charged and self._charged[key][1] is tier:
            return
        try:
            self._ledger.charge(tier, Account.UNMANAGED, nbytes)
        except BudgetError as error:
            raise BudgetError(
                f"{name} of shape {tuple(param.shape)} is {param.dtype} and never moves, so it "
                f"takes {format_bytes(nbytes)} ({nbytes} bytes) of {tier.value}_memory: {error}"
            ) from None
        self._release(key)
        gone = weakref.finalize(param, self._release, key)
        gone.atexit = False
        self._charged[key] = gone, tier, nbytes

    def _release(self, key: int) -> None:
        found = self._charged.pop(key, None)
        if found is not None:
            gone, tier, nbytes = found
            gone.detach()
            self._ledger.release(tier, Account.UNMANAGED, nbytes)

    def close(self) -> None:
        """Gives back all charges. Idempotent."""
        for key in list(self._charged):
            self._release(key)
