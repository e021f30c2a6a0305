"""Saves that go on beside training: the state of then, the same bits, and errors that are seen."""

from __future__ import annotations

import errno
import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import hetero
from hetero.checkpoint.data_writer import DataWriter
from hetero.checkpoint.engine_checkpoint import OwnChunk
from hetero.checkpoint.folder import is_checkpoint
from hetero.checkpoint.manifest import read_manifest
from hetero.chunk_groups.home_tiles import HomeTiles
from hetero.chunks.layout import Chunk
from hetero.state.chunk_updates import Snapshot
from tests.support.checkpoint.small_trainings import (
    PLACES,
    build,
    first,
    states,
    steps,
    whole,
)
from tests.support.training.loops import same
from tests.support.training.small_net import Net, loss_of
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left")


@contextmanager
def held_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No chunk is copied before the event is set, or training waits for one."""
    go = threading.Event()
    take, wait = Snapshot.take, Snapshot.wait

    def take_later(self: Snapshot) -> object:
        assert go.wait(60)
        return take(self)

    def let_go(self: Snapshot, chunk: object) -> None:
        go.set()
        wait(self, chunk)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Snapshot, "take", take_later)
        patch.setattr(Snapshot, "wait", let_go)
        try:
            yield go
        finally:
            go.set()


@pytest.mark.covering(1)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.usefixtures("fake_cuda_of_place")
@pytest.mark.parametrize("rule", ["adam", "muon"])
def test_it_has_the_state_of_then(
    rule: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although all of it is copied after the next forward and backward."""
    model, optimizer = build(PLACES[place], tmp_path, rule)
    steps(model, optimizer, range(3))
    then = whole(model, optimizer)
    with held_back(monkeypatch) as go:
        made = hetero.save(tmp_path / "saved", model, optimizer, blocking=False)
        assert not made.done
        steps(model, optimizer, range(3, 4))
        assert go.is_set()
    steps(model, optimizer, range(4, 6))
    made.wait(60)
    assert made.done
    wanted = whole(model, optimizer)
    first(optimizer).engine.close()

    model, optimizer = build(PLACES[place], tmp_path, rule, seed=7)
    hetero.load(tmp_path / "saved", model, optimizer)
    assert same(whole(model, optimizer), then)
    steps(model, optimizer, range(3, 6))
    assert same(whole(model, optimizer), wanted)
    first(optimizer).engine.close()


def test_a_chunk_that_training_waits_for_is_copied_next() -> None:
    chunks = [Chunk(number, 1, (), True) for number in range(3)]
    snapshot = Snapshot(chunks)
    assert snapshot.take() is chunks[0]
    waits = threading.Thread(target=snapshot.wait, args=(chunks[2],), daemon=True)
    waits.start()
    until(lambda: snapshot.take() is chunks[2])
    snapshot.copied(chunks[2])
    waits.join(60)
    assert snapshot.take() is chunks[0]


# (test_it_has_the_state_of_then() has the other placements.)
@pytest.mark.parametrize("place", ["cpu", "speculative", "emulated"])
def test_many_saves_change_no_bit(place: str, tmp_path: Path) -> None:
    """One under way nearly always: each is what there was when it was begun."""
    model, optimizer = build(PLACES[place], tmp_path)
    for step in range(7):
        steps(model, optimizer, range(step, step + 1))
        made = hetero.save(tmp_path / f"step-{step}", model, optimizer, blocking=False, keep=3)
    made.wait(60)
    assert same(whole(model, optimizer), states()[7])
    assert len(list(tmp_path.glob("step-*"))) == 3
    for step in (5, 6):
        assert hetero.load(tmp_path / f"step-{step}", model, optimizer).step == step + 1
        assert same(whole(model, optimizer), states()[step + 1])
    optimizer.engine.close()


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_other_changes_wait_too(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading, and homes that move."""
    model, optimizer = build(PLACES[place], tmp_path)
    steps(model, optimizer, range(2))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    steps(model, optimizer, range(2, 3))
    with held_back(monkeypatch) as go:
        made = hetero.save(tmp_path / "a", model, optimizer, blocking=False)
        model.load_state_dict(state)
        assert go.is_set()
    made.wait(60)
    if place == "disk":
        made = hetero.save(tmp_path / "b", model, optimizer, blocking=False)
        optimizer.engine.set_budget(host_memory="1MiB")
        assert made._done.wait(60)
        made.wait()
    hetero.load(tmp_path / "a", model, optimizer)
    assert same(whole(model, optimizer), states()[3])
    optimizer.engine.close()


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_parameters_that_are_unfrozen_wait_too(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They move to a chunk group of their own; the checkpoint has them frozen."""
    torch.manual_seed(0)
    model = Net()
    model.first.weight.requires_grad_(False)
    optimizer = hetero.HybridAdam(model.parameters(), lr=1e-3)
    options = {**PLACES[place], "host_memory": "512KiB"}
    more = {"nvme_path": str(tmp_path), "chunk_numel": 4096, "dtype": "bf16", **options}
    model, optimizer = hetero.initialize(model, optimizer, **more)
    steps(model, optimizer, range(2))
    waits: list[bool] = []
    wait_all = Snapshot.wait_all

    def noted(self: Snapshot) -> None:
        waits.append(not go.is_set())
        go.set()
        wait_all(self)

    with held_back(monkeypatch) as go:
        monkeypatch.setattr(Snapshot, "wait_all", noted)
        made = hetero.save(tmp_path / "saved", model, optimizer, blocking=False)
        model.first.weight.requires_grad_(True)
        steps(model, optimizer, range(2, 3))
    made.wait(60)
    assert waits[0], "it did not wait for the chunks to be copied"
    record = read_manifest(tmp_path / "saved").params["first.weight"]
    assert not record.trained
    assert optimizer.engine.find(model.first.weight).chunk.trainable
    optimizer.engine.close()


def test_a_commit_lets_nothing_go_that_a_save_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next update waits for the save, although the commit is over."""
    model, optimizer = build({**PLACES["cpu"], "durable": True, "commit_every": 0}, tmp_path)
    steps(model, optimizer, range(2))
    with held_back(monkeypatch) as go:
        made = hetero.save(tmp_path / "saved", model, optimizer, blocking=False)
        hetero.commit(model, blocking=True)
        steps(model, optimizer, range(2, 3))
        assert go.is_set()
    made.wait(60)
    hetero.load(tmp_path / "saved", model, optimizer)
    assert same(whole(model, optimizer), states()[2])
    optimizer.engine.close()


@pytest.mark.parametrize("is_read", [False, True])
def test_a_write_by_user_code_is_an_error(
    is_read: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can hold it back: it goes to memory that compute uses, when a chunk is read, too."""
    model, optimizer = build(PLACES["cpu"], tmp_path)
    values = OwnChunk.values

    def write_then(own: OwnChunk, tiles: HomeTiles) -> Iterator[torch.Tensor]:
        yield from values(own, tiles)
        if is_read and "last.weight" in own.names.values():
            model.last.weight.detach().mul_(2)

    with monkeypatch.context() as patch, held_back(patch) as go:
        patch.setattr(OwnChunk, "values", write_then)
        made = hetero.save(tmp_path / "saved", model, optimizer, blocking=False)
        if not is_read:
            model.last.weight.detach().mul_(2)
        go.set()
        with pytest.raises(hetero.CheckpointError, match=r"last\.weight was written to while"):
            made.wait(60)
    assert not (tmp_path / "saved").exists()
    assert list(tmp_path.glob(".*")) == []
    hetero.save(tmp_path / "saved", model, optimizer)
    optimizer.engine.close()


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("write", OSError(errno.EIO, "a bad disk")),
        ("finish", hetero.StoreError(errno.ENOSPC, "no room", "it")),
    ],
)
def test_a_failure_is_told_by_the_next_save(
    call: str, error: OSError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And training goes on, an update that waits for a chunk, too; what was there before stays, and
    nothing of what the failure's frames have had."""
    model, optimizer = build(PLACES["disk"], tmp_path)
    steps(model, optimizer, range(2))
    hetero.save(tmp_path / "saved", model, optimizer)

    held: list[weakref.ref[torch.Tensor]] = []

    def fail(*given: object) -> None:
        buffer = torch.zeros(1)
        held.append(weakref.ref(buffer))
        raise error

    def save_again() -> None:
        buffer = torch.zeros(1)
        held.append(weakref.ref(buffer))
        with pytest.raises(type(error), match="a bad disk|no room"):
            hetero.save(tmp_path / "saved", model, optimizer)

    with monkeypatch.context() as patch:
        patch.setattr(DataWriter, call, fail)
        with held_back(monkeypatch):
            made = hetero.save(tmp_path / "saved", model, optimizer, blocking=False)
            steps(model, optimizer, range(2, 4))
        assert made._done.wait(60)
        save_again()
        gc.collect()
        assert all(reference() is None for reference in held)
    hetero.load(tmp_path / "saved", model, optimizer)
    assert same(whole(model, optimizer), states()[2])
    hetero.save(tmp_path / "saved", model, optimizer)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved"]
    optimizer.engine.close()


def test_close_waits_for_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = build(PLACES["disk"], tmp_path)
    steps(model, optimizer, range(2))
    hetero.save(tmp_path / "saved", model, optimizer, blocking=False)
    optimizer.engine.close()
    assert is_checkpoint(tmp_path / "saved")
    model, optimizer = build(PLACES["cpu"], tmp_path, seed=7)
    hetero.load(tmp_path / "saved", model, optimizer)
    assert same(whole(model, optimizer), states()[2])
    optimizer.engine.close()


@pytest.mark.parametrize("place", ["cpu", "disk", "speculative"])
def test_forward_and_backward_wait_for_nothing(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them come before the first chunk is copied; no update is made in backward."""
    settings = {"debug": {"overlap_updates": "forward"}, **PLACES[place]}
    model, optimizer = build(settings, tmp_path)
    steps(model, optimizer, range(1))
    optimizer.backward(loss_of(model, 1))
    early = optimizer.engine.chunk_groups[0].updates.speculative
    assert bool(early) == (place == "speculative")
    optimizer.step()
    optimizer.zero_grad()
    with held_back(monkeypatch) as go:
        made = hetero.save(tmp_path / "saved", model, optimizer, blocking=False)
        for seed in range(3):
            optimizer.backward(loss_of(model, seed))
        hetero.clip_grad_norm_(model.parameters(), 1.0)
        assert not go.is_set()
        optimizer.step()
        assert go.is_set()
    made.wait(60)
    optimizer.engine.close()
