"""Checkpoints of several ranks: saved by N, loaded by M, and what a failure of one rank does."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hetero
from hetero.checkpoint.folder import is_checkpoint
from tests.support.ranks import checkpointing
from tests.support.ranks.checkpointing import COUNTS
from tests.support.ranks.processes import RankPool
from tests.support.training.loops import same

pytestmark = pytest.mark.usefixtures("nothing_left")
Ranks = Callable[[int], RankPool]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, ranks_of: Ranks) -> tuple[Path, dict[int, Any]]:
    """A checkpoint of each number of ranks, and what its ranks had."""
    path = tmp_path_factory.mktemp("saved")
    return path, {n: ranks_of(n).run(checkpointing.save, str(path)) for n in COUNTS}


@pytest.mark.parametrize(
    "ranks", [3, *(pytest.param(ranks, marks=pytest.mark.extra) for ranks in (1, 2, 4))]
)
def test_any_number_of_ranks_loads_any_other(
    ranks: int, saved: tuple[Path, dict[int, Any]], ranks_of: Ranks
) -> None:
    """With as many as then, training goes on with the same bits, each rank's random numbers too."""
    path, before = saved
    found = ranks_of(ranks).run(checkpointing.load, str(path), COUNTS)
    for count in COUNTS:
        for rank, mine in enumerate(found):
            assert mine[count]["ranks"] == count
            assert same(mine[count]["stored"], before[count][0]["stored"])
            assert mine[count]["rank"] == (rank if ranks == count else 0)
            assert mine[count]["random_stays"] == (ranks != count)
            if ranks == count:
                assert same(mine[count]["then"], before[count][rank]["then"])


@pytest.mark.parametrize("dcp", [False, True])
def test_a_rank_that_cannot_write_fails_all(dcp: bool, ranks2: RankPool, tmp_path: Path) -> None:
    """What was there before stays, and training goes on."""
    first, second = ranks2.run(checkpointing.save_while_one_fails, str(tmp_path), dcp)
    assert second[0].startswith("StoreError: ")
    assert first[0].startswith("StoreError: rank 1 could not save")
    assert "no room" in first[0]
    assert first[1] == second[1] == ([] if dcp else ["saved"])
    assert (tmp_path / "saved" / (".metadata" if dcp else "manifest.json")).is_file()


def test_unfrozen_parameters_and_a_rank_that_cannot_open(ranks2: RankPool, tmp_path: Path) -> None:
    """They are taken in by all ranks or by none, before some rank looks for the files."""
    first, second = ranks2.run(checkpointing.load_after_unfreezing, str(tmp_path))
    assert first[0].startswith("CheckpointError: rank 1 could not load")
    assert second[0] == "CheckpointError: it is gone"
    assert first[1] == second[1] == ""


def test_all_are_told_of_a_save_of_which_one_was_not(ranks2: RankPool, tmp_path: Path) -> None:
    """The others wait for it in the next save, which one rank would not begin."""
    first, second = ranks2.run(checkpointing.save_after_one_was_told, str(tmp_path))
    assert first[0].startswith("StoreError: rank 1 could not begin to save")
    assert "no room" in first[0]
    assert "no room" in second[0]
    assert first[1] == second[1] == ""
    assert is_checkpoint(tmp_path / "saved")


def test_damage_that_one_rank_finds_is_every_ranks(ranks2: RankPool, tmp_path: Path) -> None:
    """And no rank uses what is half loaded, until all have loaded another checkpoint."""
    for told in ranks2.run(checkpointing.load_what_one_cannot_read, str(tmp_path)):
        assert len(told) == 3, told
        assert "damaged" in told[0]
        assert told[1].startswith("HeteroError: the model is half loaded from")
        assert told[2] is True


def test_a_rank_that_is_killed_while_it_saves(ranks2: RankPool, tmp_path: Path) -> None:
    outcomes = ranks2.run_to_the_end(checkpointing.die_in_save, str(tmp_path))
    assert outcomes[1].failure is not None
    assert outcomes[0].failure is None
    assert outcomes[0].result.startswith("PeerError")
    assert is_checkpoint(tmp_path / "saved")
    model, optimizer = checkpointing.build(0, 1, str(tmp_path), 7, checkpointing.OPTIONS[1])
    assert hetero.load(tmp_path / "saved", model, optimizer).ranks == 2
    hetero.save(tmp_path / "saved", model, optimizer)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    optimizer.engine.close()


def test_an_error_says_how_long_a_rank_was_waited_for(ranks2: RankPool, tmp_path: Path) -> None:
    """Here for rank_timeout_s, and never for 0 s."""
    found = ranks2.run(checkpointing.save_alone, str(tmp_path))[0]
    waited = re.search(r"rank 1 did not take part in .* within (\d+) s", found)
    assert waited is not None, found
    assert int(waited[1]) >= 3
