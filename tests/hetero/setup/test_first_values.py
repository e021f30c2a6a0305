"""hetero/setup/first_values: several ranks bring values to chunks within the smallest budget."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.ranks import rank_training
from tests.support.ranks.processes import RankPool


@pytest.fixture(scope="module")
def ranks3(ranks_of: Callable[[int], RankPool]) -> RankPool:
    return ranks_of(3)


@pytest.mark.covering(1)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("numels", "frozen"),
    [
        # Chunks of 12288 elements, of which a rank has 4096: the first rank brings more than others
        # where a chunk is not full.
        pytest.param([12288] * 4 + [4096], {4}, id="a frozen chunk that is a third full"),
        pytest.param([64, 4096], set(), id="one chunk, all in the first shard"),
        pytest.param([4096, 64, 4096, 1, 64, 4096], {4, 5}, id="two chunks, which nearly are"),
        pytest.param([1, 4096, 700], {0}, id="a part without bytes on the last rank"),
    ],
)
def test_the_smallest_budget_is_enough(
    ranks3: RankPool, tmp_path: Path, numels: list[int], frozen: set[int], stage: int
) -> None:
    options = {
        "placement_policy": "nvme",
        "zero_stage": stage,
        "dtype": "bf16",
        "chunk_numel": 12288,
        "nvme_path": str(tmp_path),
    }
    for smallest, peak, masters in ranks3.run(rank_training.at_smallest, numels, frozen, options):
        check(smallest, peak, masters, numels, frozen)


@pytest.mark.parametrize("disk", [True, False])
def test_views_of_parameters_at_the_smallest_budget(
    ranks3: RankPool, tmp_path: Path, disk: bool
) -> None:
    """Their memory stays until their chunk is made."""
    numels, viewed = [4096, 12288, 700, 12288], {1, 3}
    options = {"placement_policy": "cpu", "dtype": "bf16", "chunk_numel": 12288}
    if disk:
        options |= {"placement_policy": "nvme", "nvme_path": str(tmp_path)}
    run = ranks3.run(rank_training.at_smallest, numels, set(), options, viewed)
    assert len({smallest for smallest, _, _ in run}) == 1
    for found in run:
        check(*found, numels, set())


def check(
    smallest: int, peak: int, masters: list[torch.Tensor], numels: list[int], frozen: set[int]
) -> None:
    """The peak is within the budget, and the parameters have their first values."""
    assert peak <= smallest
    for index, (numel, values) in enumerate(zip(numels, masters, strict=True)):
        wanted = torch.arange(float(numel))
        assert torch.equal(values, wanted.bfloat16().float() if index in frozen else wanted)
