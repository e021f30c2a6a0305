"""Homes that move between RAM and NVMe, in place: the same bits, inside both budgets."""

from __future__ import annotations

import errno
import gc
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hetero
from hetero.planning.placement import Placement
from hetero.runtime.relocation import InUseError, Migration
from offload.errors import BudgetError
from offload.memory.run_pool import FreeSpace
from offload.memory.tiers import Tier
from tests.support.training.loops import batches, build, same, tiny_gpt2, train
from tests.support.training.moving_homes import (
    CHUNK,
    FEW,
    MANY,
    SOME,
    Training,
    check_budgets,
    reference,
    start,
)
from tests.support.training.smallest import smallest_host_memory

pytestmark = pytest.mark.usefixtures("nothing_left")

LEAST, MOST = 300 << 10, 4 << 20  # of RAM: hardly more than needed, and more than all
RAM: dict[str, Any] = {"backend": "cpu", "device_memory": None, "host_memory": MOST}


def homes(placement: Placement) -> list[set[Tier | None]]:
    return [set(placement.param), set(placement.grad), set(placement.optim_state)]


BACKENDS: dict[str, dict[str, Any]] = {
    "cpu": {},
    "no-prefetch": {"debug": {"prefetch": False}},
    "threads": {"debug": {"io_engine": "threads"}},
    "nvme": {"placement_policy": "nvme"},
    "emulated": {"backend": "emulated", "device_memory": "300KiB"},
    "emulated-some-at-home": {"backend": "emulated", "device_memory": "1200KiB"},
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp16"])
def test_the_bits_are_those_of_no_migration(dtype: str, backend: str, tmp_path: Path) -> None:
    given = {"dtype": dtype, "initial_loss_scale": 256.0}
    training = start(tmp_path, **{**RAM, **given, "host_memory": 2 * MOST, **BACKENDS[backend]})
    engine = training.engine
    seen = []
    for host_memory in (2 * MOST, 700 << 10, 1200 << 10, 2 * MOST, 900 << 10):
        engine.set_budget(host_memory)
        assert engine.ledger.budget_bytes["host"] == host_memory
        assert engine.ledger.in_use_bytes["host"] <= host_memory
        seen.append(homes(engine.placement))
        training.step()
    assert any(Tier.DISK in tiers for tiers in seen[1])
    assert seen[1] != seen[3]
    assert same(training.finish(), reference(**given))


def test_what_came_to_ram_is_not_read_ahead(tmp_path: Path) -> None:
    """Steps before have learned to gather it."""
    training = start(tmp_path, **RAM | {"host_memory": LEAST})
    training.step()
    training.engine.set_budget(LEAST + (16 << 10))
    now = training.engine.placement
    assert 0 < now.param.count(Tier.HOST) < len(now.param)
    assert same(training.finish(), reference())


def test_memory_goes_back_to_the_system_and_the_file_is_used_again(tmp_path: Path) -> None:
    make = lambda: tiny_gpt2(256, 4)  # noqa: E731
    torch.manual_seed(0)
    with hetero.ZeroInitContext(
        placement_policy="auto", nvme_path=str(tmp_path), chunk_numel=1 << 16, dtype="bf16"
    ):
        model = make()
    model, optimizer = hetero.initialize(model, hetero.HybridAdam(model.parameters()))
    engine = optimizer.engine
    everything = engine.ledger.in_use_bytes["host"]
    file_bytes = []
    for _ in range(3):
        engine.set_budget(everything // 3)
        assert engine.ledger.in_use_bytes["host"] <= everything // 3
        file_bytes.append(engine.ledger.in_use_bytes["disk"])
        engine.set_budget(2 * everything)
        assert homes(engine.placement) == [{Tier.HOST}] * 3
        assert engine.ledger.in_use_bytes["host"] == everything
    assert file_bytes[0] == file_bytes[1] == file_bytes[2] > 0
    engine.close()
    assert engine.ledger.in_use_bytes == {"device": 0, "host": 0, "disk": 0}


def test_the_smallest_budget_named_is_the_smallest_that_works(tmp_path: Path) -> None:
    training = start(tmp_path, **RAM)
    least = smallest_host_memory(lambda: training.engine.set_budget(1))
    with pytest.raises(BudgetError):
        training.engine.set_budget(least - 1)
    training.engine.set_budget(least)
    training.step()
    assert same(training.finish(), reference())


def test_without_nvme_there_is_nowhere_to_go() -> None:
    model, optimizer = build(placement_policy="cpu", dtype="bf16")
    with pytest.raises(BudgetError, match="host_memory cannot become"):
        optimizer.engine.set_budget("100KiB")
    with pytest.raises(ValueError, match="host_memory"):
        optimizer.engine.set_budget("much")
    train(model, optimizer, batches(1))


def test_the_disk_s_budget_holds_too(tmp_path: Path) -> None:
    training = start(tmp_path, **RAM, nvme_capacity="1MiB")
    engine = training.engine
    with pytest.raises(BudgetError, match="nvme_capacity or the free space there"):
        engine.set_budget(LEAST)
    engine.set_budget(2 << 20)
    training.step()
    assert 0 < engine.ledger.peak_bytes["disk"] <= 1 << 20
    assert same(training.finish(), reference())


def test_a_failed_write_leaves_everything_where_it_was(tmp_path: Path) -> None:
    training = start(tmp_path, **RAM)
    engine = training.engine
    engine.set_budget(MOST // 2)  # so that there is a file
    training.step()
    placed, in_use = engine.placement, dict(engine.ledger.in_use_bytes)
    for nth in (0, 1, 7):
        engine.chunk_groups[0].pipeline.flush()
        engine.chunk_groups[0].disk.io.inject("write", nth, errno.ENOSPC)
        with pytest.raises(OSError, match="No space left") as failure:
            engine.set_budget(LEAST)
        assert failure.value.errno == errno.ENOSPC
        assert engine.placement == placed
        assert engine.ledger.in_use_bytes["host"] == in_use["host"]
        assert engine.ledger.budget_bytes["host"] == MOST // 2
        disk_bytes = engine.ledger.in_use_bytes["disk"]
        training.step()
    engine.set_budget(LEAST)
    assert engine.ledger.in_use_bytes["disk"] == disk_bytes, "space was not given back"
    assert same(training.finish(), reference())


def test_what_cannot_be_read_stays_in_the_file(tmp_path: Path) -> None:
    training = start(tmp_path, **RAM | {"host_memory": LEAST})
    engine = training.engine
    training.step()
    before = engine.placement
    read_in = Migration._read_in

    def fail_to_read_in(migration: Migration) -> BaseException | None:
        # Here, where nothing else reads any more.
        engine.chunk_groups[0].disk.io.inject("read", 2, errno.EIO)
        return read_in(migration)

    reads_fail = patch.object(Migration, "_read_in", fail_to_read_in)
    with reads_fail, pytest.raises(OSError, match="Input/output error"):
        engine.set_budget(MOST)
    now = engine.placement
    on_disk = [tiers.count(Tier.DISK) for tiers in (now.param, now.grad, now.optim_state)]
    assert sum(on_disk) == 1, (before, now)
    assert engine.ledger.in_use_bytes["host"] <= MOST
    training.step()
    engine.set_budget(MOST)
    assert homes(engine.placement) == [{Tier.HOST}] * 3
    assert same(training.finish(), reference())


def param_in(training: Training, tier: Tier) -> torch.nn.Parameter:
    """The first parameter whose home is there."""
    found, placed = training.engine.find, training.engine.placement.param
    return next(p for p in training.model.parameters() if placed[found(p).chunk.id] is tier)


class TestInUse:
    """What somebody views is not taken away."""

    def refused(self, training: Training, what: str, *budgets: int | None) -> None:
        placed = training.engine.placement
        with pytest.raises(InUseError, match=what):
            training.engine.set_budget(*budgets)
        assert training.engine.placement == placed

    def refused_before_backward(self, training: Training, what: str, *budgets: int | None) -> None:
        loss = training.forward()
        self.refused(training, what, *budgets)
        training.optimizer.backward(loss)
        del loss
        training.update()

    def test_in_ram(self, tmp_path: Path) -> None:
        """A graph, a view that the user keeps, gathered() and a forward that is running."""
        training = start(tmp_path, **RAM)
        self.refused_before_backward(training, "from HOST to DISK.* still views it", LEAST)
        mine = next(training.model.parameters()).detach()
        value = mine.clone()
        self.refused(training, "still views it", LEAST)
        assert torch.equal(mine, value)
        del mine
        with hetero.gathered(next(training.model.parameters())):
            self.refused(training, ".", LEAST)
        seen = []

        def call(*_: object) -> None:
            self.refused(training, "while a forward is running", LEAST)
            seen.append(True)

        handle = training.model.transformer.h[1].register_forward_hook(call)
        training.step()
        handle.remove()
        assert seen
        training.engine.set_budget(LEAST)
        assert same(training.finish(), reference())

    def test_on_a_device(self, tmp_path: Path) -> None:
        training = start(tmp_path, device_memory=MANY)
        self.refused_before_backward(training, "from DEVICE to HOST.* still views it", None, FEW)
        training.engine.set_budget(None, FEW)
        assert same(training.finish(), reference())

    def test_gathered_copies(self, tmp_path: Path) -> None:
        training = start(tmp_path, **RAM | {"host_memory": LEAST})
        param = param_in(training, Tier.DISK)
        with hetero.gathered(param):
            mine = param.detach()
            self.refused(training, ".", MOST)
        value = mine.clone()
        self.refused(training, "parameters are gathered", MOST)
        assert torch.equal(mine, value)
        del mine
        training.engine.set_budget(MOST)
        assert same(training.finish(), reference())

    @pytest.mark.parametrize("host_memory", [LEAST, MOST])
    def test_changes_outside_gathered_are_not_lost(self, tmp_path: Path, host_memory: int) -> None:
        """Neither where they would be overwritten by what comes, nor by a migration's undoing."""
        training = start(tmp_path, **RAM | {"host_memory": host_memory})
        params = list(training.model.parameters())
        param = param_in(training, Tier.DISK if host_memory == LEAST else Tier.HOST)
        other = params[-1] if param is params[0] else params[0]
        param.data = torch.ones(param.shape, dtype=torch.bfloat16)
        with torch.no_grad():
            other.add_(1)
        changed = other.detach().clone()
        training.engine.set_budget(LEAST + MOST - host_memory)
        assert bool((param == 1).all())
        assert torch.equal(other, changed)
        training.step()
        training.engine.close()

    @pytest.mark.parametrize(
        ("options", "budgets"),
        [(RAM | {"host_memory": LEAST}, (MOST, None)), ({"device_memory": FEW}, (None, MANY))],
        ids=["RAM", "device"],
    )
    def test_a_gathered_copy_keeps_its_graph(
        self, options: dict[str, Any], budgets: tuple[int | None, ...], tmp_path: Path
    ) -> None:
        """What was packed as a view of a copy is found again wherever it is."""
        training = start(tmp_path, **options)
        loss = training.forward()
        training.engine.set_budget(*budgets)
        training.optimizer.backward(loss)
        del loss
        training.update()
        assert same(training.finish(), reference())


def test_checkpoints_are_the_same_before_and_after(tmp_path: Path) -> None:
    training = start(tmp_path, **RAM)
    training.step()
    before = training.optimizer.state_dict()["state"]
    weights = {k: v.clone() for k, v in training.model.state_dict().items()}
    for host_memory in (LEAST, 900 << 10, MOST):
        training.engine.set_budget(host_memory)
        gc.collect()
        after = training.optimizer.state_dict()["state"]
        for index, state in before.items():
            for key, value in state.items():
                assert torch.equal(value, after[index][key]), (index, key)
        for key, value in training.model.state_dict().items():
            assert torch.equal(value, weights[key]), key
    training.optimizer.load_state_dict(training.optimizer.state_dict())
    assert same(training.finish(), reference())


@pytest.mark.parametrize(
    ("options", "moves"),
    [
        (RAM, [(700 << 10,), (1500 << 10,), (600 << 10,)]),
        ({}, [(500 << 10, FEW), (500 << 10, MANY), (8 << 20, SOME), (500 << 10, SOME)]),
    ],
    ids=["RAM", "device"],
)
def test_several_banks_move_together(
    options: dict[str, Any], moves: list[tuple[int, ...]], tmp_path: Path
) -> None:
    training = start(tmp_path, keep_fp32=["*.ln_*"], **options)
    for budgets in moves:
        training.engine.set_budget(*budgets)
        check_budgets(training.engine)
        training.step()
    assert same(training.finish(), reference(keep_fp32=("*.ln_*",)))


@pytest.mark.parametrize("first", [MOST, pytest.param(800 << 10, marks=pytest.mark.extra)])
def test_what_was_unfrozen_is_where_it_went(first: int, tmp_path: Path) -> None:
    """Its old chunk, which moves like any other, points no parameter to what it has."""
    alike = []
    for moving in (False, True):
        torch.manual_seed(0)
        model = tiny_gpt2()
        model.transformer.h[0].requires_grad_(False)
        options: dict[str, Any] = {"placement_policy": "auto", "nvme_path": str(tmp_path)}
        options |= {"chunk_numel": CHUNK, "dtype": "bf16"}
        options |= {"host_memory": first, "reserve_memory": 200 << 10}
        optimizer = hetero.HybridAdam(model.parameters())
        training = Training(*hetero.initialize(model, optimizer, **options))
        engine = training.engine
        training.step()
        model.transformer.h[0].requires_grad_(True)
        training.step()
        assert len(engine.chunk_groups) == 2
        frozen = [c.id for c in engine.layout.chunks if not c.trainable]
        for host_memory in (500 << 10, MOST, 500 << 10):
            if moving:
                before = engine.placement.param
                engine.set_budget(host_memory)
                moved = any(before[c] is not engine.placement.param[c] for c in frozen)
                assert moved or host_memory == first
            training.step()
        alike.append(training.finish())
    assert same(*alike)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=30), st.data())
def test_free_space_is_given_once_and_becomes_whole_again(sizes: list[int], data: Any) -> None:
    space = FreeSpace()
    space.give(0, 40)
    taken: list[tuple[int, int]] = []
    for size in sizes:
        offset = space.take(size)
        if offset is not None:
            assert all(offset + size <= b or offset >= b + n for b, n in taken)
            taken.append((offset, size))
        if taken and data.draw(st.booleans()):
            space.give(*taken.pop(data.draw(st.integers(0, len(taken) - 1))))
        assert space.nbytes == 40 - sum(n for _, n in taken)
    for each in taken:
        space.give(*each)
    assert space.take(40) == 0
