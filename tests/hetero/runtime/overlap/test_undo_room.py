"""What undoable_steps costs on NVMe, what there is no room for, and transfers that fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetero
from hetero.planning.step_problem import NVME
from hetero.state.chunk_versions import ChunkVersions
from offload.errors import BudgetError, HeteroError
from offload.memory.tiers import StateKind
from tests.support.training.loops import same
from tests.support.training.overlap_net import (
    OVERLAPS,
    UNDO_PLACES,
    Net,
    backward,
    build,
    everything,
    loss_of,
    one_step,
    result,
    undoable,
)


def slots(optimizer: Any, kind: StateKind, in_ram: bool) -> int:
    """Slots of trained chunks that have the kind of state at home in RAM, or not."""
    (group,) = optimizer.engine.chunk_groups
    homes = group.memory.homes[kind]
    return sum(c.slots for c in group.layout.chunks if c.trainable and (c in homes) == in_ram)


def tile_bytes(optimizer: Any) -> dict[StateKind, int]:
    (group,) = optimizer.engine.chunk_groups
    numel, dtypes = group.layout.tile_numel, group.dtypes
    return {
        StateKind.OPTIM_STATE: dtypes.optim_state_bytes(numel),
        StateKind.PARAM: numel * dtypes.param_bytes,
    }


def spare_bytes(optimizer: Any) -> int:
    """Old state of all trained chunks."""
    (group,) = optimizer.engine.chunk_groups
    trained = sum(c.slots for c in group.layout.chunks if c.trainable)
    return trained * sum(tile_bytes(optimizer).values())


@pytest.mark.covering(1)
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("place", UNDO_PLACES)
def test_a_step_writes_all_state_once_and_undoing_it_reads_what_is_in_ram(
    tmp_path: Path, place: str, overlap: str
) -> None:
    model, optimizer = undoable(tmp_path, place, overlap, prefetch=False)
    engine, each = optimizer.engine, tile_bytes(optimizer)
    (group,) = engine.chunk_groups
    in_file = slots(optimizer, StateKind.OPTIM_STATE, in_ram=False)
    for step in range(4):
        engine.synchronize()
        before, updates = engine.traffic, group.pipeline.stats["written_bytes"]
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.synchronize()
        after = engine.traffic
        updates = group.pipeline.stats["written_bytes"] - updates
        assert updates == in_file * sum(each.values())
        if not slots(optimizer, StateKind.GRAD, in_ram=False):
            assert after.disk_write - before.disk_write == spare_bytes(optimizer)
        optimizer.undo_last_step()
        undone = engine.traffic
        assert undone.disk_write == after.disk_write
        if (
            not engine.config.debugging.overlap.in_forward
        ):  # else the next step's state is read ahead
            in_ram = sum(slots(optimizer, kind, in_ram=True) * each[kind] for kind in each)
            assert undone.disk_read - after.disk_read == in_ram
    engine.close()


@pytest.mark.parametrize("place", UNDO_PLACES)
def test_room_is_taken_when_the_engine_is_made(tmp_path: Path, place: str) -> None:
    """12 bytes for each element of the slots of trained chunks, with bf16 and Adam."""
    used = []
    for options in ({"undoable_steps": False}, {}):
        model, optimizer = undoable(tmp_path, place, **options)
        used.append(optimizer.engine.ledger.in_use_bytes["disk"])
        numel = sum(c.slots for c in optimizer.engine.layout.chunks) * 8192
        assert spare_bytes(optimizer) == 12 * numel
        if options == {}:
            for step in range(3):
                one_step(model, optimizer, step)
            assert optimizer.engine.ledger.in_use_bytes["disk"] == used[1]
            assert used[1] - used[0] == spare_bytes(optimizer)
        optimizer.engine.close()


def test_without_room_the_option_is_refused(tmp_path: Path) -> None:
    """The model is as it was before."""
    _, optimizer = build(Net, tmp_path, "disk")
    used = optimizer.engine.ledger.in_use_bytes["disk"]
    optimizer.engine.close()
    torch.manual_seed(0)
    model = Net()
    before = [p.detach().clone() for p in model.parameters()]
    options: Any = {"placement_policy": "nvme", "nvme_path": str(tmp_path), "chunk_numel": 8192}
    options |= {"host_memory": "400KiB", "nvme_capacity": 2 * used, "undoable_steps": True}
    with pytest.raises(BudgetError, match="undoable_steps=True needs .* on NVMe"):
        hetero.initialize(model, hetero.HybridAdam(model.parameters()), **options)
    assert same(before, [p.detach() for p in model.parameters()])
    model, optimizer = hetero.initialize(
        model, hetero.HybridAdam(model.parameters()), **{**options, "nvme_capacity": 4 * used}
    )
    optimizer.engine.close()


def test_homes_that_move_may_take_the_room(tmp_path: Path) -> None:
    """Training goes on, steps cannot be undone, and a note says so; until there is room again."""
    results, capacity = [], None
    for has_room in (True, False):
        options = {"placement_policy": "auto", "host_memory": "6MiB", "nvme_capacity": capacity}
        model, optimizer = undoable(tmp_path, "ram", **options)
        engine = optimizer.engine
        for step in range(9):
            if step in (3, 6):
                engine.set_budget(host_memory="1MiB" if step == 3 else "6MiB")
            one_step(model, optimizer, step)
            if has_room or not 3 <= step < 6:
                optimizer.undo_last_step()
                one_step(model, optimizer, step)
            else:
                with pytest.raises(HeteroError, match="NVMe had no room"):
                    optimizer.undo_last_step()
        capacity = engine.ledger.in_use_bytes["disk"] - (64 << 10)
        assert any("undone" in note for note in engine.notes) == (not has_room)
        results.append(result(model, optimizer))
    assert same(*results)


@pytest.mark.parametrize("place", ["ram", "optim_states", "disk"])
def test_what_is_predicted(tmp_path: Path, place: str) -> None:
    """The bytes that a step writes are known."""
    options = {"host_memory": "6MiB"} if place == "ram" else {}
    model, optimizer = undoable(tmp_path, place, **options)
    for step in range(4):
        one_step(model, optimizer, step)
    (plan,) = optimizer.engine.plans
    grads = slots(optimizer, StateKind.GRAD, in_ram=False)
    if not grads:
        assert plan.cost.traffic["nvme_written"] == spare_bytes(optimizer)
    assert sum(phase.busy_s[NVME] for phase in plan.cost.phases if NVME in phase.busy_s) > 0
    optimizer.engine.close()


# Transfers that fail


def fail(*_: Any) -> None:
    raise OSError("the disk is gone")


def test_old_state_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """step() says so, and has changed nothing; it can be made again."""
    model, optimizer = undoable(tmp_path, "ram")
    one_step(model, optimizer, 0)
    before = everything(model, optimizer)
    backward(model, optimizer, 1)

    with monkeypatch.context() as patched:
        patched.setattr(ChunkVersions, "_save", fail)
        with pytest.raises(OSError, match="the disk is gone"):
            optimizer.step()
    assert same(before, everything(model, optimizer))
    with pytest.raises(HeteroError, match="an error has ended a step"):
        optimizer.undo_last_step()
    optimizer.step()
    optimizer.undo_last_step()
    assert same(before, everything(model, optimizer))
    optimizer.engine.close()


@pytest.mark.parametrize("place", ["ram", "optim_states"])
def test_old_state_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Some of it may be back, so the engine makes no further step."""
    model, optimizer = undoable(tmp_path, place)
    one_step(model, optimizer, 0)

    with monkeypatch.context() as patched:
        patched.setattr(ChunkVersions, "restore", fail)
        with pytest.raises(OSError, match="the disk is gone"):
            optimizer.undo_last_step()
    with pytest.raises(RuntimeError, match=r"undo_last_step\(\) was ended in the middle"):
        one_step(model, optimizer, 1)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.engine.close()
