"""hetero/runtime/relocation: what process_memory leaves for activations, which nobody
has chosen, follows what steps save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetero
from tests.support.process_limits import Process

pytestmark = pytest.mark.usefixtures("nothing_left")

MIB = 1 << 20
WIDTH = 64


class Trained:
    """Layers, and their engine, in a process that holds nothing beside what is counted."""

    def __init__(self, process: Process, path: Path, layers: int = 24, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers))
        )
        self.optimizer = hetero.HybridAdam(self.model.parameters())
        options = {"nvme_path": str(path), "dtype": "fp32", "recompute": "none", **options}
        hetero.initialize(self.model, self.optimizer, **options)
        self.engine = process.engine = self.optimizer.engine
        self.store = self.engine.watch.budget_moves._activations

    def step(self, rows: int) -> None:
        self.model(torch.ones(rows, WIDTH)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def test_saved_tensors_are_counted_when_steps_become_larger(
    process: Process, tmp_path: Path
) -> None:
    """What the first steps did not need is model state's, until it is needed."""
    trained = Trained(process, tmp_path, process_memory=4 * MIB)
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
    process: Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = Trained(process, tmp_path, process_memory=4 * MIB)
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
        trained.step(4096)
    assert 0 < len(tried) <= 2
    trained.engine.close()


def test_a_graph_that_is_kept_does_not_keep_what_was_lent(process: Process, tmp_path: Path) -> None:
    trained = Trained(process, tmp_path, process_memory=4 * MIB)
    kept = trained.model(torch.ones(1, WIDTH)).sum()
    process.beside_bytes = 11 * MIB // 4
    loss = trained.model(torch.ones(64, WIDTH)).sum()
    assert trained.store.limits.lent_bytes > 0
    process.beside_bytes = 0
    loss.backward()
    del loss
    trained.optimizer.step()
    assert trained.store.limits.lent_bytes == 0
    del kept
    trained.engine.close()


def test_what_activations_gave_back_is_used_without_a_larger_budget(
    process: Process, tmp_path: Path
) -> None:
    trained = Trained(process, tmp_path, process_memory=64 * MIB, host_memory=MIB, chunk_numel=4096)
    placed = trained.engine.placement
    for _ in range(2):
        trained.step(2)
    assert trained.engine.ledger.budget_bytes["host"] == MIB
    assert trained.engine.placement != placed
    trained.engine.close()


def test_slots_behind_a_link_are_as_many_as_are_left(process: Process, tmp_path: Path) -> None:
    """They were not used in the first steps, so model state has what those did not need."""
    trained = Trained(
        process,
        tmp_path,
        process_memory=6 * MIB,
        backend="emulated",
        device_memory="512KiB",
        layers=48,
    )
    for rows in (1, 1, 1, 8, 8):
        trained.step(rows)
    limits = trained.store.limits
    assert trained.engine.ledger.in_use_bytes["host"] <= trained.engine.ledger.budget_bytes["host"]
    assert 0 < trained.store.movement.fixed_bytes <= limits.host_bytes
    trained.engine.close()
