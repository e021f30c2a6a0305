"""Durable state of several ranks: committed by N, gone on from by M."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hetero.checkpoint.test_save_load import same
from tests.support.durable import committing
from tests.support.ranks import checkpointing
from tests.support.ranks.processes import RankFailure, RankPool

pytestmark = pytest.mark.usefixtures("nothing_left")
Ranks = Callable[[int], RankPool]


@pytest.fixture(scope="module")
def committed(
    tmp_path_factory: pytest.TempPathFactory, ranks_of: Ranks
) -> tuple[Path, dict[int, Any]]:
    """The durable state of each number of ranks, and what its ranks had."""
    path = tmp_path_factory.mktemp("committed")
    counts = checkpointing.OPTIONS
    return path, {n: ranks_of(n).run(committing.commit, str(path)) for n in counts}


@pytest.mark.parametrize(
    "ranks", [1, 3, *(pytest.param(ranks, marks=pytest.mark.extra) for ranks in (2, 4))]
)
def test_any_number_of_ranks_goes_on_from_any_other(
    ranks: int, committed: tuple[Path, dict[int, Any]], ranks_of: Ranks
) -> None:
    """With as many as then with the same bits, each rank's random numbers too."""
    path, before = committed
    counts = list(checkpointing.OPTIONS)
    found = ranks_of(ranks).run(committing.go_on, str(path), counts)
    for count in counts:
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
    found: list[list[torch.Tensor]] = ranks2.run(committing.after_two_steps, path)[0]
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
    outcomes = ranks_of(2).run_to_the_end(committing.die_while_committing, str(scratch), call)
    assert outcomes[1].failure is not None
    assert outcomes[0].failure is None
    assert outcomes[0].result.startswith("PeerError") or call == "remove"
    for ranks in (1, 2):
        copy = tmp_path / f"for-{ranks}"
        shutil.copytree(scratch, copy)
        for step, found in ranks_of(ranks).run(committing.go_on_from_crash, str(copy)):
            assert step in steps
            assert same(found, plain[step - 1])


@pytest.mark.parametrize("sees_all", [True, False])
def test_ranks_with_a_directory_each_go_on(
    sees_all: bool, tmp_path: Path, plain: list[list[torch.Tensor]], ranks2: RankPool
) -> None:
    """Also where none sees another one's, as with a disk in each machine."""
    first = ranks2.run(committing.with_a_path_each, str(tmp_path), 0, sees_all)
    assert [made for made, _, _ in first] == [0, 0]
    assert all(same(found, plain[1]) for _, found, _ in first)
    for start in (1, 2):
        again = ranks2.run(committing.with_a_path_each, str(tmp_path), 7, sees_all)
        assert [(made, notes) for made, _, notes in again] == [(2 * start, ())] * 2
    if not sees_all:
        return
    path = tmp_path / "rank-1" / "hetero-state"
    for each in (*path.glob("*.commit-?"), *path.glob("*.data")):
        each.unlink()
    with pytest.raises(RankFailure, match=r"has records of the ranks \[0\] alone"):
        ranks2.run(committing.with_a_path_each, str(tmp_path), 7, sees_all)


def test_ranks_with_some_directories_in_common_are_refused(
    ranks2: RankPool, tmp_path: Path
) -> None:
    found = ranks2.run(committing.with_paths_in_part_shared, str(tmp_path))
    for each in found:
        assert "rank 0 and rank 1 have some directories of nvme_path in common" in each
