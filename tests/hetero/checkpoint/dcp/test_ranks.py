"""DCP checkpoints of several ranks: FSDP2 reads hetero's, and hetero reads FSDP2's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero.checkpoint.dcp.metadata import read_metadata
from tests.support.checkpoint import dcp_ranks
from tests.support.ranks.processes import RankPool, run_ranks

pytestmark = pytest.mark.usefixtures("nothing_left")

COUNTS = [1, 2, 4]
Ranks = Callable[[int], RankPool]


@pytest.fixture(scope="module")
def saved(
    tmp_path_factory: pytest.TempPathFactory, ranks_of: Ranks
) -> tuple[Path, dict[str, list[Any]]]:
    """A checkpoint of each number of ranks, and of two of FSDP2; and what their ranks had."""
    path = tmp_path_factory.mktemp("saved")
    found = {f"hetero-{n}": ranks_of(n).run(dcp_ranks.save, str(path)) for n in COUNTS}
    # (FSDP2's tensors keep the meshes of ended process groups, so its ranks are processes anew.)
    found["fsdp-2"] = run_ranks(2, dcp_ranks.fsdp_save, str(path))
    return path, found


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    keys = set(wanted) - {"own"}
    return keys <= set(found) and all(torch.equal(found[key], wanted[key]) for key in keys)


@pytest.mark.parametrize(
    "ranks", [4, *(pytest.param(ranks, marks=pytest.mark.extra) for ranks in (1, 2))]
)
def test_any_number_of_ranks_loads_any_other(
    ranks: int, saved: tuple[Path, dict[str, list[Any]]], ranks_of: Ranks
) -> None:
    """And FSDP2's: all masters and steps, bit for bit, and states as bf16 keeps them."""
    path, before = saved
    for mine in ranks_of(ranks).run(dcp_ranks.load, str(path), list(before)):
        for name, found in mine.items():
            wanted = dict(before[name][0])
            if name == "fsdp-2":  # these ranks keep states in bf16
                kept = {k: v.bfloat16().float() for k, v in wanted.items() if " exp_avg" in k}
                wanted |= kept
            assert same(found, wanted), name


@pytest.mark.parametrize("ranks", [2, 3])
def test_fsdp2_loads_what_ranks_save(ranks: int, saved: tuple[Path, dict[str, list[Any]]]) -> None:
    path, before = saved
    names = [name for name in before if name != "fsdp-2"]
    for mine in run_ranks(ranks, dcp_ranks.fsdp_load, str(path), names):
        for name, found in mine.items():
            assert same(found, before[name][0]), name
            assert found["lr"] == 0.01


@pytest.mark.parametrize("ranks", [2])
def test_each_rank_writes_its_own_shards(
    ranks: int, saved: tuple[Path, dict[str, list[Any]]]
) -> None:
    """Of every element one rank, and none writes what would be another's."""
    path, before = saved
    metadata = read_metadata(path / f"hetero-{ranks}")
    numels = dict.fromkeys(range(ranks), 0)
    for key, boxes in metadata.boxes.items():
        if key.startswith("model.") and key != "model.count":
            for box, place in boxes:
                numels[int(place.relative_path.split("_")[2])] += box.numel
    assert list(numels.values()) == [int(rank["own"]) for rank in before[f"hetero-{ranks}"]]
    assert min(numels.values()) > 0


def test_a_rank_that_cannot_write_fails_all(ranks2: RankPool, tmp_path: Path) -> None:
    """Nothing is left, and the next save is made."""
    told = ranks2.run(dcp_ranks.save_while_one_fails, str(tmp_path))
    assert told[1][0].startswith("StoreError: ")
    assert told[0][0].startswith("StoreError: rank 1 could not save")
    assert [left for _, left in told] == [[], []]
    assert (tmp_path / "saved" / ".metadata").is_file()
