"""Durable state of several ranks: committed by N, gone on from by M."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.durable import committing
from tests.support.ranks import checkpointing
from tests.support.ranks.processes import run_ranks

pytestmark = pytest.mark.usefixtures("nothing_left")


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Any]]:
    """The durable state of each number of ranks, and what its ranks had."""
    path = tmp_path_factory.mktemp("committed")
    counts = checkpointing.OPTIONS
    return path, {n: run_ranks(n, committing.commit, str(path)) for n in counts}


@pytest.mark.parametrize("ranks", checkpointing.OPTIONS)
def test_any_number_of_ranks_goes_on_from_any_other(
    ranks: int, committed: tuple[Path, dict[int, Any]]
) -> None:
    """With as many as then with the same bits, each rank's random numbers too."""
    path, before = committed
    counts = list(checkpointing.OPTIONS)
    found = run_ranks(ranks, committing.go_on, str(path), counts)
    for count in counts:
        for rank, mine in enumerate(found):
            assert (mine[count]["step"], mine[count]["ranks"]) == (2, count)
            assert same(mine[count]["stored"], before[count][0]["stored"])
            assert mine[count]["rank"] == (rank if ranks == count else 0)
            assert mine[count]["generations"] == ["000002"]
            if ranks == count:
                assert same(mine[count]["then"], before[count][rank]["then"])
