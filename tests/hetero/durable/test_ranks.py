"""Durable state of several ranks: committed by N, gone on from by M."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import hetero
from hetero.durable import commits
from hetero.durable.record import RecordFiles
from hetero.durable.state_folder import StateFolder
from hetero.durable.state_set import StateSet
from hetero.runtime.relocation import Migration
from hetero.state.state_files import is_state_file
from tests.support.ranks.checkpointing import COUNTS, OPTIONS, build, steps, whole
from tests.support.ranks.processes import RankFailure, RankPool
from tests.support.ranks.rank_training import told
from tests.support.training.loops import same

FOLDER = "hetero-state"


def commit(rank: int, world: int, path: str) -> dict[str, Any]:
    """Three steps, of which the first two are committed, and two more without commits.

    What the folder has after two is copied: another start goes on from there.
    """
    options = {**OPTIONS[world], "durable": True, "commit_every": 0}
    scratch = Path(path) / f"scratch-{world}"
    if rank == 0:
        scratch.mkdir()
    torch.distributed.barrier()
    model, optimizer = build(rank, world, str(scratch), 0, options)
    assert hetero.resume(model) is None
    steps(rank, model, optimizer, range(1))
    hetero.commit(model)
    steps(rank, model, optimizer, range(1, 2))
    hetero.commit(model, extra={"rank": rank}, blocking=True)
    stored = whole(model, optimizer)
    torch.distributed.barrier()
    if rank == 0:
        shutil.copytree(scratch, Path(path) / f"of-{world}")
    torch.distributed.barrier()
    steps(rank, model, optimizer, range(2, 4))
    found = {"stored": stored, "then": whole(model, optimizer)}
    optimizer.engine.close()
    return found


def go_on(rank: int, world: int, path: str, committed_by: list[int]) -> dict[int, Any]:
    """Goes on from what each of these numbers of ranks has committed, with two steps more."""
    found: dict[int, Any] = {}
    for count in committed_by:
        scratch = Path(path) / f"of-{count}-for-{world}"
        if rank == 0:
            shutil.copytree(Path(path) / f"of-{count}", scratch)
        torch.distributed.barrier()
        options = {**OPTIONS[world], "durable": True}
        model, optimizer = build(rank, world, str(scratch), 7, options)
        last = hetero.resume(model)
        assert last is not None
        stored = whole(model, optimizer)
        steps(rank, model, optimizer, range(2, 4))
        then = whole(model, optimizer)
        optimizer.engine.close()
        names = filter(is_state_file, os.listdir(scratch / FOLDER))
        found[count] = {
            "step": last.step,
            "ranks": last.ranks,
            "rank": last.extra["rank"],
            "stored": stored,
            "then": then,
            "generations": sorted({name.split("-")[0] for name in names}),
        }
    return found


def die_while_committing(rank: int, world: int, path: str, call: str) -> str:
    """Rank 1 is killed in the second commit, and what the other meets.

    `call` is the one before which it dies: "sync" (of its data), "write" (of its record), or
    "remove" (the agreement is behind it).
    """
    options = {**OPTIONS[2], "durable": True, "commit_every": 0, "rank_timeout_s": 20.0}
    model, optimizer = build(rank, world, path, 0, options)
    steps(rank, model, optimizer, range(1))
    hetero.commit(model, blocking=True)
    steps(rank, model, optimizer, range(1, 2))
    if rank == 1:

        def die(*_: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        owner, name = {
            "sync": (commits, "check_named"),
            "write": (RecordFiles, "write"),
            "remove": (StateFolder, "remove_older"),
        }[call]
        setattr(owner, name, die)
    try:
        hetero.commit(model, blocking=True)
    except hetero.HeteroError as error:
        return f"{type(error).__name__}: {error}"
    return "committed"


def after_two_steps(rank: int, world: int, path: str) -> list[list[torch.Tensor]]:
    """What the ranks have after each step, without a crash."""
    model, optimizer = build(rank, world, path, 0, OPTIONS[world])
    found = []
    for step in range(2):
        steps(rank, model, optimizer, range(step, step + 1))
        found.append(whole(model, optimizer))
    optimizer.engine.close()
    return found


def go_on_from_crash(rank: int, world: int, path: str) -> tuple[int, list[torch.Tensor]]:
    """What ranks that start on these files have, and after how many steps."""
    model, optimizer = build(rank, world, path, 7, {**OPTIONS[world], "durable": True})
    last = hetero.resume(model)
    found = whole(model, optimizer)
    optimizer.engine.close()
    return 0 if last is None else last.step, found


def with_a_path_each(
    rank: int, world: int, path: str, steps_before: int, sees_all: bool
) -> tuple[int, list[torch.Tensor], tuple[str, ...]]:
    """Two steps from the last commit, in a directory that this rank alone has; `sees_all` is false
    as on machines of their own. Returns how many steps were made before, and what there is then.
    """
    own = Path(path) / f"rank-{rank}"
    own.mkdir(exist_ok=True)
    real = StateSet.read

    def read(folder: str, notes: list[str]) -> StateSet | None:
        return real(folder, notes) if folder.startswith(str(own)) else None

    options = {**OPTIONS[world], "durable": True}
    with ExitStack() as patches:
        if not sees_all:
            patches.enter_context(patch.object(StateSet, "read", staticmethod(read)))
        model, optimizer = build(rank, world, str(own), steps_before, options)
        last = hetero.resume(model)
        made = 0 if last is None else last.step
        steps(rank, model, optimizer, range(made, made + 2))
        found = whole(model, optimizer)
        optimizer.engine.close()
    return made, found, () if last is None else last.notes


def move_after_one_could_not(rank: int, world: int, path: str) -> tuple[list[str], int, str]:
    """What each of three moves met, of which rank 1 cannot prepare the first, and needs too much
    for the last; how long the checksums were after the first one, and the placement in the end."""
    options = {**OPTIONS[world], "durable": True, "placement_policy": "auto"}
    model, optimizer = build(rank, world, path, 0, options)
    engine, found, between = optimizer.engine, list[str](), 0
    for error in (hetero.HeteroError("in use") if rank else None, None):
        between = engine.chunk_groups[0].memory.scratch_space.checksum_bytes
        with patch.object(Migration, "_require_idle", side_effect=error):
            found.append(told(lambda: engine.set_budget(125_000)))
    with patch.object(Migration, "durable_checksum_bytes", return_value=rank << 20):
        found.append(told(lambda: engine.set_budget(126_000)).partition(":")[0])
    steps(rank, model, optimizer, range(1))
    placed = repr(engine.placement)
    engine.close()
    return found, between, placed


def with_paths_in_part_shared(rank: int, world: int, path: str) -> str:
    """The error of ranks that have one of two directories in common."""
    own = [Path(path) / name for name in (f"rank-{rank}", "shared")]
    for each in own:
        each.mkdir(exist_ok=True)
    options = {**OPTIONS[world], "durable": True, "nvme_path": list(map(str, own))}
    try:
        build(rank, world, path, 0, options)
    except hetero.CheckpointError as error:
        return str(error)
    return "none"


pytestmark = pytest.mark.usefixtures("nothing_left")
Ranks = Callable[[int], RankPool]


@pytest.fixture(scope="module")
def committed(
    tmp_path_factory: pytest.TempPathFactory, ranks_of: Ranks
) -> tuple[Path, dict[int, Any]]:
    """The durable state of each number of ranks, and what its ranks had."""
    path = tmp_path_factory.mktemp("committed")
    return path, {n: ranks_of(n).run(commit, str(path)) for n in COUNTS}


@pytest.mark.parametrize(
    "ranks", [3, *(pytest.param(ranks, marks=pytest.mark.extra) for ranks in (1, 2, 4))]
)
def test_any_number_of_ranks_goes_on_from_any_other(
    ranks: int, committed: tuple[Path, dict[int, Any]], ranks_of: Ranks
) -> None:
    """With as many as then with the same bits, each rank's random numbers too."""
    path, before = committed
    found = ranks_of(ranks).run(go_on, str(path), COUNTS)
    for count in COUNTS:
        for rank, mine in enumerate(found):
            assert (mine[count]["step"], mine[count]["ranks"]) == (2, count)
            assert same(mine[count]["stored"], before[count][0]["stored"])
            assert mine[count]["rank"] == (rank if ranks == count else 0)
            assert mine[count]["generations"] == ["000002"]
            if ranks == count:
                assert same(mine[count]["then"], before[count][rank]["then"])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, ranks2: RankPool) -> list[list[torch.Tensor]]:
    """After each of two steps of two ranks."""
    path = str(tmp_path_factory.mktemp("plain"))
    found: list[list[torch.Tensor]] = ranks2.run(after_two_steps, path)[0]
    return found


@pytest.mark.parametrize(
    ("call", "steps"), [("sync", {1}), ("write", {1}), ("remove", {2})], ids=lambda each: str(each)
)
def test_a_rank_that_is_killed_while_it_commits(
    call: str,
    steps: set[int],
    tmp_path: Path,
    plain: list[list[torch.Tensor]],
    ranks_of: Ranks,
) -> None:
    """All ranks go on from the same step: two of them, or one alone."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    outcomes = ranks_of(2).run_to_the_end(die_while_committing, str(scratch), call)
    assert outcomes[1].failure is not None
    assert outcomes[0].failure is None
    assert outcomes[0].result.startswith("PeerError") or call == "remove"
    for ranks in (1, 2):
        copy = tmp_path / f"for-{ranks}"
        shutil.copytree(scratch, copy)
        for step, found in ranks_of(ranks).run(go_on_from_crash, str(copy)):
            assert step in steps
            assert same(found, plain[step - 1])


@pytest.mark.parametrize("sees_all", [True, False])
def test_ranks_with_a_directory_each_go_on(
    sees_all: bool, tmp_path: Path, plain: list[list[torch.Tensor]], ranks2: RankPool
) -> None:
    """Also where none sees another one's, as with a disk in each machine."""
    first = ranks2.run(with_a_path_each, str(tmp_path), 0, sees_all)
    assert [made for made, _, _ in first] == [0, 0]
    assert all(same(found, plain[1]) for _, found, _ in first)
    for start in (1, 2):
        again = ranks2.run(with_a_path_each, str(tmp_path), 7, sees_all)
        assert [(made, notes) for made, _, notes in again] == [(2 * start, ())] * 2
    if not sees_all:
        return
    path = tmp_path / "rank-1" / "hetero-state"
    for each in (*path.glob("*.commit-?"), *path.glob("*.data")):
        each.unlink()
    with pytest.raises(RankFailure, match=r"has records of the ranks \[0\] alone"):
        ranks2.run(with_a_path_each, str(tmp_path), 7, sees_all)


def test_ranks_move_although_one_could_not_before(ranks2: RankPool, tmp_path: Path) -> None:
    """What the other one has prepared has made its file longer."""
    (first, longer, placed), (second, length, other) = ranks2.run(
        move_after_one_could_not, str(tmp_path)
    )
    refused = "HeteroError: rank 1 could not move homes, so no rank did: HeteroError: in use"
    assert first == [refused, "", "BudgetError"]
    assert second == ["HeteroError: in use", "", "BudgetError"]
    assert longer > length
    assert placed == other


def test_ranks_with_some_directories_in_common_are_refused(
    ranks2: RankPool, tmp_path: Path
) -> None:
    found = ranks2.run(with_paths_in_part_shared, str(tmp_path))
    for each in found:
        assert "rank 0 and rank 1 have some directories of nvme_path in common" in each
