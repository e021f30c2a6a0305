"""Ranks on CUDA, of which several may share a GPU: one result for every stage and placement."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.cuda.ranks import train_on_gpu
from tests.support.ranks.processes import RankPool

SETTINGS = [
    pytest.param({"zero_stage": 1, "placement_policy": "cpu"}, id="1-cpu"),
    pytest.param({"zero_stage": 2, "placement_policy": "cpu"}, id="2-cpu"),
    pytest.param({"zero_stage": 3, "placement_policy": "cpu"}, id="3-cpu"),
    pytest.param({"zero_stage": 3, "placement_policy": "nvme", "host_memory": "1MiB"}, id="3-nvme"),
    pytest.param(
        {"zero_stage": 3, "placement_policy": "auto", "device_memory": "1MiB"}, id="3-auto"
    ),
    pytest.param({"zero_stage": 2, "placement_policy": "cuda"}, id="2-all-on-device"),
    pytest.param({"zero_stage": 3, "placement_policy": "cuda"}, id="3-all-on-device"),
]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """As many ranks as there are GPUs, two at least and four at most."""
    with RankPool(min(4, max(2, torch.cuda.device_count()))) as made:
        yield made


@pytest.fixture(scope="module")
def everything_gathered(pool: RankPool) -> list[list[torch.Tensor]]:
    options = {"zero_stage": 3, "placement_policy": "cpu", "device_memory": "64MiB"}
    return pool.run(train_on_gpu, options)


@pytest.mark.parametrize("settings", SETTINGS)
def test_same_bits_for_every_stage_and_placement(
    pool: RankPool,
    everything_gathered: list[list[torch.Tensor]],
    settings: dict[str, Any],
    tmp_path: Path,
) -> None:
    options = {"device_memory": "400KiB", "nvme_path": str(tmp_path), **settings}
    if settings["placement_policy"] == "cuda":
        options["device_memory"] = "64MiB"
    for found, wanted in zip(pool.run(train_on_gpu, options), everything_gathered, strict=True):
        assert len(found) == len(wanted)
        assert all(map(torch.equal, found, wanted))
