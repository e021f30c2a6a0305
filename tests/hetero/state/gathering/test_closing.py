"""A rank that closes its engine answers those that go on computing, whatever they gather."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.gathering.closing import (
    break_off_when_one_has,
    close_early,
    close_inside_forward,
)
from tests.support.ranks.processes import RankPool

# So long after the last step: before the others' next gather begins, during it, and after it.
PAUSES_S = [0.0, 0.003, 0.02]
WHOLE: dict[int, list[Any]] = {}  # by their number, of ranks that all go on


@pytest.mark.covering(1)
@pytest.mark.parametrize("pause_s", PAUSES_S)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_ranks(ranks2: RankPool, stage: int, pause_s: float) -> None:
    check(ranks2, {"zero_stage": stage}, [1], pause_s)


def test_shards_on_nvme(ranks2: RankPool, tmp_path: Path) -> None:
    options = {"zero_stage": 3, "placement_policy": "nvme", "nvme_path": str(tmp_path)}
    check(ranks2, options, [0], 0.003)


@pytest.mark.parametrize("quits", [[0, 3], [1, 2, 3]])
def test_four_ranks(ranks4: RankPool, quits: list[int]) -> None:
    check(ranks4, {"zero_stage": 3}, quits, 0.003)


def test_an_error_of_the_program_inside_forward(ranks2: RankPool) -> None:
    """All-gathers are under way when the rank closes; what it answers comes all the same."""
    whole = of_whole(ranks2)
    for _ in range(2):
        found = ranks2.run(close_inside_forward, {"zero_stage": 3})
        for (outputs, failed), (right, _) in list(zip(found, whole, strict=True))[:-1]:
            assert all(map(torch.equal, outputs, right))
            assert not failed


@pytest.mark.parametrize("stage", [1, 3])
def test_devices_that_gather_by_themselves(ranks2: RankPool, stage: int) -> None:
    """What comes through RAM can be read; the link to the device is an emulated one."""
    options = {"backend": "emulated", "device_memory": "600KiB", "link_gbps": 1.0}
    check(ranks2, {"zero_stage": stage, **options}, [1], 0.003)


def test_an_end_of_one_connection_leaves_no_other_open(ranks4: RankPool) -> None:
    assert ranks4.run(break_off_when_one_has) == [True] * 4


def of_whole(ranks: RankPool) -> list[Any]:
    """Stages and placements change no bit."""
    if ranks.world not in WHOLE:
        WHOLE[ranks.world] = ranks.run(close_early, {"zero_stage": 3}, [], 0.0)
    return WHOLE[ranks.world]


def check(ranks: RankPool, options: dict[str, Any], quits: list[int], pause_s: float) -> None:
    whole = of_whole(ranks)
    found = ranks.run(close_early, options, quits, pause_s)
    for rank, ((outputs, told), (right, _)) in enumerate(zip(found, whole, strict=True)):
        if rank in quits:
            continue
        assert all(map(torch.equal, outputs, right))
        assert "closed its engine" in told
