"""hetero/runtime/relocation: what process_memory leaves for activations, which nobody
has chosen, follows what steps save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetero

pytestmark = pytest.mark.usefixtures("nothing_left")

MIB = 1 << 20
WIDTH = 64


class Trained:
    """Layers, and their engine, in a process that holds nothing beside what is counted."""

    def __init__(self, path: Path, layers: int = 24, **options: Any) -> None:
        self.beside_bytes = 0
        self.engine: Any = None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("hetero.setup.process_share.resident_bytes", lambda: 0)
            torch.manual_seed(0)
            self.model = nn.Sequential(
                *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers))
            )
            self.optimizer = hetero.HybridAdam(self.model.parameters())
            options = {"nvme_path": str(path), "dtype": "fp32", "recompute": "none", **options}
            hetero.initialize(self.model, self.optimizer, **options)
        self.engine = self.optimizer.engine
        self.store = self.engine.watch.budget_moves._activations

    def nbytes(self) -> int:
        """Resident bytes."""
        managed = 0
        if self.engine is not None:
            managed = sum(self.engine.ledger.in_use_bytes[tier] for tier in ("host", "device"))
        return self.beside_bytes + managed

    def step(self, rows: int) -> None:
        self.model(torch.ones(rows, WIDTH)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> list[Trained]:
    """The first of these is the process."""
    made: list[Trained] = []

    def nbytes(*_: object) -> int:
        return made[0].nbytes() if made else 0

    monkeypatch.setattr("hetero.runtime.relocation.resident_bytes", nbytes)
    monkeypatch.setattr("hetero.runtime.relocation.peak_resident_bytes", lambda: 0)
    monkeypatch.setattr("offload.memory.process_memory.resident_bytes", nbytes)
    return made


def test_saved_tensors_are_counted_when_steps_become_larger(
    process: list[Trained], tmp_path: Path
) -> None:
    """What the first steps did not need is model state's, until it is needed."""
    trained = Trained(tmp_path, process_memory=4 * MIB)
    process.append(trained)
    limits = trained.store.limits
    first = limits.host_bytes
    for _ in range(3):
        trained.step(2)
    assert limits.host_bytes < first // 4
    trained.step(512)
    assert any("no budget counts" in note for note in trained.engine.notes)
    assert limits.host_bytes >= 3 * 512 * WIDTH * 4
    trained.engine.notes.clear()
    before = trained.store.counts.saved_bytes
    trained.step(512)
    assert not trained.engine.notes
    assert trained.store.counts.saved_bytes - before >= 24 * 512 * WIDTH * 4
    trained.engine.close()
    assert trained.store.counts.alive_bytes == 0


def test_what_cannot_be_had_is_not_tried_again_and_again(
    process: list[Trained], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = Trained(tmp_path, process_memory=4 * MIB)
    process.append(trained)
    tried = []
    place = trained.engine.watch.budget_moves._place
    monkeypatch.setattr(
        trained.engine.watch.budget_moves,
        "_place",
        lambda *args: (tried.append(args), place(*args))[1],
    )
    trained.step(2)
    trained.step(2)
    tried.clear()
    for _ in range(3):
        trained.step(16384)
    assert 0 < len(tried) <= 2
    trained.engine.close()


def test_a_graph_that_is_kept_does_not_keep_what_was_lent(
    process: list[Trained], tmp_path: Path
) -> None:
    trained = Trained(tmp_path, process_memory=4 * MIB)
    process.append(trained)
    kept = trained.model(torch.ones(1, WIDTH)).sum()
    trained.beside_bytes = 11 * MIB // 4
    loss = trained.model(torch.ones(64, WIDTH)).sum()
    assert trained.store.limits.lent_bytes > 0
    trained.beside_bytes = 0
    loss.backward()
    del loss
    trained.optimizer.step()
    assert trained.store.limits.lent_bytes == 0
    del kept
    trained.engine.close()


def test_what_activations_gave_back_is_used_without_a_larger_budget(
    process: list[Trained], tmp_path: Path
) -> None:
    trained = Trained(tmp_path, process_memory=64 * MIB, host_memory=MIB, chunk_numel=4096)
    process.append(trained)
    placed = trained.engine.placement
    for _ in range(2):
        trained.step(2)
    assert trained.engine.ledger.budget_bytes["host"] == MIB
    assert trained.engine.placement != placed
    trained.engine.close()


def test_slots_behind_a_link_are_as_many_as_are_left(
    process: list[Trained], tmp_path: Path
) -> None:
    """They were not used in the first steps, so model state has what those did not need."""
    trained = Trained(
        tmp_path, process_memory=6 * MIB, backend="emulated", device_memory="512KiB", layers=48
    )
    process.append(trained)
    for rows in (1, 1, 1, 8, 8):
        trained.step(rows)
    limits = trained.store.limits
    assert trained.engine.ledger.in_use_bytes["host"] <= trained.engine.ledger.budget_bytes["host"]
    assert 0 < trained.store.movement.fixed_bytes <= limits.host_bytes
    trained.engine.close()
