"""What a process seems to hold, by which limits of processes are tested."""

from __future__ import annotations

from typing import Any

import pytest


class Process:
    """A process of which a test says how much it holds beside the model state."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.beside_bytes = 0
        self.peak_bytes = 0
        self.engine: Any = None  # of which it holds the state, once there is one
        for module in ("hetero.runtime.relocation", "hetero.setup.process_share"):
            monkeypatch.setattr(f"{module}.resident_bytes", self.nbytes)
            monkeypatch.setattr(f"{module}.peak_resident_bytes", lambda: self.peak_bytes)
        monkeypatch.setattr("offload.memory.process_memory.resident_bytes", self.nbytes)

    def nbytes(self) -> int:
        managed = (
            0
            if self.engine is None
            else sum(self.engine.ledger.in_use_bytes[tier] for tier in ("host", "device"))
        )
        return self.beside_bytes + managed
