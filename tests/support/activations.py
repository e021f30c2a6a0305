"""A store of activations without an engine, and tensors to save there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from hetero.activations.limits import ActivationLimits
from hetero.activations.store import (
    ActivationStore,
    SavedActivation,
    build_activation_store,
    has_plain_memory,
)
from hetero.config import Config
from offload.device.backend import Backend, CpuBackend
from offload.memory.ledger import Ledger
from offload.memory.tiers import Account, Tier
from tests.support.ranks.rank_training import finish, inputs, make

KIB = 1 << 10
GENEROUS = 1 << 30


@dataclass
class StoreRig:
    """A store, and what it is charged to."""

    store: ActivationStore
    ledger: Ledger
    notes: list[str]

    def used(self, tier: Tier = Tier.HOST) -> int:
        """Bytes of activations that are charged, when cancelled transfers have ended."""
        movement: Any = self.store.movement
        movement._ram.endings.finish()
        if not len(self.store):
            movement.rest()
        return self.ledger.used(tier, Account.ACTIVATION)

    @property
    def read(self) -> int:
        """Bytes read from the file so far."""
        return self.store.moved_bytes[2]

    @property
    def written(self) -> int:
        """Bytes written there so far."""
        return self.store.moved_bytes[3]

    def pack(self, tensor: torch.Tensor) -> Any:
        """What autograd keeps."""
        saved = self.store.pack(tensor) if has_plain_memory(tensor) else None
        return tensor if saved is None else saved

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Inside the block autograd saves in the store."""
        with saved_tensors_hooks(self.pack, unpack):
            yield

    def wait_written(self) -> None:
        """Until no transfer of the file is under way."""
        movement: Any = self.store.movement
        for op in movement._ram.transfers():
            op.wait()
        movement.settle()

    def inject(self, op: str, nth: int = 0, count: int = 1) -> None:
        """The nth block from now, and so many in all, fail with EIO."""
        file = self.store.movement.file
        assert file is not None
        assert file.parts is not None
        file.parts.io.inject(op, nth, error=5, count=count)


def unpack(saved: Any) -> torch.Tensor:
    """The tensor that was packed."""
    return saved.unpack() if isinstance(saved, SavedActivation) else saved


@contextmanager
def open_store(
    path: Path | None,
    host: int = 256 * KIB,
    device: int = 0,
    backend: Backend | None = None,
    strict: bool = True,
    excess: Callable[[int], int] = lambda _: 0,
    **options: Any,
) -> Iterator[StoreRig]:
    """A store with `host` bytes of RAM and, with a device of its own, `device` bytes there.

    At the end everything that it had is free.
    """
    backend = CpuBackend() if backend is None else backend
    config = Config.make(nvme_path=None if path is None else str(path), **options)
    budgets = {Tier.HOST: host, Tier.DEVICE: device, Tier.DISK: GENEROUS}
    ledger, notes = Ledger(budgets), []
    limits = ActivationLimits(host, device, strict)
    store = build_activation_store(config, limits, backend, ledger, notes, lambda: None, excess)
    try:
        yield StoreRig(store, ledger, notes)
    finally:
        store.close()
        backend.close()
        assert set(ledger.in_use_bytes.values()) == {0}
    for tier, nbytes in budgets.items():
        assert ledger.peak_bytes[tier.value] <= nbytes


def values(seed: int, nbytes: int = 16 * KIB) -> torch.Tensor:
    """Random numbers, fp32, whose storage nobody else has."""
    return torch.randn(nbytes // 4, generator=torch.Generator().manual_seed(seed))


def steps_of_rank(
    rank: int, world: int, options: dict[str, Any], rows: int
) -> tuple[list[torch.Tensor], int]:
    """On every rank: losses and masters of some steps, and bytes of activations written."""
    model, optimizer = make("layers", {"chunk_numel": 16384, "rank_timeout_s": 30.0} | options)
    found = []
    for step in range(3):
        for micro_batch in range(2):
            x = torch.cat([inputs(rank, 8 * step + micro_batch, 128) for _ in range(rows)])
            loss = model(x).square().mean()
            loss.backward()
            found.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    written = optimizer.engine.traffic.activations_written
    return found + finish(model, optimizer), written
