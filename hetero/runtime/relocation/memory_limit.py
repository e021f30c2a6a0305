"""The limits of all that a process and a device may hold, of which model state is a part.

How process_memory is kept:

- Before a step was seen, half of what the process leaves free is for model state and activations,
  three quarters if the model does not fit in less (process_share.py).
- In a step each saved tensor reads the resident set. The bytes above the limit, less a margin and
  twice the largest saved tensor (results on their way are of that size), are lent: activations
  leave until the next forward. Temporaries between two saved tensors are seen only afterwards.
- At the end of a step the most that no ledger counted at any saved tensor, and the kernel's peak if
  it rose, say what steps need beside. Activations give back what they did not need. The budget is
  lowered as soon as it and that need pass the limit together, and raised once, after two steps. The
  margin is given up before the BudgetError that has the numbers.
- If a saved tensor found no room, steps have become larger, and model state gives way to
  activations: else what early short steps gave back would leave later ones uncounted.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from offload.device.backend import Backend
from offload.memory.ledger import Ledger
from offload.memory.process_memory import ResidentMemory, margin_bytes
from offload.memory.tiers import Tier

_DEVICE_MARGIN = 64  # one part in so many of a device's limit stays free
_TOLD_AGAIN = 64  # the user is told again when a limit is passed by one part in so many more
_RESERVE = 32  # one part in so many of a device: for what its allocator cannot use, and for others


class BesideMemory:
    """Bytes that are not model state: activations, temporaries, libraries, and what the allocator
    keeps.

    In RAM it is RSS without what the ledger has charged, pages that were never touched included;
    so until all memory was used once it is too little. An emulated DEVICE is RAM, and what computes
    there uses beside it is in RAM's figure. Reading it takes some 5 us.
    """

    def __init__(self, ledger: Ledger, backend: Backend) -> None:
        self._resident = ResidentMemory()
        self._peak = self._resident.peak()
        self._process = os.getpid()
        self._ledger = ledger
        self._backend = backend
        self._take_managed_peak()  # what was there before is no step's

    def __call__(self) -> tuple[int, int]:
        """(in RAM, on a DEVICE that is not RAM) now."""
        host = self._resident.nbytes() - self.managed_bytes(Tier.HOST)
        return max(0, host), self.device_bytes()

    def new_peak(self) -> tuple[int, int]:
        """The most bytes that the process ever held, if that is more than when it was asked last,
        and how many of them at least were not model state; else (0, 0).

        The kernel counts it, so what a step had for a moment is in it. All that was charged at most
        since then may have been there at that moment.
        """
        peak, before = self._resident.peak(), self._peak
        managed_bytes = self._take_managed_peak()
        self._peak = max(peak, before)
        return (peak, max(0, peak - managed_bytes)) if peak > before else (0, 0)

    def _take_managed_peak(self) -> int:
        host = self._ledger.take_peak(Tier.HOST)
        return host + (self._ledger.take_peak(Tier.DEVICE) if self._device_is_ram else 0)

    def device_bytes(self) -> int:
        """The most bytes beside model state on a DEVICE that is not RAM since the last reset()."""
        return self._backend.beside_bytes()

    def reset(self) -> None:
        """Restarts the peak measurement that device_bytes() reports."""
        self._backend.reset_beside()

    def managed_bytes(self, tier: Tier) -> int:
        """Bytes of the memory that is `tier` which the ledger has charged to any tier."""
        return self._ledger.in_use_bytes[tier.value] + self.shared_bytes(tier)

    @property
    def _device_is_ram(self) -> bool:
        return self._backend.kind == "emulated"

    def shared_bytes(self, tier: Tier) -> int:
        """Of managed_bytes(), those of another tier: an emulated DEVICE is in RAM."""
        if not self._device_is_ram or tier is not Tier.HOST:
            return 0
        return self._ledger.in_use_bytes[Tier.DEVICE.value]

    def close(self) -> None:
        """Closes the file that RSS is read from."""
        if os.getpid() == self._process:
            self._resident.close()


@dataclass
class MemoryLimit:
    """How many bytes of a tier model state may have, so that all stays within a limit.

    That becomes less as soon as a step needed more beside it, by what is missing and a margin. It
    becomes more only once: after the first steps, when what they need is known. So it does not go
    up and down.

    Attributes:
        tier: whose memory the limit is of.
        limit: bytes that all may hold together.
        wanted_bytes: for model state, if the limit allows.
        beside: measures what is not model state.
        was_raised: whether it has become more, or must not.
        peak_bytes: the most beside model state so far.
        told_bytes: the peak of all that the user was told of.
    """

    tier: Tier
    limit: int
    wanted_bytes: int
    beside: BesideMemory
    was_raised: bool = False
    peak_bytes: int = 0
    told_bytes: int = 0

    def is_passed_anew(self, peak: int) -> bool:
        """Whether `peak` bytes are more than may be held, and notably more than the user was told
        of; the user is told now."""
        anew = peak > max(self.limit, self.told_bytes + self.limit // _TOLD_AGAIN)
        if anew:
            self.told_bytes = peak
        return anew

    def passed(self, beside_bytes: int, peak: int, promised_bytes: int) -> bool:
        """Whether a step that had `beside_bytes` beside model state passed the limit, or `peak`
        bytes at any moment; or one would that uses what it was `promised_bytes` of, too."""
        managed_bytes = self.beside.managed_bytes(self.tier) + promised_bytes
        return max(peak, beside_bytes + managed_bytes) > self.limit

    def state_bytes(self, beside_bytes: int, margin: bool = True) -> int:
        """Bytes that model state may have beside `beside_bytes` of anything else, and a margin."""
        others = self.beside.shared_bytes(self.tier)
        free = 0
        if margin:
            is_host = self.tier is Tier.HOST
            free = margin_bytes(self.limit) if is_host else self.limit // _DEVICE_MARGIN
        return min(self.wanted_bytes, self.limit - free - beside_bytes - others)


def usable_device_bytes(backend: Backend) -> int | None:
    """All bytes that a device has but for a reserve; None: the backend does not say."""
    total = backend.device_bytes()
    return None if total is None else total - total // _RESERVE
