"""durable=True: the next start goes on from the last commit, with the same bits."""

from __future__ import annotations

import errno
import os
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import hetero
from hetero.durable.record import RecordFiles
from hetero.runtime.relocation import Migration
from offload.memory.tiers import Account, Tier
from tests.support.checkpoint.small_trainings import (
    ALL_PLACES,
    PLACES,
    RULES_AND_DTYPES,
    build,
    first,
    state_of,
    states,
    steps,
    whole,
)
from tests.support.training.loops import same
from tests.support.training.small_net import loss_of
from tests.support.training.smallest import smallest_host_memory

pytestmark = pytest.mark.usefixtures("nothing_left")
DURABLE = {"durable": True}


def crashed(scratch: Path, to: Path) -> Path:
    """What another start finds if this one ends now."""
    shutil.copytree(scratch, to)
    return to


def folder(path: Path, name: str) -> Path:
    made = path / name
    made.mkdir()
    return made


@pytest.mark.covering(1)
@pytest.mark.parametrize("overlap", ["none", "forward", "backward", "both"])
@pytest.mark.parametrize("place", ALL_PLACES)
@pytest.mark.usefixtures("fake_cuda_of_place")
def test_every_placement_and_overlap_goes_on(place: str, overlap: str, tmp_path: Path) -> None:
    """Three steps, a crash, one; and elsewhere, too."""
    settings = {**ALL_PLACES[place], "debug": {"overlap_updates": overlap}, **DURABLE}
    scratch = folder(tmp_path, "scratch")
    model, optimizer = build(settings, scratch)
    assert hetero.resume(model) is None
    steps(model, optimizer, range(3))
    hetero.commit(model, blocking=True)
    copy = crashed(scratch, tmp_path / "copy")
    steps(model, optimizer, range(3, 5))
    assert same(whole(model, optimizer), states()[5])
    optimizer.engine.close()
    elsewhere = "disk" if place == "cpu" else "cpu"
    for options in (settings, {**PLACES[elsewhere], **DURABLE}):
        again = crashed(copy, tmp_path / f"again-{options['placement_policy']}")
        model, optimizer = build(options, again, seed=7)
        last = hetero.resume(model)
        assert last is not None
        assert (last.step, last.ranks) == (3, 1)
        assert same(whole(model, optimizer), states()[3])
        steps(model, optimizer, range(3, 4))
        assert same(whole(model, optimizer), states()[4])
        optimizer.engine.close()


@pytest.mark.covering(1)
@pytest.mark.parametrize(("rule", "dtype", "state_dtype"), RULES_AND_DTYPES[1::3])
@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_every_rule_and_dtype_goes_on(
    place: str, rule: str, dtype: str, state_dtype: str, tmp_path: Path
) -> None:
    options = {**ALL_PLACES[place], **DURABLE, "commit_every": 0}
    scratch = folder(tmp_path, "scratch")
    model, optimizer = build(options, scratch, rule, dtype, state_dtype)
    for step in range(3):
        steps(model, optimizer, range(step, step + 1))
        hetero.commit(model)
    stored = whole(model, optimizer)
    hetero.commit(model, blocking=True)
    copy = crashed(scratch, tmp_path / "copy")
    steps(model, optimizer, range(3, 5))
    wanted = whole(model, optimizer)
    first(optimizer).engine.close()

    model, optimizer = build(options, copy, rule, dtype, state_dtype, seed=7)
    assert same(whole(model, optimizer), stored)
    steps(model, optimizer, range(3, 5))
    assert same(whole(model, optimizer), wanted)
    first(optimizer).engine.close()


def test_steps_since_the_last_commit_are_lost(tmp_path: Path) -> None:
    """With commit_every=3 five steps leave the third one's state, and close() adds nothing."""
    options = {**PLACES["disk"], **DURABLE, "commit_every": 3}
    model, optimizer = build(options, tmp_path)
    steps(model, optimizer, range(5))
    optimizer.engine.close()
    step, found = state_of(tmp_path)
    assert step == 3
    assert same(found, states()[3])


@pytest.mark.parametrize("place", ["cpu", "disk", "parameters on disk"])
def test_writes_between_commits_are_the_later_ones(place: str, tmp_path: Path) -> None:
    """What user code writes outside of steps, and of gathered(), is no part of the last commit, and
    part of the next one."""
    options = {**ALL_PLACES[place], **DURABLE, "commit_every": 0}
    scratch = folder(tmp_path, "scratch")
    model, optimizer = build(options, scratch)
    steps(model, optimizer, range(3))
    hetero.commit(model, blocking=True)
    for param in model.parameters():
        torch.nn.init.constant_(param, 0.25)
    for _ in range(2):
        loss_of(model, 3)  # for whose uses what was written leaves RAM
    earlier = crashed(scratch, tmp_path / "earlier")
    hetero.commit(model, blocking=True)
    written = whole(model, optimizer)
    later = crashed(scratch, tmp_path / "later")
    optimizer.engine.close()
    assert same(state_of(earlier)[1], states()[3])
    assert same(state_of(later, options)[1], written)


def test_what_has_no_gradient_goes_where_its_chunk_goes(tmp_path: Path) -> None:
    """The first update after a commit writes elsewhere than to what that has."""
    debug = {"shard_strategy": "bucket"}
    options = {**PLACES["disk"], **DURABLE, "commit_every": 0, "debug": debug}
    model, optimizer = build(options, tmp_path)
    steps(model, optimizer, range(2))
    hetero.commit(model, blocking=True)
    before = hetero.masters(model.first.bias)
    optimizer.backward(model.first.weight.float().square().sum())
    optimizer.step()
    assert same(hetero.masters(model.first.bias), before)
    optimizer.engine.close()


def test_what_has_left_memory_is_copied_anew_when_it_comes_back(tmp_path: Path) -> None:
    """A commit after each move, and no step: the copy from before is not the last commit's."""
    options = {**PLACES["waiting"], "host_memory": "1MiB", **DURABLE, "commit_every": 0}
    scratch = folder(tmp_path, "scratch")
    model, optimizer = build(options, scratch)
    steps(model, optimizer, range(2))
    placements = [optimizer.engine.placement]
    hetero.commit(model, blocking=True)
    for budget in ("200KiB", "1MiB"):
        optimizer.engine.set_budget(budget)
        placements.append(optimizer.engine.placement)
        hetero.commit(model, blocking=True)
    assert placements[0].optim_state == placements[2].optim_state != placements[1].optim_state
    copy = crashed(scratch, tmp_path / "copy")
    optimizer.engine.close()
    step, found = state_of(copy)
    assert step == 2
    assert same(found, states()[2])


def warmup(step: int) -> float:
    return (step + 1) / 10


def test_the_loops_own_state_comes_back(tmp_path: Path) -> None:
    """What the constructor of a scheduler changes, too. Also where a start was killed before its
    own first commit: it has made one at once."""
    options = {**PLACES["disk"], **DURABLE, "commit_every": 0}
    model, optimizer = build(options, tmp_path)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup)
    generator = torch.Generator().manual_seed(5)
    for step in range(2):
        steps(model, optimizer, range(step, step + 1))
        scheduler.step()
    extra = {"scheduler": scheduler, "generator": generator}
    hetero.commit(model, extra={**extra, "made": 2}, blocking=True)
    wanted = torch.rand(2), torch.rand(2, generator=generator)
    optimizer.engine.close()
    for _ in range(2):
        model, optimizer = build(options, tmp_path)
        torch.rand(7)  # of whatever the loop makes
        again = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup)
        assert optimizer.param_groups[0]["lr"] != pytest.approx(3e-4)
        generator = torch.Generator()
        last = hetero.resume(model, extra={"scheduler": again, "generator": generator})
        assert last is not None
        assert last.extra["made"] == 2
        assert again.state_dict() == scheduler.state_dict()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(3e-4)
        assert torch.equal(torch.rand(2), wanted[0])
        assert torch.equal(torch.rand(2, generator=generator), wanted[1])
        with pytest.raises(ValueError, match="has no extra 'loader'"):
            hetero.resume(model, extra={"loader": again})
        optimizer.engine.close()


def test_a_rate_that_is_a_tensor_comes_back(tmp_path: Path) -> None:
    """Although the constructor of a scheduler has written to it."""
    options = {**PLACES["disk"], **DURABLE, "commit_every": 0}
    model, optimizer = build(options, tmp_path)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    hetero.commit(model, blocking=True)
    optimizer.engine.close()
    model, optimizer = build(options, tmp_path)
    torch.optim.lr_scheduler.LambdaLR(optimizer, warmup)
    assert optimizer.param_groups[0]["lr"] != 0.25
    hetero.resume(model)
    assert optimizer.param_groups[0]["lr"] == 0.25
    optimizer.engine.close()


@pytest.mark.parametrize("every", [1, 0])
def test_a_loop_that_does_not_ask_where_it_goes_on_is_told(every: int, tmp_path: Path) -> None:
    """It would make the steps again that were made already. Nothing it does is committed."""
    options = {**PLACES["disk"], **DURABLE, "commit_every": every}
    model, optimizer = build(options, tmp_path)
    assert hetero.resume(model) is None
    steps(model, optimizer, range(2))
    hetero.commit(model)
    optimizer.engine.close()
    model, optimizer = build(options, tmp_path)
    with pytest.raises(hetero.HeteroError, match="where 2 steps were made; call hetero.resume"):
        steps(model, optimizer, range(1))
        hetero.commit(model)
    with pytest.raises(hetero.HeteroError, match="before the first step, and 1 were made"):
        hetero.resume(model)
    optimizer.engine.close()
    model, optimizer = build(options, tmp_path)
    last = hetero.resume(model)
    assert last is not None
    assert last.step == 2
    steps(model, optimizer, range(2, 3))
    optimizer.engine.close()


def test_a_commit_goes_on_beside_the_next_backward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits for it is the next update: what the last commit has is not overwritten before."""
    model, optimizer = build({**PLACES["speculative"], **DURABLE, "commit_every": 0}, tmp_path)
    gate, write = threading.Event(), RecordFiles.write
    gate.set()

    def held(*arguments: Any) -> None:
        assert gate.wait(60)
        write(*arguments)

    monkeypatch.setattr(RecordFiles, "write", held)
    steps(model, optimizer, range(2))
    hetero.commit(model, blocking=True)
    steps(model, optimizer, range(2, 3))
    gate.clear()
    hetero.commit(model)  # returns, while it is held
    optimizer.backward(torch.stack([p.float().sum() for p in model.parameters()]).sum())
    ended = threading.Event()

    def step() -> None:
        optimizer.step()
        ended.set()

    thread = threading.Thread(target=step)
    thread.start()
    assert not ended.wait(0.2)  # (it could be late, but not early)
    gate.set()
    thread.join(60)
    assert ended.is_set()
    optimizer.engine.close()


@pytest.mark.parametrize("options", [DURABLE, {"verify_reads": True}, {}])
@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_checksums_of_pages_are_in_the_budget(
    place: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Four bytes for each page of the file, also in the smallest budget that is named."""
    settings = {**PLACES[place], **options}
    first = {**settings, "host_memory": "40KiB" if place == "disk" else "100KiB"}
    settings["host_memory"] = smallest_host_memory(lambda: build(first, tmp_path))
    model, optimizer = build(settings, tmp_path)
    engine = optimizer.engine
    steps(model, optimizer, range(3))
    disk = engine.chunk_groups[0].disk
    file_bytes = 0 if disk is None else disk.scratch.nbytes
    charged = engine.ledger.used(Tier.HOST, Account.FILE)
    assert charged == (0 if not options else file_bytes // 1024)
    assert charged > 0 or options != DURABLE
    engine.close()
    assert engine.ledger.used(Tier.HOST, Account.FILE) == 0


@pytest.mark.parametrize("place", ["cpu", "disk", "waiting", "emulated"])
def test_the_smallest_budget_suffices_for_moves_and_what_follows(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file grows while homes move, as what the last commit has is not free before the next one;
    its checksums are in the budget, too. A refusal has changed nothing, and what it names suffices,
    or names what does beside the file that it takes. No placement counts on too many checksums,
    unless homes could go through the file that go to RAM."""
    prepare = Migration.prepare

    def counted(migration: Migration) -> None:
        space = migration._memory.scratch_space
        wanted = max(space.checksum_bytes, migration.durable_checksum_bytes())
        prepare(migration)
        found = space.checksum_bytes
        assert found == wanted or (place == "emulated" and found < wanted)

    monkeypatch.setattr(Migration, "prepare", counted)
    settings = {**PLACES[place], **DURABLE, "commit_every": 0}
    small = {**settings, "host_memory": "40KiB"}
    least = smallest_host_memory(lambda: build(small, tmp_path))
    model, optimizer = build({**settings, "host_memory": least}, tmp_path)
    engine = optimizer.engine
    made = 0
    for budget in [least, least + (20 << 10), least, least + (20 << 10), 1 << 20, least, 1] * 2:
        before, placed = engine.ledger.budget_bytes, engine.placement
        for _ in range(3):
            try:
                engine.set_budget(budget)
            except hetero.BudgetError as refusal:
                assert (engine.ledger.budget_bytes, engine.placement) == (before, placed)
                budget = int(re.findall(r"(\d+) bytes\), under", str(refusal))[0])
            else:
                break
        assert engine.ledger.budget_bytes["host"] == budget
        assert engine.ledger.in_use_bytes["host"] <= engine.ledger.budget_bytes["host"]
        steps(model, optimizer, range(made, made + 1))
        made += 1
        if made % 3 == 0:
            hetero.commit(model, blocking=True)
            steps(model, optimizer, range(made, made + 1))
            made += 1
        if made == 7:
            assert same(whole(model, optimizer), states()[made])
    engine.close()


def test_moves_that_fail_take_no_room(tmp_path: Path) -> None:
    """No commit has what they wrote: the next move writes there."""
    settings = {"placement_policy": "auto", "host_memory": "1MiB", "commit_every": 0, **DURABLE}
    model, optimizer = build(settings, tmp_path)
    steps(model, optimizer, range(1))
    used = []
    for _ in range(3):
        optimizer.engine.chunk_groups[0].disk.io.inject("write", 2, error=errno.EIO)
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            optimizer.engine.set_budget("96KiB")
        used.append(optimizer.engine.ledger.in_use_bytes["disk"])
    assert len(set(used)) == 1
    optimizer.engine.close()
