"""The limit of what the whole process holds, of which model state is a part."""

from __future__ import annotations

import os

from offload.backend import Backend
from offload.ledger import Ledger
from offload.process import ResidentMemory
from offload.tiers import Tier

_MARGIN = 64  # one part in so many of the limit stays free: RSS is never twice the same


class BesideMemory:
    """Bytes that are not model state: activations, temporaries, libraries, and what the allocator
    keeps.

    In RAM it is RSS without what the ledger has charged, pages that were never touched included;
    so until all memory was used once it is too little. An emulated DEVICE is RAM, and what computes
    there uses beside it is in RAM's figure. Reading it takes some 5 us.
    """

    def __init__(self, ledger: Ledger, backend: Backend) -> None:
        self._resident = ResidentMemory()
        self._process = os.getpid()
        self._ledger = ledger
        self._backend = backend

    def __call__(self) -> tuple[int, int]:
        """(in RAM, on a DEVICE that is not RAM) now."""
        device = getattr(self._backend, "beside_bytes", None)
        host = self._resident.nbytes() - self.managed_bytes
        return max(0, host), 0 if device is None else int(device())

    def reset(self) -> None:
        """What a DEVICE says is its most since the last call."""
        reset = getattr(self._backend, "reset_beside", None)
        if reset is not None:
            reset()

    @property
    def managed_bytes(self) -> int:
        """Of RAM, that the ledger has charged."""
        return self._ledger.in_use_bytes[Tier.HOST.value] + self.device_bytes

    @property
    def device_bytes(self) -> int:
        """Of them, those of an emulated DEVICE."""
        if self._backend.kind != "emulated":
            return 0
        return self._ledger.in_use_bytes[Tier.DEVICE.value]

    def remove(self) -> None:
        """Closes what it reads from."""
        if os.getpid() == self._process:
            self._resident.close()


class MemoryLimit:
    """Says how much RAM model state may have, so that the process stays within its limit.

    It lowers that as soon as a step needed more beside it, by what is missing and a 64th of the
    limit; it never raises it by itself, but once: after the first steps, when what they need is
    known. So it does not go up and down.
    """

    def __init__(self, limit: int, wanted_bytes: int, beside: BesideMemory) -> None:
        """`wanted_bytes`: of RAM for model state, if the limit allows."""
        self.limit = limit
        self.wanted_bytes = wanted_bytes
        self._beside = beside

    def passed(self, beside_bytes: int) -> bool:
        """Whether a step that had so much beside model state passed the limit."""
        return beside_bytes + self._beside.managed_bytes > self.limit

    def host_bytes(self, beside_bytes: int) -> int:
        """RAM for model state, beside so much else."""
        device = self._beside.device_bytes
        return min(self.wanted_bytes, self.limit - self.limit // _MARGIN - beside_bytes - device)
