"""Homes that move to a DEVICE of its own and away from it: the same bits, inside all budgets."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hetero
from offload.device.backend import EmulatedBackend
from offload.errors import BudgetError
from offload.memory.tiers import Tier
from tests.support.ranks.processes import RankPool
from tests.support.training.loops import batches, same
from tests.support.training.moving_homes import (
    CHUNK,
    FEW,
    LEAST,
    MANY,
    MOST,
    SOME,
    STEPS,
    Training,
    check_budgets,
    reference,
    start,
)

pytestmark = pytest.mark.usefixtures("nothing_left")

WAYS = [(MOST, FEW), (MOST, SOME), (MOST, MANY), (LEAST, FEW), (LEAST, SOME), (LEAST, MANY)]


def test_each_way_to_each_other(tmp_path: Path) -> None:
    training = start(tmp_path, host_memory=2 * MOST, device_memory=2 * MANY)
    engine = training.engine
    # The neighbours in a ring, both ways round, those two and those three places on.
    moves = [*WAYS, *reversed(WAYS), *WAYS[::2], *WAYS[1::2], *WAYS[::3], *WAYS[1::3], *WAYS[2::3]]
    for number, (host, device) in enumerate(moves):
        engine.set_budget(host, device)
        check_budgets(engine)
        assert (training.on_device == len(engine.layout.chunks)) == (device == MANY)
        assert (training.on_device == 0) == (device == FEW)
        everything = [*engine.placement.param, *engine.placement.optim_state]
        assert Tier.DISK not in everything or host == LEAST
        assert all(engine.params.is_resident(m.chunk) for m in engine.params.in_order()) == (
            device == MANY
        )
        if number % 6 == 0:
            training.step()
    routes = {route for change in engine.changes for route in change.routes}
    assert {(Tier.DEVICE, Tier.HOST), (Tier.HOST, Tier.DEVICE)} <= routes
    assert same(training.finish(), reference())


@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.tuples(
            st.one_of(st.none(), st.integers(250 << 10, 2 << 20)),
            st.one_of(st.none(), st.integers(150 << 10, 4 << 20)),
            st.sampled_from(["before", "within", "between micro-batches"]),
        ).filter(lambda move: move[:2] != (None, None)),
        max_size=STEPS + 1,
    ),
    st.sampled_from(["adamw", "lion", "sgd"]),
    st.sampled_from(["bf16", "fp32"]),
    st.sampled_from([1, 2]),
    st.sampled_from(["auto", "cpu", "nvme"]),
    st.sampled_from(["emulated", "cpu"]),
)
def test_any_sequence_of_budgets_gives_the_same_bits(
    tmp_path: Path,
    moves: list[tuple[int | None, int | None, str]],
    rule: str,
    dtype: str,
    accumulate: int,
    policy: str,
    backend: str,
) -> None:
    """Also between backward and step, where gradients move with what they are."""
    options = {"placement_policy": policy, "dtype": dtype}
    training = start(tmp_path, rule, accumulate, backend=backend, **options)
    engine = training.engine

    def move(host: int | None, device: int | None) -> None:
        before, placed = engine.ledger.budget_bytes, engine.placement
        try:
            engine.set_budget(host, device)
        except BudgetError:
            assert engine.ledger.budget_bytes == before
            assert engine.placement == placed
        check_budgets(engine)

    for host, device, when in moves:
        if training.made == STEPS or when == "before":
            move(host, device)
        if training.made < STEPS:
            for number in range(accumulate):
                if when == "between micro-batches" and number:
                    move(host, device)
                training.backward()
            if when == "within":
                move(host, device)
            training.update()
        assert engine.ledger.peak_bytes["device"] <= max(SOME, 4 << 20)
        assert engine.ledger.peak_bytes["host"] <= MOST
    assert same(training.finish(), reference(rule, accumulate, dtype=dtype))


def test_without_nvme_they_move_between_device_and_ram() -> None:
    training = start(None, host_memory=16 << 20)
    engine = training.engine
    for device in (FEW, MANY, SOME, FEW, SOME):
        engine.set_budget(device_memory=device)
        check_budgets(engine)
        training.step()
    assert {route for change in engine.changes for route in change.routes} == {
        (Tier.DEVICE, Tier.HOST),
        (Tier.HOST, Tier.DEVICE),
    }
    assert "from DEVICE to HOST" in engine.changes[0].words()
    assert same(training.finish(), reference())


def watch_takes(engine: Any, refuse: int = 0) -> list[BudgetError]:
    """Errors of second homes from now on; the first `refuse` in RAM of each kind of state get
    one.
    """
    met: list[BudgetError] = []
    for homes in engine.chunk_groups[0].memory.homes.values():
        taken, allocate = [0], homes.allocate

        def watched(
            chunk: Any, tier: Tier, allocate: Any = allocate, taken: list[int] = taken
        ) -> None:
            try:
                taken[0] += tier is Tier.HOST
                if tier is Tier.HOST and taken[0] <= refuse:
                    raise BudgetError("no room")
                allocate(chunk, tier)
            except BudgetError as error:
                met.append(error)
                raise

        homes.allocate = watched
    return met


def test_what_has_no_room_in_ram_meanwhile_goes_by_the_file(tmp_path: Path) -> None:
    """Slots and buffers that there will be fewer of, and homes that leave, fill the RAM."""
    training = start(tmp_path, host_memory=1 << 20)
    engine = training.engine
    training.step()
    met = watch_takes(engine)
    engine.set_budget(device_memory=FEW)
    assert met
    assert training.on_device == 0
    assert engine.changes[-1].routes[Tier.DEVICE, Tier.HOST]
    assert engine.ledger.peak_bytes["host"] <= 1 << 20
    assert same(training.finish(), reference())


def test_no_room_to_move_in_is_told_and_nothing_is_changed() -> None:
    training = start(None, host_memory=16 << 20, device_memory=MANY)
    engine = training.engine
    watch_takes(engine, refuse=1)
    for _ in range(3):  # a parameter, a gradient, an optimizer state
        with nothing_changed(training), pytest.raises(BudgetError, match="there is no nvme_path"):
            engine.set_budget(device_memory=FEW)
        training.step()
    engine.set_budget(device_memory=FEW)
    assert same(training.finish(), reference())


def test_budgets_that_cannot_be_are_refused_with_the_numbers() -> None:
    training = start(None, host_memory=16 << 20, device_memory=MANY)
    engine = training.engine
    with pytest.raises(BudgetError, match=r"host_memory cannot become 100.0 KiB .* smallest"):
        engine.set_budget(host_memory=100 << 10, device_memory=FEW)
    with pytest.raises(BudgetError, match=r"device_memory cannot become 1.0 KiB .* smallest"):
        engine.set_budget(device_memory="1KiB")
    with pytest.raises(BudgetError, match=r"device_memory cannot become 200.0 KiB .*host_memory"):
        engine.set_budget(host_memory=1 << 20, device_memory=MANY)
        engine.set_budget(device_memory=FEW)
    with pytest.raises(ValueError, match="device_memory"):
        engine.set_budget(device_memory="some")
    with pytest.raises(ValueError, match="needs host_memory, device_memory"):
        engine.set_budget()
    assert same(training.finish(), reference())


def test_only_slots_may_change_their_number() -> None:
    """Policy "cpu" has no home on DEVICE."""
    training = start(None, placement_policy="cpu")
    engine = training.engine
    slots = []
    for device in (FEW, SOME, FEW, 2 * FEW):
        engine.set_budget(device_memory=device)
        slots.append(engine.chunk_groups[0].memory.arenas.gathered.slots)
        assert slots[-1] == engine.placement.gathered_slots
        check_budgets(engine)
        training.step()
    assert slots[0] == slots[2] < slots[3] < slots[1]
    assert same(training.finish(), reference())


def test_computing_in_ram_device_memory_is_that_of_slots(tmp_path: Path) -> None:
    training = start(tmp_path, backend="cpu", host_memory=300 << 10, device_memory=96 << 10)
    engine = training.engine
    few = engine.placement.gathered_slots
    engine.set_budget(device_memory=64 << 10)
    assert engine.placement.gathered_slots * CHUNK * 2 <= 64 << 10
    assert engine.placement.gathered_slots < few
    assert same(training.finish(), reference())


# Faults


@contextmanager
def nothing_changed(training: Training) -> Iterator[None]:
    engine = training.engine
    placed, in_use = engine.placement, dict(engine.ledger.in_use_bytes)
    budgets = engine.ledger.budget_bytes
    yield
    assert engine.placement == placed
    now = engine.ledger.in_use_bytes
    assert (now["host"], now["device"]) == (in_use["host"], in_use["device"])
    assert engine.ledger.budget_bytes == budgets


@pytest.mark.covering(1)
@pytest.mark.parametrize("direction", ["h2d", "d2h"])
@pytest.mark.parametrize("host", [MOST, LEAST])
def test_a_failed_copy_leaves_everything_where_it_was(
    direction: str, host: int, tmp_path: Path
) -> None:
    training = start(tmp_path, host_memory=host)
    engine = training.engine
    backend = engine.backend
    assert isinstance(backend, EmulatedBackend)
    engine.set_budget(device_memory=SOME + (300 << 10))  # so that there is a file
    to = MANY if direction == "h2d" else FEW
    for nth in (0, 1, 7):
        training.step()
        with nothing_changed(training):
            getattr(backend, direction).inject(nth, error=errno.EIO)
            with pytest.raises(OSError, match="failed"):
                engine.set_budget(device_memory=to)
    training.step()
    engine.set_budget(device_memory=to)
    assert training.on_device == (len(engine.layout.chunks) if to == MANY else 0)
    assert same(training.finish(), reference())


@pytest.mark.parametrize(("op", "to"), [("write", FEW), ("read", MANY)])
def test_a_failed_transfer_of_the_file_likewise(op: str, to: int, tmp_path: Path) -> None:
    training = start(tmp_path, placement_policy="auto", host_memory=600 << 10)
    engine = training.engine
    training.step()
    engine.chunk_groups[0].pipeline.flush()
    engine.synchronize()
    disk = engine.chunk_groups[0].disk
    assert disk is not None
    with nothing_changed(training):
        disk.io.inject(op, 2, errno.ENOSPC)
        with pytest.raises(OSError, match="No space left"):
            engine.set_budget(device_memory=to)
    training.step()
    engine.set_budget(device_memory=to)
    assert same(training.finish(), reference())


@pytest.mark.parametrize("nth", [3, pytest.param(0, marks=pytest.mark.extra)])
def test_what_went_by_the_file_and_cannot_be_read_stays_there(nth: int, tmp_path: Path) -> None:
    """Everything was on DEVICE, and is to be in RAM; meanwhile there is room for the half only."""
    training = start(tmp_path, host_memory=16 << 20, device_memory=MANY)
    engine = training.engine
    training.step()
    watch_takes(engine, refuse=9)
    engine.set_budget(device_memory=MANY - 1)
    parts = engine.chunk_groups[0].memory.scratch_space
    parts.reserve(1 << 20)
    assert parts.parts is not None
    parts.parts.io.inject("read", nth, errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        engine.set_budget(device_memory=FEW)
    now = engine.placement
    on_disk = [tiers.count(Tier.DISK) for tiers in (now.param, now.grad, now.optim_state)]
    assert sum(on_disk) == 1
    assert training.on_device == 0
    check_budgets(engine)
    training.step()
    engine.set_budget(device_memory=FEW + 4096)
    assert Tier.DISK not in (*engine.placement.param, *engine.placement.optim_state)
    assert same(training.finish(), reference())


def on_ranks(
    rank: int, world: int, path: str, stage: int, policy: str, backend: str, moving: bool
) -> list[torch.Tensor]:
    """A training in which all ranks move homes, also of gradients that are means already."""
    training = start(
        Path(path),
        zero_stage=stage,
        rank_timeout_s=60.0,
        chunk_numel=8192,
        placement_policy=policy,
        backend=backend,
        device_memory=1200 << 10 if backend == "emulated" else None,
    )
    engine = training.engine
    found: list[torch.Tensor] = []
    budgets = [(MOST, MANY), (1300 << 10, 600 << 10), (MOST, 1200 << 10), (MOST, 600 << 10)]
    for number, tokens in enumerate(batches(4, seed=rank)):
        loss = training.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        found.append(loss.detach().clone())
        del loss
        if number % 2:
            found.append(hetero.clip_grad_norm_(training.model.parameters(), 1.0))
        if moving and (number % 2 or stage > 1):
            training.engine.steps.grad_intake.average(force=True)
            host, device = budgets[number]
            engine.set_budget(host, device if backend == "emulated" else None)
        training.optimizer.step()
        training.optimizer.zero_grad()
    if moving:
        tiers = {tier for change in engine.changes for route in change.routes for tier in route}
        assert (Tier.DEVICE in tiers) == (policy == "auto" and backend == "emulated")
        assert sum(change.moved_bytes for change in engine.changes)
    found += hetero.masters(training.model.parameters())
    engine.close()
    return found


PLAIN: list[list[torch.Tensor]] = []  # by rank: placements and stages change no bit


@pytest.mark.parametrize(
    ("stage", "policy", "backend"),
    [
        (2, "auto", "emulated"),
        pytest.param(3, "nvme", "emulated", marks=pytest.mark.extra),
        pytest.param(3, "auto", "emulated", marks=pytest.mark.extra),
        (1, "auto", "cpu"),
        (3, "auto", "cpu"),
    ],
)
def test_ranks_move_together(
    stage: int, policy: str, backend: str, ranks2: RankPool, tmp_path: Path
) -> None:
    PLAIN[:] = PLAIN or ranks2.run(on_ranks, str(tmp_path), 2, "auto", "cpu", False)
    moved = ranks2.run(on_ranks, str(tmp_path), stage, policy, backend, True)
    for mine, theirs in zip(PLAIN, moved, strict=True):
        assert same(mine, theirs)
